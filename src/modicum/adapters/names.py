"""Names of layers as the plain model has them, whoever compiled it, and targets from such names."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn

from modicum.core.layers.targets import named
from modicum.core.torch_private import COMPILED_NAME


def plain_name(name: str) -> str:
    """A dotted name without what `torch.compile` puts into it.

    >>> plain_name("_orig_mod.layers.0._orig_mod.q_proj")
    'layers.0.q_proj'
    """
    return ".".join(part for part in name.split(".") if part != COMPILED_NAME)


def plain_model(model: nn.Module) -> nn.Module:
    """The module that a compiled one represents."""
    inner = getattr(model, COMPILED_NAME, model)
    assert isinstance(inner, nn.Module)
    return inner


def exactly(known: Iterable[str], names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The fields `targets` and `exclude` of an adapter for the layers of these full names alone.

    A full name is the last part of others too: that of `0` is one of `1.0`.

    Args:
        known: the full names of all layers that targets may name.
    """
    others = (name for name in known if name not in names)
    return {"targets": tuple(names), "exclude": tuple(o for o in others if named(o, names))}
