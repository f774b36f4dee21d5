"""Which layers of an architecture no gradient reaches, seen on a small random model of it.

A decoder that was the half of an encoder–decoder keeps the layers that look at the encoder, and
never calls them. Layers that choose tokens or experts by their order give no gradient either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from modicum.core.layers.layer_sites import survey
from modicum.models.transformers.kinds import HeadKind
from modicum.models.transformers.shown import TOKENS, small_model

_LENGTH = 20
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name


def unreached(raw: Mapping[str, Any], names: Iterable[str], head: HeadKind) -> frozenset[str]:
    """Of these linear layers those whose weights get no gradient.

    Names that differ in numbers alone are of one kind, and a kind is left where none of it gets
    one. Where no small model runs, nothing is known, and nothing is named.
    """
    # In a thread of its own, as who asks may be where modules get no memory and no numbers.
    with ThreadPoolExecutor(1) as threads:
        kinds = threads.submit(_kinds, raw, head).result()
    return frozenset(name for name in names if _kind(name) in kinds)


def _kinds(raw: Mapping[str, Any], head: HeadKind) -> set[str]:
    with torch.random.fork_rng(devices=[]):
        model = small_model(raw, head)
    if model is None:
        return set()
    generator = torch.Generator().manual_seed(0)
    size = min(TOKENS, model.decoder_config.vocabulary_size)
    ids = torch.randint(1, size, (2, _LENGTH), generator=generator)
    layers = {name: model.get_submodule(name).weight for name in survey(model, ["linear"]).every}
    try:
        model(ids).float().square().sum().backward()
    except Exception:  # whatever a model's own code says of a backward pass
        return set()
    reached = {_kind(name) for name, weight in layers.items() if weight.grad is not None}
    return {_kind(name) for name in layers} - reached


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)
