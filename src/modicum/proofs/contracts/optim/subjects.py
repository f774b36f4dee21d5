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
from modicum.core.contracts.state import optimizer_state, trained_state
from modicum.core.random import normal_
from modicum.models import ModelConfig, create
from modicum.models.llama import Llama
from modicum.proofs.contracts.base import check

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


class TrainedOptimizer:
    """A model, its optimizer, and what a checkpoint of the two holds."""

    def __init__(self, value: OptimizerMethod, model: nn.Module | None = None) -> None:
        self.model = llama() if model is None else model
        self.optimizer = bound(value, self.model)
        self.state = {
            "model": trained_state(self.model),
            "optimizer": optimizer_state(self.optimizer),
        }

    def backward(self, step: int) -> float:
        """The gradients of step number `step`, and its loss."""
        found = loss(self.model, tokens(seed=step))
        found.backward()
        return found.item()

    def steps(self, first: int, last: int) -> list[float]:
        """Train from one step to another; the losses."""
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def read(self) -> dict[str, dict[str, Any]]:
        """A copy of all state."""
        return {name: _copied(read()) for name, (read, _) in self.state.items()}

    def write(self, saved: dict[str, dict[str, Any]]) -> None:
        """Put all state back."""
        for name, (_, put) in self.state.items():
            put(saved[name])


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def assert_equal(one: nn.Module, other: nn.Module, what: str) -> None:
    """Demand that two models have the same weights, to the bit."""
    theirs = dict(other.named_parameters())
    for name, value in one.named_parameters():
        assert torch.equal(value, theirs[name]), f"{name} differs {what}"
