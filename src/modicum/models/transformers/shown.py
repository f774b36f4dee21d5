"""What is shown of an architecture before it is trained, on a small random model of it.

Whether no token sees a later one, whether documents that share a row are computed as each would be
alone, and whether a row is continued by a cache as it would be anew. Nothing is taken from names;
what is not shown is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.models.transformers.buffers import stored_buffers
from modicum.models.transformers.kinds import HeadKind
from modicum.models.transformers.model import TransformersDecoder, build, mixers
from modicum.models.transformers.reduced import WAYS, Way, reduced
from modicum.models.transformers.shape import Packing, TransformersShape

TOKENS = 61
_LENGTHS = (9, 1, 7, 3)  # of the documents in a row, longer and shorter than the window
_PROMPTS, _AFTER = (1, 12), 6  # tokens that are read together, and one at a time
_CLOSE, _FAR = 1e-5, 1e-3  # of the largest logit: the same numbers, and others
_SUMMED = 1e-4  # the same where one token's sums are made in another order than all tokens'
_LARGEST = 10**7  # parameters of a model that is small enough as it is


@dataclass(frozen=True)
class Shown:
    """What was seen.

    Args:
        packing: with what documents that share a row have the logits that they have alone.
        refused: why the model cannot be trained to predict the next token; None: it can.
        caches: whether a row that is continued by a cache has the logits that it has anew.
        mixers: names of the classes that were seen to work with a cache, or without.
    """

    packing: Packing
    refused: str | None = None
    caches: bool = False
    mixers: frozenset[str] = frozenset()


def shown(raw: Mapping[str, Any]) -> Shown:
    """Build a small model of the same architecture, and look."""
    model, why = smallest(raw)
    if model is None:
        problem = "no small model of this architecture can be run to see what it does"
        return Shown("none", f"{problem} ({why})")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TOKENS, (1, sum(_LENGTHS)), generator=generator)
    ids = ids % model.decoder_config.vocabulary_size
    with torch.no_grad():
        row = model(ids)
        if _looks_ahead(model, ids, row):
            return Shown("none", "its logits depend on later tokens, so it cannot be trained so")
        caches = _caches(model, ids, row)
        return Shown(_packing(model, ids, row), caches=caches, mixers=mixers(model))


def _looks_ahead(model: TransformersDecoder, ids: Tensor, row: Tensor) -> bool:
    """Whether the first logits are others with other tokens after them, or with none."""
    first = _LENGTHS[0]
    others = torch.cat([ids[:, :first], ids[:, first:].flip(1)], 1)
    if not same(model(others)[:, :first], row[:, :first]):
        return True
    # Sums of other lengths are rounded otherwise, which deep models make larger.
    return _distance(model(ids[:, :first]), row[:, :first]) > _FAR


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


def _caches(model: TransformersDecoder, ids: Tensor, row: Tensor) -> bool:
    before = model.decoder_config
    model.decoder_config = replace(before, caches=True)
    try:
        for prompt in _PROMPTS:
            end = prompt + _AFTER
            found = _continued(model, ids[:, :end], prompt)
            if not _distance(found, row[:, prompt - 1 : end]) <= _SUMMED:
                return False
        return same(model(ids), row)  # a model may keep in its modules what it has read
    except Exception:  # whatever a model says of a cache that is not its own
        return False
    finally:
        model.decoder_config = before


def _continued(model: TransformersDecoder, ids: Tensor, prompt: int) -> Tensor:
    """The logits after a prompt and after each token that follows it."""
    states, found = model.new_states(1), []
    for part in (ids[:, :prompt], *ids[:, prompt:].split(1, 1)):
        logits, states = model.continued(part, states)
        found.append(logits)
    return torch.stack(found, 1)


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of logits are the same but for rounding."""
    return _distance(found, expected) <= _CLOSE


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def small_model(raw: Mapping[str, Any], head: HeadKind = "tokens") -> Any:
    """A small model of the same architecture that runs, or None; a classifier pads with token 0."""
    return smallest(raw, head)[0]


def smallest(raw: Mapping[str, Any], head: HeadKind = "tokens") -> tuple[Any, str]:
    """As `small_model`; and where there is none, why not."""
    why = ""
    for way in WAYS:
        try:
            model = _made(raw, way, head)
            if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
                why = why or "its blocks are too large"
                continue
            if stored_buffers(model):  # decays, masks: zeros in their places would hide a layer
                model = build(model.decoder_config)
            materialise(model, "cpu")
            _draw(model)
            with torch.no_grad():
                found = model.eval()(torch.zeros(1, 2, dtype=torch.int64))
        except Exception as error:  # sizes that do not go together, whatever the model says of them
            why = _said(error)
            continue
        if found.isfinite().all():
            return model, ""
        why = "it computes numbers that are not finite"
    return None, why


def _said(error: Exception) -> str:
    if isinstance(error, InputError):
        return error.problem
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _made(raw: Mapping[str, Any], way: Way, head: HeadKind) -> Any:
    made = reduced(raw, TOKENS, way)
    padding = {"pad_token_id": 0} if head == "classes" else {}
    with on_meta():
        return build(TransformersShape(made | padding, head=head))


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
