"""Blocks that run compiled: a forward pass that replaces the eager one, in training alone.

Compiled and eager numbers differ in their last digits, so nothing here falls back by itself: which
of the two a block runs is a function of the recipe and of what was decided when the run began.
"""

from __future__ import annotations

import codecs
import locale
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.recomputing import recomputed
from modicum.core.torch_compiler import compiled, compiler_settings, is_compilers
from modicum.models.transformers.private import runs_itself_again, without_checkpointing
from modicum.tasks.base import TaskModel
from modicum.trainer.out_of_memory import causes, is_out_of_memory
from modicum.trainer.stop import StopRequested

Forward = Callable[..., tuple[Tensor, Any]]
# Rows full or fewer, documents or none, the block's input with a gradient or without.
_VARIANTS = 8


class CompilingFails(InputError):
    """A block cannot be compiled. `reason` is what the compiler said."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(
            f"this run's blocks are compiled, and compiling fails here now ({reason}); eager ones "
            "would compute other last digits than those before. Make compiling work again, or "
            "begin a run without it from this one's state: --set training.compile=none, a new "
            "--out, and --fork this folder",
            field="training.compile",
        )


def compile_blocks(model: TaskModel) -> None:
    """Compile every block's forward pass from its first use in training on.

    Only `forward` is replaced, so hooks of checkpointing and of sharding stay outside, and
    parameters keep their names. To be called before blocks are sharded.
    """
    for block in model.blocks:
        eager = eager_forward(block)
        block.forward = _guarded(block, eager, compiled_forward(block))


def eager_blocks(model: TaskModel) -> None:
    """Undo `compile_blocks`."""
    for block in model.blocks:
        block.__dict__.pop("forward", None)


def eager_forward(block: nn.Module) -> Forward:
    """The block's forward pass as it is written, whatever stands in its place."""
    return type(block).forward.__get__(block)


def compiled_forward(block: nn.Module) -> Forward:
    """The block's forward pass, compiled when it is first called with a shape.

    One graph serves all blocks that are alike. Shapes are constants in it: otherwise the numbers
    would depend on which shape came first.
    """
    function = _function(without_checkpointing(type(block).forward))

    def run(*arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
        with _settings():
            return function(block, *arguments, **keywords)

    return run


@cache
def _function(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One for all blocks: graphs are kept by the function that they were compiled for."""
    return compiled(forward, dynamic=False)


def _guarded(block: nn.Module, eager: Forward, compiled: Forward) -> Forward:
    """The compiled pass in training, the eager one elsewhere; failures say what to do."""

    def forward(*arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
        if not (block.training and torch.is_grad_enabled()):
            return eager(*arguments, **keywords)
        run = partial(compiled, **keywords)
        try:
            # Such blocks run again by themselves, which a compiled pass would leave out.
            return recomputed(run, *arguments) if runs_itself_again(block) else run(*arguments)
        except Exception as error:
            raise_if_stopped(error)
            if not is_compilers(error) or is_out_of_memory(error):
                raise
            raise CompilingFails(reason_of(error)) from error

    return forward


@contextmanager
def _settings() -> Iterator[None]:
    """The compiler's settings for as long as a block is compiled or run."""
    # A variant too many is an error: by default it would run eagerly, by the order they came in.
    limits: dict[str, Any] = {"fail_on_recompile_limit_hit": True, "suppress_errors": False}
    limits |= {"recompile_limit": 64 * _VARIANTS, "accumulated_recompile_limit": 512 * _VARIANTS}
    wanted = {
        # In this process: a pool of compiling processes would outlive a process that is killed.
        "compile_threads": 1,
        # Dropout as the eager block has it.
        "fallback_random": True,
        # No kernel is chosen by a race, which another process might see won by another.
        "deterministic": True,
        # In torch 2.13 several threads that add to one tensor also add what is beyond a row's end
        # where it is no multiple of a vector: Falcon's gradients were 2 % off.
        "cpp.enable_loop_tail_vec": False,
    }
    with compiler_settings(limits, wanted), _utf8_files():
        yield


@contextmanager
def _utf8_files() -> Iterator[None]:
    """Files read as UTF-8 where the locale says otherwise: the compiler's templates are UTF-8.

    They are read as what the locale says, which in one of ASCII fails.
    """
    if codecs.lookup(locale.getencoding()).name == "utf-8":
        yield
        return
    before = locale.setlocale(locale.LC_CTYPE)
    with suppress(locale.Error):  # a system without it: then compiling fails as it did
        locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
    try:
        yield
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


def raise_if_stopped(error: BaseException) -> None:
    """Raise the request to stop that came while the compiler worked, which wraps what it meets."""
    for link in causes(error):
        if isinstance(link, StopRequested | KeyboardInterrupt):
            raise link


def reason_of(error: BaseException) -> str:
    """The type and first line of the innermost error."""
    inner = error
    while (deeper := getattr(inner, "inner_exception", None) or inner.__cause__) is not None:
        inner = deeper
    line = next(iter(str(inner).strip().splitlines()), "")
    return f"{type(inner).__name__}: {line}"[:200] if line else type(inner).__name__
