"""What the checks of policies on activations work on: small classifiers, and one update."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.random import normal_
from modicum.memory.activations import Activations
from modicum.memory.base import ActivationPolicy
from modicum.models.convnet import ConvNet, ConvNetConfig, create
from modicum.proofs.contracts.base import check

MemorySubject = type[ActivationPolicy] | ActivationPolicy

memory_check = partial(check, "memory")
CONFIG = ConvNetConfig(classes=5, size=16, widths=(8, 8, 12, 12))
ROWS = 6


def small(subject: MemorySubject) -> ActivationPolicy:
    """A value of the method; as a class, its tiny form."""
    return subject if isinstance(subject, ActivationPolicy) else subject.tiny()


def classifier(norm: str = "none") -> ConvNet:
    """Four convolutions, two ReLUs of which are pooled."""
    config = ConvNetConfig(**(vars(CONFIG) | {"norm": norm}))
    return create(config, seed=0)


def batch(step: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Images and labels that depend on the step alone."""
    images = normal_(torch.empty(rows, 3, 16, 16), seed=0, name="images", step=step)
    return images, (images.mean((1, 2, 3)) * 40).long() % 5


def gradients(
    model: nn.Module, runtime: Activations | None, step: int = 0, half: bool = False
) -> dict[str, Tensor]:
    """Gradients of every parameter, and of the images, with the policy or without it."""
    images, labels = batch(step)
    images.requires_grad_()
    context = nullcontext() if runtime is None else runtime.context()
    lower = torch.autocast("cpu", torch.bfloat16) if half else nullcontext()
    with context, lower:
        loss = F.cross_entropy(model(images).float(), labels)
    loss.backward()
    found = {name: taken(parameter) for name, parameter in model.named_parameters()}
    return found | {"images": taken(images)}


def taken(parameter: Tensor) -> Tensor:
    """A parameter's gradient, which it then has no more."""
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "a parameter has no gradient"
    return gradient


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, runtime: Activations, steps: range
) -> list[float]:
    """Updates of one batch each, and their losses."""
    losses = []
    for step in steps:
        images, labels = batch(step)
        runtime.before_update()
        with runtime.context():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        runtime.observe(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        runtime.after_step(step + 1)
        losses.append(loss.item())
    return losses


def is_weight_of_convolution(name: str, values: dict[str, Any]) -> bool:
    """Whether a policy may change this gradient: convolutions' weights have four dimensions."""
    return name != "images" and values[name].ndim > 2
