"""An adapter that sits on a model: the runtime that owns its tensors.

Merging, switching, detaching and files work alike for every method, because a method's layer says
which change of the weight it amounts to (`delta`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from modicum.adapters import native_files, peft_files
from modicum.adapters.adapted_layer import (
    AdaptedLayer,
    device_of,
    take_off,
    train_active,
    undone_on_failure,
    watch_first_pass,
    wear,
    wearers,
    worn,
)
from modicum.adapters.adapter_layer import check_state
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import Adapter, ReadWeight, SharedFactors
from modicum.adapters.merging import Merged, merge, unmerge
from modicum.adapters.peft_task import trained_heads
from modicum.adapters.preparation import Preparation
from modicum.adapters.rewriting import check_base, differs, restore, rewrite
from modicum.adapters.sites import left_out, shared_name
from modicum.core.errors import InputError
from modicum.core.files import located
from modicum.core.ranks.ranks import Ranks

Form = Literal["peft", "peft-rest", "modicum"]


class AttachedAdapter(Attachment):
    """The handle to an adapter on a model; `Adapter.attach` makes it.

    >>> import torch
    >>> from modicum.adapters import LoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> adapter = LoRA(rank=2).attach(model)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    52
    >>> adapter.merge()
    >>> adapter.detach()
    >>> [type(module).__name__ for module in model]
    ['Linear', 'ReLU', 'Linear']

    Attributes:
        left_out: with the target `all-linear`, what it does not mean though it holds matrices, by
            name, with the reason.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Adapter,
        *,
        name: str,
        seed: int,
        weights: ReadWeight | None = None,
        start: bool = True,
        prepared: Preparation | None = None,
    ) -> None:
        _check_name(model, name)
        prepared = prepared or Preparation()
        sites = [
            replace(site, prepared=prepared.values.get(site.name, {}))
            for site in method.sites(model)
        ]
        _check_has_sizes(model)
        self.left_out = left_out(model, method.targets, method.exclude)
        # Before anything is changed: sizes that do not fit are refused here.
        device = device_of(model, sites[0].name)
        shared = SharedFactors(method, sites, device)
        layers = [method.layer(method, s, shared, device_of(model, s.name)) for s in sites]
        start = start and device.type != "meta"
        check_base(model, layers, readable=weights is not None or not start)
        trained = () if worn(model) else model.named_parameters()
        self._frozen = {name for name, parameter in trained if parameter.requires_grad}
        named = {site.name: site for site in sites}
        super().__init__(model, method, name, seed, named, shared, weights, prepared)
        self._merged: Merged | None = None
        with undone_on_failure(model, name):
            for parameter in model.parameters():
                parameter.requires_grad_(False)
            for head in trained_heads(model).values():
                head.float().requires_grad_(True)
            for layer in layers:
                wear(model.get_submodule(layer.site.name), name, layer)
            if next(shared.parameters(), None) is not None:
                model.add_module(shared_name(name), shared.train(model.training))
            try:
                if start:
                    self.initialise(weights)
            except BaseException:
                restore(self)
                raise
            self.activate()
        watch_first_pass(model)
        if self.left_out:
            warnings.warn(_told(self.left_out), stacklevel=4)

    @property
    def merged(self) -> bool:
        """Whether the adapter is folded into the base weights."""
        return self._merged is not None

    # State

    def _wearer(self, name: str) -> AdaptedLayer:
        wearer = self.model.get_submodule(name)
        assert isinstance(wearer, AdaptedLayer)
        return wearer

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors back; what was taken out of the base weights is taken out anew if it differs.

        Raises:
            InputError: names or shapes are others than this adapter's.
        """
        check_state(own := self.state_dict(), state)
        if differs(self, state):
            restore(self)
            rewrite(self, {self.model_name(name): value for name, value in state.items()}, None)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def initialise(
        self,
        weights: ReadWeight | None = None,
        kept: Mapping[str, Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Start everything: for a model that was wrapped on meta and then got its weights.

        Args:
            weights: gives the full-precision weight of a layer by its name, as the model's file
                stores it; None: the base layer's own.
            kept: a checkpoint of this model: by the model's names, at least what this adapter keeps
                and does not train. From it the base is rewritten as it was at the first start.
            ranks: share the work among these; None: every process does all of it.

        Raises:
            InputError: the base is quantized, and the method needs the full-precision weight.
        """
        restore(self)
        self.weights = weights or self.weights
        self.shared.initialise(seed=self.seed)
        for _, layer in self.layers():
            device = device_of(self.model, layer.site.name)
            layer.initialise(seed=self.seed, device=device)
            layer.put(self.prepared.tensors.get(layer.site.name, {}))
        rewrite(self, kept, ranks)

    # Switching

    def activate(self, *, alone: bool = True) -> None:
        """Use and train this adapter; with `alone`, and no other on the same model."""
        for _, module in wearers(self.model):
            kept = () if alone else tuple(name for name in module.active if name != self.name)
            own = (self.name,) if self.name in module.layers_by_adapter else ()
            module.active = kept + (() if self.merged else own)
        train_active(self.model)

    def deactivate(self) -> None:
        """Leave the adapter on the model, unused and untrained."""
        for name in self.sites:
            wearer = self._wearer(name)
            wearer.active = tuple(other for other in wearer.active if other != self.name)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @property
    def active(self) -> bool:
        """Whether it is in use, next to the weights: on all of its sites, or on none."""
        return self.name in self._wearer(next(iter(self.sites))).active

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without this adapter, for the length of a `with` block."""
        before = {name: self._wearer(name).active for name in self.sites}
        for name, active in before.items():
            self._wearer(name).active = tuple(other for other in active if other != self.name)
        try:
            yield
        finally:
            for name, active in before.items():
                self._wearer(name).active = active

    # Merging

    def merge(self, dense: torch.dtype | None = None) -> None:
        """Fold the adapter into the base weights; summed in fp32 or fp64, then cast to their dtype.

        Args:
            dense: layers of a form that would lose a part of the sum, quantized ones, become
                `nn.Linear` of this dtype.

        Raises:
            InputError: it is merged already; layers would lose a part and `dense` is not given; or
                another adapter has rewritten the base and is neither merged nor detached.
        """
        if self.merged:
            raise InputError("the adapter is merged already", value=self.name)
        self._merged = merge(self, dense)
        self.deactivate()

    def unmerge(self) -> None:
        """Take a merged adapter out of the base weights and use it next to them again.

        Raises:
            InputError: it is not merged.
        """
        if self._merged is None:
            raise InputError("the adapter is not merged", value=self.name)
        unmerge(self, self._merged)
        self._merged = None
        self.activate(alone=False)

    def detach(self) -> None:
        """Take the adapter off the model; layers without adapters become what they were.

        A merged adapter leaves its change in the weights. One that took its start out of the
        weights puts it back: exactly where it was given a reader of them, else to rounding. When
        the last adapter goes, the parameters that were trainable before the first came are
        trainable again.
        """
        if not self.merged:
            restore(self)
        take_off(self.model, self.name)
        for name, parameter in self.model.named_parameters():
            if name in self._frozen:
                parameter.requires_grad_(True)
        self.sites = {}

    close = detach

    # Files

    def save(
        self,
        folder: str | Path,
        *,
        base_model: str | None = None,
        form: Form | None = None,
        write: bool = True,
    ) -> None:
        """Write the adapter to a folder, from which `modicum.adapters.load` reads it.

        Tensors that are sharded over ranks are gathered: every rank calls this, and one writes.

        Args:
            base_model: what the folder says of the model that the adapter is for: a name, or a
                folder, whose absolute path is kept.
            form: `peft`: a PEFT LoRA (`adapter_config.json`, `adapter_model.safetensors`) for the
                model as it was before the adapter came. `peft-rest`: a PEFT LoRA for the base
                weights as they are now, which must be saved too: another one for methods that
                rewrite them alone. `modicum`: the method's own tensors, and, where they were
                rewritten, quantized base weights. None: `peft` where that is exact.

        Raises:
            InputError: the form cannot hold the adapter exactly; or it has no values yet (meta).
        """
        if any(parameter.is_meta for parameter in self.parameters()):
            problem = (
                "the adapter is on the meta device, where tensors have no values; initialise it"
            )
            raise InputError(problem, value=self.name)
        base_model = located(base_model)
        form = form or peft_files.exact_form(self)
        if form == "modicum":
            native_files.save(self, Path(folder), base_model=base_model, write=write)
        else:
            rest = form == "peft-rest"
            peft_files.save(self, Path(folder), base_model=base_model, rest=rest, write=write)


def _check_name(model: nn.Module, name: str) -> None:
    """Make sure that an adapter can have this name on a model.

    Raises:
        InputError: it is empty, has a dot, is taken, or is a word of PyTorch's containers.
    """
    if not name or "." in name:
        raise InputError("an adapter's name must not be empty or have a dot", value=name)
    if name in worn(model):
        raise InputError("an adapter of this name is attached already", value=name)
    if hasattr(nn.ModuleDict(), name) or hasattr(model, shared_name(name)):
        problem = "this cannot be an adapter's name, as modules have an attribute of that name"
        raise InputError(problem, value=name)


def _check_has_sizes(model: nn.Module) -> None:
    """Make sure that every parameter can be frozen.

    Raises:
        InputError: one is of a lazy module that has not run yet.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError("it has no sizes yet: run the model once before", value=name)


def _told(left: Mapping[str, str]) -> str:
    """What was left out in one sentence, alike names once."""
    alike: dict[str, str] = {}
    for name, why in left.items():
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name), why)
    named = [f"{name} ({why})" for name, why in alike.items()]
    more = f", and {len(named) - 5} more kinds" if len(named) > 5 else ""
    return f"all-linear leaves out {', '.join(named[:5])}{more}; `left_out` lists them"
