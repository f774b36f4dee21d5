"""What the checks of compressors work on: small models that were calibrated and made smaller."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from modicum.compress.base import Compressed, Compressor
from modicum.compress.compressed_model import CompressedModel
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.contracts.adapters.subjects import assert_close as assert_close
from modicum.proofs.contracts.adapters.subjects import llama as llama
from modicum.proofs.contracts.adapters.subjects import numbers as numbers
from modicum.proofs.contracts.adapters.subjects import odd_model as odd_model
from modicum.proofs.contracts.adapters.subjects import tokens as tokens
from modicum.proofs.contracts.base import check

CompressSubject = type[Compressor] | Compressor

compress_check = partial(check, "compress")


def small(subject: CompressSubject, **fields: Any) -> Compressor:
    """A value of the method that fits the small models, with `fields` set."""
    if isinstance(subject, Compressor):
        return type(subject)(**(subject.model_dump() | fields))
    return subject.tiny(**fields)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The sum of the next tokens' losses; ids [B, T]."""
    logits = model(ids[:, :-1]).flatten(0, 1).float()
    return F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")


def calibrated(value: Compressor, model: nn.Module) -> Calibration:
    """What the method asks for of a small decoder, over two batches."""
    return value.calibrate(model, [tokens(4), tokens(2, 9)], next_token)


def compressed(value: Compressor, model: nn.Module | None = None) -> Compressed:
    """A small decoder after the method was fitted."""
    model = llama() if model is None else model
    return value.fit(model, calibrated(value, model))


def wrapped(value: Compressor, model: nn.Module, like: Compressed) -> Compressed:
    """The model with the forms of a fitted one, without its numbers; by arithmetic, if it can."""
    if "plans_from_weights" not in value.traits:
        return value.wrap(model)
    handle = CompressedModel(model, like.plan)
    handle.wrap()
    return handle


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of every parameter, by name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def factored(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that are low-rank factors, by name."""
    kind = linear_form("low_rank").kind
    return {name: module for name, module in model.named_modules() if type(module) is kind}
