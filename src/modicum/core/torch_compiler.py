"""Every part of torch's compiler that torch calls private, next to those of `torch_private`."""

from __future__ import annotations

import functools
import importlib
import locale
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch


def compiled(function: Any, **options: Any) -> Any:
    """`torch.compile`, also where the locale's encoding is not UTF-8.

    Inductor, of which every backend imports something, reads its templates in the locale's, and
    in 2.13 one of them has letters that ASCII has not.
    """
    if locale.getpreferredencoding(False).lower().replace("-", "") != "utf8":
        from torch._inductor import utils

        utils.__dict__.setdefault("open", functools.partial(open, encoding="utf-8"))
    return torch.compile(function, **options)


_WITHIN_ROWS = "sums within rows"


@contextmanager
def compiler_settings(limits: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[None]:
    """Settings of the compiler while the context lasts.

    A backward pass is compiled with its forward pass: by default it is when it is first run, which
    is after the context has ended.

    Args:
        limits: of `torch._dynamo.config`, which must have them.
        wanted: of `torch._inductor.config`; those that this version does not have are left out.
    """
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    traced = dict(limits)
    # Python 3.13.0 has a bug that makes the compiler's checks before each call slower, nothing
    # else: whoever compiles has timed them, and needs no warning.
    if hasattr(dynamo, "issue_3_13_0_warning"):
        traced["issue_3_13_0_warning"] = False
    at_once, there = {"force_non_lazy_backward_lowering": True}, _settings_there()
    lowered = {name: value for name, value in at_once.items() if name in there}
    known = {name: value for name, value in wanted.items() if name in there}
    with (
        _patched(dynamo, traced),
        _patched(functorch, lowered),
        _patched(inductor, known),
        _reductions_within_rows(),
    ):
        yield


def _patched(settings: Any, changes: Mapping[str, Any]) -> AbstractContextManager[Any]:
    return _patch(settings, tuple(changes.items()), threading.get_ident())


@functools.cache
def _patch(settings: Any, changes: tuple[tuple[str, Any], ...], thread: int) -> Any:
    """Made once for a thread: torch 2.13 never frees what it makes for a patch."""
    return settings.patch(dict(changes))


@functools.cache
def _settings_there() -> frozenset[str]:
    """The names of all settings but those of the tracer; to ask for them takes long."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    return frozenset({*functorch.get_config_copy(), *inductor.get_config_copy()})


@contextmanager
def _reductions_within_rows() -> Iterator[None]:
    """Sums over an axis that C++ kernels store within their rows, where torch 2.13 does not.

    Where two axes are tiled and another lies between them, the last tile's sums are stored as wide
    as a vector: into the next row, and beyond the end of the tensor (PyTorch's issue 196681).
    """
    cached: Any = importlib.import_module("torch.compiler.config")

    kernel = _kernels_of_loops()
    stored = None if kernel is None else vars(kernel).get("aggregate_reduction_buffers")
    if kernel is None or stored is None:
        yield
        return

    def within_rows(self: Any, split: bool, outer: Any) -> Any:
        if not split and outer is not None:
            loops = self.loop_nest.loops
            inner = loops[[loop.var for loop in loops].index(outer.var) + 1 :]
            split = not outer.is_reduction and any(loop.is_reduction for loop in inner)
        return stored(self, split, outer)

    kernel.aggregate_reduction_buffers = within_rows
    try:
        # Kernels made without it are others, and so are those under another tag of the user's.
        tag = f"{cached.cache_key_tag} {_WITHIN_ROWS}".lstrip()
        with _patched(cached, {"cache_key_tag": tag}):
            yield
    finally:
        kernel.aggregate_reduction_buffers = stored


@functools.cache
def _kernels_of_loops() -> Any:
    """Inductor's class of C++ kernels that are several, for main parts and tails of loops."""
    with suppress(ImportError, AttributeError):
        from torch._inductor.codegen import cpp

        return cpp.CppKernelProxy
    return None


def load_compiler() -> None:
    """Import the compiler and all that it imports, as torch does for the first optimizer."""
    import torch._dynamo  # noqa: F401


def compiler_is_loaded() -> bool:
    """Whether something has imported the compiler in this process."""
    return "torch._dynamo.convert_frame" in sys.modules


def graph_breaks() -> int:
    """How often the compiler gave a piece of code back to Python, in this process so far."""
    from torch._dynamo.utils import counters

    return sum(counters["graph_break"].values())


def is_compilers(error: BaseException) -> bool:
    """Whether an error is the compiler's own, `torch._dynamo.exc`."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, FailOnRecompileLimitHit | TorchDynamoException)
