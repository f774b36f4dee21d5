"""What the checks of linear forms work on: layers of odd sizes, and a small decoder of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.linear_forms import LinearForm, linear_form
from modicum.core.layers.meta import on_meta
from modicum.linears.base import LinearMethod
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.contracts.adapters.subjects import LLAMA
from modicum.proofs.contracts.adapters.subjects import assert_close as assert_close
from modicum.proofs.contracts.adapters.subjects import numbers as numbers
from modicum.proofs.contracts.adapters.subjects import odd_model as odd_model
from modicum.proofs.contracts.adapters.subjects import tokens as tokens
from modicum.proofs.contracts.base import check
from modicum.proofs.contracts.compress.subjects import next_token as next_token

LinearSubject = type[LinearMethod] | LinearMethod

linears_check = partial(check, "linears")
# For checks that ask which dense weight a layer is.
dense_check = partial(check, "linears", unless=("has_no_dense_weight",))
# Inputs, outputs, bias: odd ones, more and fewer outputs than inputs, and several groups of codes.
SIZES = ((7, 5, True), (5, 13, False), (129, 33, True), (64, 96, False))


def small(subject: LinearSubject, **fields: Any) -> LinearMethod:
    """A value of the method that fits the small models, with `fields` set."""
    if isinstance(subject, LinearMethod):
        return type(subject)(**(subject.model_dump() | fields))
    return subject.tiny(**fields)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor], why: str) -> None:
    """Two layers' tensors are the same to the bit."""
    assert one.keys() == other.keys(), why
    assert all(torch.equal(one[name], other[name]) for name in one), why


def form_of_value(value: LinearMethod) -> LinearForm:
    """The form that the method's layers have."""
    return linear_form(value.info.name)


def weights(ins: int, outs: int, bias: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A dense weight and a bias of this shape."""
    offset = numbers(outs, name="bias", dtype=dtype) if bias else None
    return numbers(outs, ins, name="weight", dtype=dtype), offset


def layers(
    value: LinearMethod, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[nn.Module, Tensor, dict[str, Any]]]:
    """Layers of all sizes that take the form, the weights they were made of, their arguments."""
    form = form_of_value(value)
    for ins, outs, bias in SIZES:
        arguments = value.arguments(ins, outs)
        if arguments is not None:
            weight, offset = weights(ins, outs, bias, dtype)
            layer = form.from_dense(weight.clone(), offset, **arguments)
            yield layer, weight, dict(arguments)


def decoder_config(value: LinearMethod, **fields: Any) -> ModelConfig:
    """The configuration of a small decoder whose projections take the form."""
    config = replace(LLAMA, initializer_range=0.3, **fields)
    with on_meta():
        return replace(config, forms=value.plan(Llama(config)))


def decoder(value: LinearMethod, seed: int = 0, **fields: Any) -> Llama:
    """A small decoder, new, with its projections in the form."""
    return create(decoder_config(value, **fields), seed)
