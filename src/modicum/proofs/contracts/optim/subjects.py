"""What the checks of optimizers work on: small models, small values, a few steps of training."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.method import Method
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.random import normal_
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.contracts.base import check
from modicum.proofs.contracts.small_training import SmallTraining

OptimizerSubject = type[OptimizerMethod] | OptimizerMethod


def without_a_class(subject: type[Method] | Method) -> str | None:
    """Why checks of PyTorch's optimizers say nothing of a method; None: it has one."""
    known = isinstance(subject, OptimizerMethod) or hasattr(subject, "optimizer_class")
    return None if known else "its step program has no PyTorch optimizer"


optimizers_check = partial(check, "optim", slot="optimizer", refuses=without_a_class)
RATE = 1e-2
# Widths that are no powers of two, a matrix of each orientation, a tie.
LLAMA = ModelConfig(
    vocabulary_size=29,
    width=18,
    layers=1,
    heads=3,
    mlp_width=31,
    context=32,
    tied_embeddings=True,
    initializer_range=0.3,
)


def small(subject: OptimizerSubject, **fields: Any) -> OptimizerMethod:
    """A value of the method that fits the small models, with `fields` set."""
    if isinstance(subject, OptimizerMethod):
        return type(subject)(**(subject.fields() | fields))
    return subject.tiny(**fields)


def llama(dtype: torch.dtype = torch.float32, **fields: Any) -> Llama:
    """modicum's decoder, one block of width 18, embeddings tied."""
    return create(ModelConfig(**(vars(LLAMA) | fields)), seed=0).to(dtype)


def tokens(rows: int = 4, length: int = 9, seed: int = 0) -> Tensor:
    """Token ids [rows, length] for `llama`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(LLAMA.vocabulary_size, (rows, length), generator=generator)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean cross-entropy of the next token."""
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def numbers(*shape: int, name: str = "numbers", dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers that depend on the name alone."""
    return normal_(torch.empty(shape, dtype=dtype), seed=0, name=name)


def bound(value: OptimizerMethod, model: nn.Module) -> torch.optim.Optimizer:
    """The value's optimizer over all that a model trains."""
    decay = value.fields().get("weight_decay", 0.0)
    return value.bind(optimizer_groups(model, learning_rate=RATE, weight_decay=decay))


class TrainedOptimizer(SmallTraining):
    """A model and the method's optimizer in training."""

    def __init__(self, value: OptimizerMethod, model: nn.Module | None = None) -> None:
        model = llama() if model is None else model
        super().__init__(model, _loss_of_step, bound(value, model))


def _loss_of_step(model: nn.Module, step: int) -> Tensor:
    return loss(model, tokens(seed=step))


def assert_equal(one: nn.Module, other: nn.Module, what: str) -> None:
    """Demand that two models have the same weights, to the bit."""
    theirs = dict(other.named_parameters())
    for name, value in one.named_parameters():
        assert torch.equal(value, theirs[name]), f"{name} differs {what}"
