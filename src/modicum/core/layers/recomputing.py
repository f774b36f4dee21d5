"""Blocks that keep nothing and run again in the backward pass, in contexts that a run gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch.utils.checkpoint import checkpoint

MakesContext = Callable[[], AbstractContextManager[object]]
_again: ContextVar[MakesContext] = ContextVar("again", default=nullcontext)


@contextmanager
def recomputing_in(context: MakesContext | None) -> Iterator[None]:
    """Forward passes in here run again, where they do, within `context()`.

    It is made as the forward pass runs, and entered by the thread that computes gradients.
    """
    token = _again.set(context or nullcontext)
    try:
        yield
    finally:
        _again.reset(token)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, whose inner activations are computed anew in the backward pass."""
    context = _again.get()
    if context is nullcontext:  # with contexts of one's own, compiling would not see through it
        return checkpoint(function, *arguments, use_reentrant=False)
    contexts = lambda: (nullcontext(), context())  # noqa: E731
    return checkpoint(function, *arguments, use_reentrant=False, context_fn=contexts)
