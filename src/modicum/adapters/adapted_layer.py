"""Layers with adapters: what they become, and what they become again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from modicum.adapters.adapter_layer import CopiesLayer
from modicum.adapters.base import AdapterLayer
from modicum.adapters.first_pass import stop_watching
from modicum.adapters.freezing import notes_of, of_others, put_notes, thaw
from modicum.adapters.patching_layer import PatchingLayer, with_patches
from modicum.adapters.plain_state import PlainState
from modicum.adapters.row_groups import RowGroups
from modicum.adapters.sites import replace, shared_name
from modicum.adapters.slices import close_slices, holder
from modicum.core.errors import InputError
from modicum.core.layers.computing_with import computing_with
from modicum.core.layers.drawn_buffers import DrawnBuffers
from modicum.core.torch_private import leave_out_of_ddp


class AdaptedLayer(PlainState):
    """What a layer becomes that has adapters: of a subclass of its own class, so that it keeps its
    weight, its place, its names and its hooks. `wear` makes it.

    Active adapters apply one after the other, each to what the ones before it make of the layer.
    One that took its start out of the weight gives that back as long as it is not active.

    Attributes:
        patched: the `forward` that somebody had put on the layer itself; None: nobody had.
    """

    plain_type: ClassVar[type[nn.Module]]
    active: tuple[str, ...]
    patched: Callable[..., Any] | None

    # Callers may use the name that the argument has in `nn.Linear`.
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.through_adapters(input, self.plain)

    def through_adapters(self, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What the active adapters make of the layer, where `run` is the layer without them."""
        groups: RowGroups | None = self.__dict__.get("row_groups")
        if groups is None:
            return self._applied(inputs, run)
        active = self.active

        def adapted(name: str | None, own: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
            self.active = tuple(each for each in active if each == name)
            return self._applied(own, base)

        try:
            return groups.computed(inputs, run, adapted, base_once=not self._changes_base)
        finally:
            self.active = active

    @property
    def _changes_base(self) -> bool:
        """Whether active adapters have parameters, or entries of them, of their own."""
        return bool(self.patches() or self.copies())

    def _applied(self, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        for name, layer in self.layers_by_adapter.items():
            assert isinstance(layer, AdapterLayer)
            if layer.rewrote and name not in self.active:
                run = partial(layer.original, base=run)
        for name in self.active:
            layer = self.layers_by_adapter[name]
            assert isinstance(layer, AdapterLayer)
            run = partial(layer.weighted, base=run)
        return run(inputs)

    def plain(self, *given: Any, **named: Any) -> Any:
        """What the layer gives without adapters."""
        run = self.patched or super().forward
        if patches := self.patches():
            run = with_patches(self, run, patches)
        if not (copies := self.copies()):
            return run(*given, **named)
        with computing_with(self, copies):
            return run(*given, **named)

    def patches(self) -> list[PatchingLayer]:
        """The active adapters that have entries of the weight."""
        layers = (self.layers_by_adapter[name] for name in self.active)
        return [layer for layer in layers if isinstance(layer, PatchingLayer)]

    def copies(self) -> dict[str, Tensor]:
        """What active adapters have for parameters of the layer, as it takes them; the last's."""
        found: dict[str, Tensor] = {}
        for name in self.active:
            layer = self.layers_by_adapter[name]
            assert isinstance(layer, AdapterLayer)
            found |= layer.used_copies()
        return {leaf: copy.to(self._dtype_of(leaf)) for leaf, copy in found.items()}

    def _dtype_of(self, leaf: str) -> torch.dtype:
        there = self._parameters[leaf]
        assert there is not None
        return there.dtype

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class was made here and is found in no module.
        base = AdaptedBlock if isinstance(self, AdaptedBlock) else AdaptedLayer
        return _empty, (self.plain_type, base), self.__dict__


class AdaptedBlock(AdaptedLayer):
    """What a block becomes that has adapters, which change what it gives to the residual stream.

    That is its output, or the first of several; its input is the first that it is given. Any other
    module becomes the same that adapters work on, or of which they have copies of parameters.
    """

    def forward(self, *given: Any, **named: Any) -> Any:
        rows_differ = "row_groups" in self.__dict__ and self._changes_base
        if self._has_copies_alone and not rows_differ:
            return self.plain(*given, **named)  # whatever it takes, and gives
        inputs, rest = (given[0], given[1:]) if given else (named.pop(next(iter(named))), ())
        others: tuple[Any, ...] | None = None
        if rows_differ and (rest or named):
            problem = "takes several tensors, and rows are to use other copies of its parameters"
            raise InputError(problem, value=self.plain_type.__name__)

        def block(hidden: Tensor) -> Tensor:
            nonlocal others
            outputs = self.plain(hidden, *rest, **named)
            if isinstance(outputs, tuple):
                outputs, others = outputs[0], outputs[1:]
            more = [one for one in others or () if one is not None]
            if rows_differ and (more or not isinstance(outputs, Tensor)):
                problem = "does not give one tensor, and rows are to use other copies of its"
                raise InputError(f"{problem} parameters", value=self.plain_type.__name__)
            if outputs.shape != hidden.shape and self._changes_outputs:
                raise InputError(
                    f"gives {tuple(outputs.shape)} of {tuple(hidden.shape)}, and an adapter is to "
                    "change an output that is as its input; leave it out of `targets`",
                    field="targets",
                    value=self.plain_type.__name__,
                )
            return cast(Tensor, outputs)

        hidden = self.through_adapters(inputs, block)
        return hidden if others is None else (hidden, *others)

    @property
    def _changes_outputs(self) -> bool:
        """Whether an active adapter changes what the module gives, and not parameters alone."""
        layers = (self.layers_by_adapter[name] for name in self.active)
        return any(isinstance(one, AdapterLayer) and one.site.kind == "block" for one in layers)

    @property
    def _has_copies_alone(self) -> bool:
        """Whether no adapter has anything here but copies of parameters."""
        layers = self.layers_by_adapter.values()
        return not [layer for layer in layers if not isinstance(layer, CopiesLayer)]


class _OwnModules(nn.Module):
    """A `Sequential` with adapters runs its own modules, and not what holds them."""

    def __iter__(self) -> Iterator[nn.Module]:
        own = (name for name in self._modules if name != "layers_by_adapter")
        return (getattr(self, name) for name in own)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# One class for each, so that layers which are alike share their compiled code.
_classes: dict[type[nn.Module], type[AdaptedLayer]] = {}


def _adapted(plain: type[nn.Module], base: type[AdaptedLayer]) -> type[AdaptedLayer]:
    """The class of a layer of class `plain` that has adapters."""
    if plain not in _classes:
        bases = (base, _OwnModules, plain) if issubclass(plain, nn.Sequential) else (base, plain)
        made = type(f"Adapted{plain.__name__}", bases, {"plain_type": plain})
        _classes[plain] = made
    return _classes[plain]


def _empty(plain: type[nn.Module], base: type[AdaptedLayer]) -> AdaptedLayer:
    kind = _adapted(plain, base)
    return kind.__new__(kind)


def wearers(model: nn.Module) -> Iterator[tuple[str, AdaptedLayer]]:
    """Every layer that has adapters, with its name."""
    named = model.named_modules()
    return ((name, module) for name, module in named if isinstance(module, AdaptedLayer))


def worn(model: nn.Module) -> set[str]:
    """The names of all adapters on a model."""
    return {name for _, module in wearers(model) for name in module.layers_by_adapter}


def wear(module: nn.Module, name: str, layer: AdapterLayer) -> None:
    """Put an adapter's layer on a layer of the model, which may have others already."""
    if not isinstance(module, AdaptedLayer):
        patched = module.__dict__.pop("forward", None)
        base = AdaptedBlock if layer.site.kind in ("block", "module") else AdaptedLayer
        module.__class__ = _adapted(type(module), base)
        assert isinstance(module, AdaptedLayer)
        module.layers_by_adapter = nn.ModuleDict()
        module.active, module.patched = (), patched
    layer.put_on(module)
    module.layers_by_adapter[name] = layer.train(module.training)


def take_off(model: nn.Module, name: str) -> None:
    """Take an adapter off all layers of a model; what has no other becomes what it was."""
    leave_out_of_ddp(model, generated_names(model, name), leave_out=False)
    others = of_others(model, name)
    for module in [each for _, each in wearers(model) if each not in others]:
        module.active = tuple(other for other in module.active if other != name)
        if name in module.layers_by_adapter:
            del module.layers_by_adapter[name]
        if not module.layers_by_adapter:
            patched = module.patched
            for key in ("layers_by_adapter", "active", "patched"):
                module._modules.pop(key, None)
                module.__dict__.pop(key, None)
            object.__setattr__(module, "__class__", module.plain_type)
            if patched is not None:
                module.__dict__["forward"] = patched
    close_slices(model)
    if shared_name(name) in dict(model.named_children()):
        delattr(model, shared_name(name))
    thaw(model, name)
    if not worn(model):
        stop_watching(model)


def generated_names(model: nn.Module, name: str) -> list[str]:
    """The model's names of the buffers of the adapter `name` that are drawn from its seed."""
    owners = [(f"{site}.layers_by_adapter.{name}", m) for site, m in wearers(model)]
    found = [(path, m.layers_by_adapter[name]) for path, m in owners if name in m.layers_by_adapter]
    found += [(path, m) for path, m in model.named_children() if path == shared_name(name)]
    return [
        f"{path}.{key}"
        for path, module in found
        if isinstance(module, DrawnBuffers)
        for key in module.drawn_names
    ]


def exchange(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the layer `name` by another layer, which takes over the adapters."""
    old = model.get_submodule(name)
    assert isinstance(old, AdaptedLayer)
    if not isinstance(new, AdaptedLayer):
        new.__class__ = _adapted(type(new), AdaptedLayer)
        assert isinstance(new, AdaptedLayer)
    new.layers_by_adapter, new.active, new.patched = old.layers_by_adapter, old.active, None
    for layer in new.layers_by_adapter.values():
        assert isinstance(layer, AdapterLayer)
        layer.put_on(new)
    replace(model, name, new)


@contextmanager
def undone_on_failure(model: nn.Module, name: str) -> Iterator[None]:
    """Take the adapter `name` off again if the block fails, and leave the model as it was."""
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    active = [(module, module.active) for _, module in wearers(model)]
    notes = notes_of(model)
    try:
        yield
    except BaseException:
        take_off(model, name)
        put_notes(notes)
        for parameter, flag in trained:
            parameter.requires_grad_(flag)
        for module, names in active:
            module.active = names
        raise


def train_active(model: nn.Module) -> None:
    """Have the tensors of active adapters trained, and those of others not."""
    active = set()
    for _, module in wearers(model):
        active |= set(module.active)
        for name, layer in module.layers_by_adapter.items():
            layer.requires_grad_(name in module.active)
    owned = {shared_name(name): name for name in worn(model)}
    for child, shared in model.named_children():
        if child in owned:
            shared.requires_grad_(owned[child] in active)


def device_of(model: nn.Module, name: str) -> torch.device:
    """Where the weight of a layer is."""
    path, _, last = name.rpartition(".")
    there = model.get_submodule(path)
    layer = there._modules.get(last, there)  # of a slice that nothing is on yet there is no module
    assert layer is not None
    return next(holder(layer).parameters()).device
