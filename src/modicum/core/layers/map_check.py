"""What a map says of units, tried on a copy of the module around them.

The copy has the module's own sizes and random weights, so that no zero of a fresh model makes a
wrong claim pass: in float64, or in float32 where it is large, as blocks of billions are. What it is
called with is what the module got in the forward pass; made up for a model without memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import ModicumError
from modicum.core.layers.block_kinds import block_kind
from modicum.core.layers.map_calls import tensors
from modicum.core.layers.map_edits import exchange, remove, silence, tensor_of, within_module
from modicum.core.layers.map_parts import MappedSlice, Units
from modicum.core.layers.map_values import fill, made_up, values_for
from modicum.core.random import normal_, uniform_

# Modules may round to float32 inside. What is wrong differs by far more.
_CLOSE = 1e-4
LARGEST_COPY = 1 << 27
"""Elements of a model above which its stream and channels are not tried on a copy of all of it."""
_LARGEST_PART = 1 << 30  # elements of a module above which nothing is tried on a copy of it
_LARGEST_DOUBLE = 1 << 24  # elements of a module above which its copy is in float32

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ModicumError)
_WRONG = "exchanging its units changed what {} computes"
_ORDER = "each has a part of its own in what is computed around it, as position slopes of heads are"


class KeptCalls:
    """What modules were called with, once, for those that are asked for."""

    def __init__(self, model: nn.Module, names: Iterable[str], run: Callable[[], Any]) -> None:
        self.model = model
        self.dtype = torch.float64
        self._kept: dict[str, tuple[Any, Any]] = {}
        wanted = set(names)
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                partial(self._note, name), with_kwargs=True
            )
            for name in wanted
        ]
        try:
            with torch.no_grad(), values_for(model):
                run()
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._kept.setdefault(name, _cast((args, kwargs), torch.float64))

    def copy_of(self, name: str) -> nn.Module:
        """A copy of the module `name` with random weights in `dtype`, on the CPU."""
        module = self.model.get_submodule(name)
        # Parameters are copied without their values, which are drawn.
        memo: dict[int, Any] = {
            id(p): nn.Parameter(
                torch.empty(p.shape, dtype=self.dtype if p.is_floating_point() else p.dtype),
                requires_grad=False,
            )
            for p in module.parameters()
        }
        memo |= {id(b): made_up(b) for b in module.buffers() if b.is_meta}
        module = copy.deepcopy(module, memo).cpu().to(self.dtype)
        for path, parameter in module.named_parameters():
            _fill(parameter, path)
        for path, buffer in module.named_buffers():
            if path.endswith("running_mean"):
                normal_(buffer, seed=0, name=path, std=1.0)
            elif path.endswith("running_var"):
                uniform_(buffer, 0.5, 2.0, seed=0, name=path)
        return module

    def dtypes_of(self, name: str) -> list[torch.dtype]:
        """Those in which a copy of the module `name` is tried: some kernels have no float64."""
        return [torch.float64, torch.float32][self.elements_of(name) > _LARGEST_DOUBLE :]

    def elements_of(self, name: str) -> int:
        """Of all parameters of the module `name`."""
        return sum(p.numel() for p in self.model.get_submodule(name).parameters())

    @torch.no_grad()
    def output(self, module: nn.Module, name: str) -> Tensor:
        """What a copy of the module `name` gives for what that was called with."""
        args, kwargs = _cast(self._kept[name], self.dtype)
        return next(t for t in tensors(module(*args, **kwargs)) if t.is_floating_point())

    def has(self, name: str) -> bool:
        """Whether the module was called."""
        return name in self._kept


def signature(model: nn.Module, units: Units) -> tuple[Any, ...]:
    """What units of alike modules have in common: the slices, without the numbers of blocks."""
    inner = within_module(units, units.name)
    pieces = inner.makers, inner.readers
    kind = block_kind(model.get_submodule(units.name))
    return units.kind, re.sub(r"\d+", "#", units.name), units.count, units.within, pieces, kind


def tried(calls: KeptCalls, units: Units, scaled: Scaled = ()) -> Units | str:
    """The units with what was found out about them, or why the claim is wrong.

    Args:
        scaled: slices whose rows can be scaled against each other's unit by unit, which holds
            also where units have an order: pairs of slices that multiply each other.
    """
    if not calls.has(units.name):
        return "the module around it was not called"
    if calls.elements_of(units.name) > _LARGEST_PART:
        return "the module around it is too large to try this on a copy"
    inner = within_module(units, units.name)
    for dtype in calls.dtypes_of(units.name):
        calls.dtype = dtype
        try:
            module = calls.copy_of(units.name)
            before = calls.output(module, units.name)
            break
        except FAILURES as error:
            problem = str(error).splitlines()[0][:120]
    else:
        return f"a copy of {units.name} could not be run: {problem}"
    if not units.order_matters:
        exchange(module, inner, _order(units))
        after = calls.output(module, units.name)
        if not _close(before, after):
            del module
            if not scaled or not _scales(calls, units, scaled, before):
                return _WRONG.format(units.name or "the model")
            module = calls.copy_of(units.name)
            units = replace(units, order_matters=_ORDER)
    needed = units.needed or _why_needed(calls, units, inner, module)
    return replace(units, needed=needed, checked=True)


Scaled = tuple[tuple[tuple[MappedSlice, ...], tuple[MappedSlice, ...]], ...]


def _scales(calls: KeptCalls, units: Units, scaled: Scaled, before: Tensor) -> bool:
    """Whether units times numbers in one slice, and divided by them in its partner, change nothing.

    Only the first dimension of the slices' grids is scaled alike: a group of heads.
    """
    module = calls.copy_of(units.name)
    prefix = f"{units.name}." if units.name else ""
    for one, other in scaled:
        factors = 1.5 + torch.arange(one[0].shape[0], dtype=torch.float64) / one[0].shape[0]
        for pieces, times in ((one, factors), (other, 1 / factors)):
            for piece in pieces:
                tensor = tensor_of(module, piece.tensor.removeprefix(prefix))
                scale = torch.ones(tensor.shape[piece.dim], dtype=torch.float64)
                places = piece.places().reshape(len(times), -1)
                scale[places] = times[:, None].expand(places.shape)
                shape = [-1 if d == piece.dim else 1 for d in range(tensor.ndim)]
                with torch.no_grad():
                    tensor.mul_(scale.reshape(shape))
    return _close(before, calls.output(module, units.name))


def _why_needed(calls: KeptCalls, units: Units, inner: Units, module: nn.Module) -> str:
    """Why units cannot be removed, or "", tried on a copy that may be changed."""
    if units.within < 2:
        return "each is the only one of its kind there"
    # Half of them: kernels of mixtures of experts want sizes that are multiples of a power of two.
    runs = range(0, units.count, units.within)
    which = [start + place for start in runs for place in range(units.within // 2)]
    silence(module, inner, which)
    zeroed = calls.output(module, units.name)
    try:
        remove(module, inner, which)
        after = calls.output(module, units.name)
    except FAILURES as error:
        return f"without some the forward pass fails: {str(error).splitlines()[0][:120]}"
    if not _close(zeroed, after):
        return "without some the others are computed in another way"
    return ""


def _order(units: Units) -> Tensor:
    """Each run of units that may be exchanged, turned by one and its first two swapped."""
    run = torch.arange(units.within).roll(1)
    if units.within > 2:
        run[[0, 1]] = run[[1, 0]]
    return torch.cat([run + start for start in range(0, units.count, units.within)])


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return False
    return float((one - other).abs().max()) <= _CLOSE * float(one.abs().max())


def _fill(parameter: nn.Parameter, name: str) -> None:
    with torch.no_grad():
        if parameter.ndim < 2:
            around = 0.0 if "bias" in name.rpartition(".")[2] else 1.0
            normal_(parameter, seed=0, name=name, std=0.3).add_(around)
        else:
            width = parameter[0].numel() if parameter.ndim != 3 else parameter.shape[-1]
            fill(parameter, name, width**-0.5)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Copies of tensors on the CPU, floating ones in `dtype`; of a meta tensor random ones."""
    if isinstance(value, Tensor):
        value = made_up(value) if value.is_meta else value
        value = value.detach().cpu().clone()
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (list, tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _cast(getattr(value, f.name), dtype)
                                 for f in fields(value) if f.init})  # fmt: skip
    return value
