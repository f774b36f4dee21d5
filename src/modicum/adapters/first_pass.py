"""A model's first forward pass, watched for layers with adapters that it never calls."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from modicum.adapters.slices import Slice
from modicum.core.errors import InputError
from modicum.core.torch_private import is_compiled

_LISTS = (nn.ModuleList, nn.ModuleDict)


def watch_first_pass(model: nn.Module) -> None:
    """Have the model's first forward pass checked for layers with adapters that it never calls."""
    if _begin_watching not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin_watching)


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """A forward pass in the `with` block is not the first one."""
    waiting = _begin_watching in model._forward_pre_hooks.values()
    _drop(model._forward_pre_hooks, _begin_watching)
    try:
        yield
    finally:
        if waiting:
            watch_first_pass(model)


# Which modules were called while a first pass was watched.
_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that has adapters, with its name; a slice, where one of them is active."""
    return (
        (name, module)
        for name, module in model.named_modules()
        if "layers_by_adapter" in module._modules
        and (not isinstance(module, Slice) or module.__dict__.get("active"))
    )


def _begin_watching(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _drop(model._forward_pre_hooks, _begin_watching)
    for name, module in list(_watched(model)):
        for watched in (module, _caller(model, name)):
            if _note_called not in watched._forward_pre_hooks.values():
                watched.register_forward_pre_hook(_note_called)
    model.register_forward_hook(_end_watching)


def _note_called(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _called.add(module)


def _end_watching(model: nn.Module, args: Any, output: Any) -> None:
    """Report layers that were not called.

    Who uses the weight of a layer and does not call it has no use of the adapter. But a branch that
    did not run at all may run in another pass: a mixture's expert, an encoder of images.

    Raises:
        InputError: the module around a layer was called, and the layer was not.
    """
    stop_watching(model)
    called = {module for module in model.modules() if module in _called}
    _called.difference_update(called)
    missed = [
        name
        for name, module in _watched(model)
        if module not in called and not _is_inside_compiled(model, name)
    ]
    for name in missed:
        parent, caller = model.get_submodule(name.rpartition(".")[0]), _caller(model, name)
        chosen = isinstance(parent, _LISTS) and any(one in called for one in parent.children())
        if caller in called and not chosen:
            raise InputError(
                f"{type(caller).__name__} ran without calling it, so an adapter has no effect "
                "there; leave it out with `exclude`",
                field="targets",
                value=name,
            )
    if missed:
        warnings.warn(
            f"the first forward pass did not reach {len(missed)} layers with adapters, the first "
            f"is {missed[0]}; where no pass does, their adapters do nothing",
            stacklevel=2,
        )


def stop_watching(model: nn.Module) -> None:
    """Take off all hooks that watch."""
    _drop(model._forward_hooks, _end_watching)
    for module in model.modules():
        _drop(module._forward_pre_hooks, _note_called)
        _drop(module._forward_pre_hooks, _begin_watching)


def _is_inside_compiled(model: nn.Module, name: str) -> bool:
    """Whether a module around a layer may run compiled, where calls of the layer are not seen."""
    path = name.split(".")[:-1]
    around = (model.get_submodule(".".join(path[:depth])) for depth in range(len(path) + 1))
    return any(is_compiled(m) or "forward" in m.__dict__ for m in around)


def _caller(model: nn.Module, name: str) -> nn.Module:
    """The module around a layer that calls it; a list of modules does not."""
    around = caller = model
    for part in name.split(".")[:-1]:
        around = around.get_submodule(part)
        caller = caller if isinstance(around, _LISTS) else around
    return caller


def _drop(hooks: dict[int, Any], hook: Callable[..., Any]) -> None:
    for key in [key for key, known in hooks.items() if known is hook]:
        del hooks[key]
