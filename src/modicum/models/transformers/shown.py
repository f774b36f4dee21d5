"""What is shown of an architecture before it is trained, on a small random model of it.

Whether no token sees a later one, and whether documents that share a row are computed as each would
be alone. Nothing is taken from names; what is not shown is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.meta import materialise, on_meta
from modicum.models.transformers.buffers import stored_buffers
from modicum.models.transformers.kinds import HeadKind
from modicum.models.transformers.model import TransformersDecoder, build
from modicum.models.transformers.reduced import reduced
from modicum.models.transformers.shape import Packing, TransformersShape

TOKENS = 61
_LENGTHS = (9, 1, 7, 3)  # of the documents in a row, longer and shorter than the window
_CLOSE, _FAR = 1e-5, 1e-3  # of the largest logit: the same numbers, and others
_LARGEST = 3 * 10**7  # parameters of a model that is small enough as it is


@dataclass(frozen=True)
class Shown:
    """What was seen.

    Args:
        packing: with what documents that share a row have the logits that they have alone.
        refused: why the model cannot be trained to predict the next token; None: it can.
    """

    packing: Packing
    refused: str | None = None


def shown(raw: Mapping[str, Any]) -> Shown:
    """Build a small model of the same architecture, and look."""
    model: TransformersDecoder | None = small_model(raw)
    if model is None:
        return Shown("none", "no small model of this architecture can be run to see what it does")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TOKENS, (1, sum(_LENGTHS)), generator=generator)
    ids = ids % model.decoder_config.vocabulary_size
    with torch.no_grad():
        row = model(ids)
        first = _LENGTHS[0]
        if not same(model(ids[:, :first]), row[:, :first]):
            return Shown("none", "its logits depend on later tokens, so it cannot be trained so")
        return Shown(_packing(model, ids, row))


def _packing(model: TransformersDecoder, ids: Tensor, row: Tensor) -> Packing:
    lengths = torch.tensor(_LENGTHS)
    documents = torch.arange(len(lengths)).repeat_interleave(lengths)[None].int()
    alone = torch.cat([model(part) for part in ids.split(_LENGTHS, 1)], 1)
    if _distance(row[:, _LENGTHS[0] :], alone[:, _LENGTHS[0] :]) < _FAR:
        return "none"  # a model that hardly looks back would show nothing
    ways: tuple[Packing, ...] = ("positions", "mask")
    for packing in ways:
        model.decoder_config = replace(model.decoder_config, packing=packing)
        try:
            # Next to another row, as transformers may look at the number of rows.
            packed = model(ids.expand(2, -1), documents.expand(2, -1))
        except Exception:  # whatever a model says of positions that it does not take
            continue
        if all(same(each[None], alone) for each in packed):
            return packing
    return "none"


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of logits are the same but for rounding."""
    return _distance(found, expected) <= _CLOSE


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def small_model(raw: Mapping[str, Any], head: HeadKind = "tokens") -> Any:
    """A small model of the same architecture that runs, or None; a classifier pads with token 0."""
    for config in _candidates(raw, head):
        try:
            with on_meta():
                model = build(config)
            if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
                continue
            if stored_buffers(model):  # decays, masks: zeros in their places would hide a layer
                model = build(config)
            materialise(model, "cpu")
            _draw(model)
            with torch.no_grad():
                found = model.eval()(torch.zeros(1, 2, dtype=torch.int64))
        except Exception:  # sizes that do not go together, whatever the model says of them
            continue
        if found.isfinite().all():
            return model
    return None


def _candidates(raw: Mapping[str, Any], head: HeadKind) -> Iterator[TransformersShape]:
    for narrow in (True, False):
        try:
            made = reduced(raw, TOKENS, narrow=narrow)
            padding = {"pad_token_id": 0} if head == "classes" else {}
            yield TransformersShape(made | padding, head=head)
        except Exception:  # as above
            continue


@torch.no_grad()
def _draw(model: TransformersDecoder) -> None:
    """Random weights so large that tokens look at some of those before them and not at others."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.copy_(noise * (1.5 / min(parameter.shape[-2:]) ** 0.5))
        else:
            parameter.copy_(1 + 0.2 * noise)
