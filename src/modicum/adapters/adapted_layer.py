"""Layers with adapters: what they become, and what they become again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.base import AdapterLayer
from modicum.adapters.sites import replace, shared_name
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import is_sharded
from modicum.core.torch_private import is_compiled

_LISTS = (nn.ModuleList, nn.ModuleDict)


class AdaptedLayer(nn.Module):
    """What a layer becomes that has adapters: of a subclass of its own class, so that it keeps its
    weight, its place, its names and its hooks. `wear` makes it.

    Active adapters apply one after the other, each to what the ones before it make of the layer.
    One that took its start out of the weight gives that back as long as it is not active.

    In a state dict the weight has the name and the value that it would have without adapters, and
    their tensors stand next to it: so `save_pretrained`, `from_pretrained` and other trainers'
    checkpoints hold the model as well as its adapters.

    Attributes:
        patched: the `forward` that somebody had put on the layer itself; None: nobody had.
    """

    plain_type: ClassVar[type[nn.Module]]
    layers_by_adapter: nn.ModuleDict
    active: tuple[str, ...]
    patched: Callable[..., Any] | None

    # Callers may use the name that the argument has in `nn.Linear`.
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return self.through_adapters(input, self.plain)

    def through_adapters(self, inputs: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What the active adapters make of the layer, where `run` is the layer without them."""
        for name, layer in self.layers_by_adapter.items():
            assert isinstance(layer, AdapterLayer)
            if layer.rewrote and name not in self.active:
                run = partial(layer.original, base=run)
        for name in self.active:
            run = partial(self.layers_by_adapter[name], base=run)
        return run(inputs)

    def plain(self, *given: Any, **named: Any) -> Any:
        """What the layer gives without adapters."""
        run = self.patched or super().forward
        return run(*given, **named)

    def rewriter(self) -> AdapterLayer | None:
        """The adapter's layer that has a part of the weight now."""
        layers = self.layers_by_adapter.values()
        return next((x for x in layers if isinstance(x, AdapterLayer) and x.rewrote), None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _check_is_plain(self, prefix)
        if (layer := self.rewriter()) is not None:
            destination[f"{prefix}weight"] = self._original(layer)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name, each in self.layers_by_adapter.items():
            said = state_dict.get(f"{prefix}layers_by_adapter.{name}._extra_state")
            if said is not None and isinstance(each, AdapterLayer):
                each.set_extra_state(said)  # refused before the weight is touched
        layer, key = self.rewriter(), f"{prefix}weight"
        found = {} if layer is None else self._kept(layer, state_dict, prefix)
        shapes = {name: tensor.shape for name, tensor in found.items()}
        fits = layer is not None and shapes == {n: t.shape for n, t in layer.named_buffers()}
        # What does not fit is named by `load_state_dict` itself, and nothing of it is used.
        if (
            fits
            and key in state_dict
            and state_dict[key].shape == self.get_parameter("weight").shape
        ):
            assert layer is not None
            _check_is_plain(self, prefix)
            before, stored = self._original(layer), state_dict[key]
            taken = layer.taken()
            for name, buffer in layer.named_buffers():
                buffer.copy_(found[name])
            # What it has is exact where nothing else is read: sums would round it.
            same = torch.equal(taken, layer.taken()) and torch.equal(before, stored.to(before))
            rest = base_weights.at_least_fp32(stored.to(before.device))
            rest = rest - base_weights.oriented(layer.taken(), layer.site)
            state_dict[key] = self.get_parameter("weight") if same else rest.to(stored.dtype)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _kept(self, layer: AdapterLayer, state: Any, prefix: str) -> dict[str, Tensor]:
        """What a state dict says was taken out of the weight, else what it is here."""
        own = next(name for name, known in self.layers_by_adapter.items() if known is layer)
        at = f"{prefix}layers_by_adapter.{own}."
        return {name: state.get(f"{at}{name}", buffer) for name, buffer in layer.named_buffers()}

    def _original(self, layer: AdapterLayer) -> Tensor:
        """The weight as it is stored without the adapter that has a part of it."""
        weight = base_weights.read(self, layer.site) + layer.taken()
        stored = base_weights.oriented(weight, layer.site)
        return stored.to(self.get_parameter("weight").dtype).detach()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Its class was made here and is found in no module.
        base = AdaptedBlock if isinstance(self, AdaptedBlock) else AdaptedLayer
        return _empty, (self.plain_type, base), self.__dict__


class AdaptedBlock(AdaptedLayer):
    """What a block becomes that has adapters, which change what it gives to the residual stream.

    That is its output, or the first of several; its input is the first that it is given.
    """

    def forward(self, *given: Any, **named: Any) -> Any:
        inputs, rest = (given[0], given[1:]) if given else (named.pop(next(iter(named))), ())
        others: tuple[Any, ...] | None = None

        def block(hidden: Tensor) -> Tensor:
            nonlocal others
            outputs = self.plain(hidden, *rest, **named)
            if isinstance(outputs, tuple):
                outputs, others = outputs[0], outputs[1:]
            return cast(Tensor, outputs)

        hidden = self.through_adapters(inputs, block)
        return hidden if others is None else (hidden, *others)


# One class for each, so that layers which are alike share their compiled code.
_classes: dict[type[nn.Module], type[AdaptedLayer]] = {}


def _adapted(plain: type[nn.Module], base: type[AdaptedLayer]) -> type[AdaptedLayer]:
    """The class of a layer of class `plain` that has adapters."""
    if plain not in _classes:
        made = type(f"Adapted{plain.__name__}", (base, plain), {"plain_type": plain})
        _classes[plain] = made
    return _classes[plain]


def _empty(plain: type[nn.Module], base: type[AdaptedLayer]) -> AdaptedLayer:
    kind = _adapted(plain, base)
    return kind.__new__(kind)


def _check_is_plain(layer: AdaptedLayer, prefix: str) -> None:
    """Make sure that a weight can be kept under its plain name.

    Raises:
        InputError: it is quantized, or of another form that a plain model does not have; or its
            adapter has a part of it, and it is sharded.
    """
    name = prefix.removesuffix(".")
    if not base_weights.is_plain(layer):
        raise InputError(
            "its weight is held in a form that a plain model's state dict does not have, so a "
            "model that read it would start this layer at random; save the adapter with "
            "adapter.save(folder), or merge(dense=torch.bfloat16) and save the model; "
            'transformers.Trainer takes save_strategy="no"',
            value=name,
        )
    sharded = any(is_sharded(parameter) for parameter in layer.parameters(recurse=False))
    if sharded and layer.rewriter() is not None:
        raise InputError(
            "its adapter has a part of the weight, which is sharded, so no rank can give the "
            "weight of the plain model; save the adapter with adapter.save(folder)",
            value=name,
        )


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
        base = AdaptedBlock if layer.site.kind == "block" else AdaptedLayer
        module.__class__ = _adapted(type(module), base)
        assert isinstance(module, AdaptedLayer)
        module.layers_by_adapter = nn.ModuleDict()
        module.active, module.patched = (), patched
    layer.put_on(module)
    module.layers_by_adapter[name] = layer.train(module.training)


def take_off(model: nn.Module, name: str) -> None:
    """Take an adapter off all layers of a model; what has no other becomes what it was."""
    for _, module in list(wearers(model)):
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
    if shared_name(name) in dict(model.named_children()):
        delattr(model, shared_name(name))
    if not worn(model):
        _stop_watching(model)


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
    try:
        yield
    except BaseException:
        take_off(model, name)
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


def watch_first_pass(model: nn.Module) -> None:
    """Have the model's first forward pass checked for layers with adapters that it never calls."""
    if _begin_watching not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin_watching)


# Which modules were called while a first pass was watched.
_called: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _begin_watching(model: nn.Module, args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _drop(model._forward_pre_hooks, _begin_watching)
    for name, module in list(wearers(model)):
        for watched in (module, _caller(model, name)):
            if _note_called not in watched._forward_pre_hooks.values():
                watched.register_forward_pre_hook(_note_called)
    model.register_forward_hook(_end_watching)


def _note_called(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        _called.add(module)


def _end_watching(model: nn.Module, args: Any, output: Any) -> None:
    """Tell of layers that were not called.

    Who uses the weight of a layer and does not call it has no use of the adapter. But a branch that
    did not run at all may run in another pass: a mixture's expert, an encoder of images.

    Raises:
        InputError: the module around a layer was called, and the layer was not.
    """
    _stop_watching(model)
    called = {module for module in model.modules() if module in _called}
    _called.difference_update(called)
    missed = [
        name
        for name, module in wearers(model)
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


def _stop_watching(model: nn.Module) -> None:
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


def device_of(model: nn.Module, name: str) -> torch.device:
    """Where the weight of a layer is."""
    return next(model.get_submodule(name).parameters()).device
