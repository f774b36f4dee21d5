"""The mode in which a model is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode (no dropout), and back."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
