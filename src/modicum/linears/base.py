"""Linear forms: what may stand in the place of an `nn.Linear`, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError


@dataclass(frozen=True)
class LinearForm:
    """One way to hold the map y = x W^T + b, W of shape [out_features, in_features].

    Args:
        name: what a recipe and `make_linear` call it.
        make: `make(in_features, out_features, bias, device=, dtype=)`, an uninitialised layer.
        from_dense: the layer that stands for a given weight and bias.
        to_dense: the full weight [out_features, in_features] that a layer stands for.
    """

    name: str
    make: Callable[..., nn.Module]
    from_dense: Callable[[Tensor, Tensor | None], nn.Module]
    to_dense: Callable[[nn.Module], Tensor]


FORMS: dict[str, LinearForm] = {}


def register(form: LinearForm) -> LinearForm:
    """Make `form` known by its name; a later one of the same name takes its place."""
    FORMS[form.name] = form
    return form


def linear_form(name: str) -> LinearForm:
    """The form of that name.

    Raises:
        InputError: no form has that name.
    """
    if name not in FORMS:
        raise InputError(
            "no linear form has this name",
            field="linear",
            value=name,
            allowed=", ".join(sorted(FORMS)),
            candidates=FORMS,
        )
    return FORMS[name]


def make_linear(
    form: str,
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """An uninitialised layer from `in_features` to `out_features` in the form of that name.

    Raises:
        InputError: no form has that name.

    >>> make_linear("dense", 4, 2, bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    """
    return linear_form(form).make(in_features, out_features, bias, device=device, dtype=dtype)
