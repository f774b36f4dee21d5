"""An adapter that sits on a model: the runtime that owns its tensors.

Merging, switching, detaching and files work alike for every method, because a method's layer says
which change of the weight it amounts to (`delta`).
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters import saving
from modicum.adapters.adapted_layer import (
    AdaptedLayer,
    device_of,
    generated_names,
    take_off,
    undone_on_failure,
    wear,
)
from modicum.adapters.applying import apply
from modicum.adapters.attaching import (
    check_has_sizes,
    check_name,
    check_numbers,
    own_copies,
)
from modicum.adapters.attachment import Attachment
from modicum.adapters.base import Adapter, ReadWeight, SharedFactors
from modicum.adapters.copies import not_copied
from modicum.adapters.deriving import derive
from modicum.adapters.first_pass import watch_first_pass
from modicum.adapters.folding import TOLERANCE, Folding
from modicum.adapters.freezing import freeze
from modicum.adapters.merged import Merged
from modicum.adapters.merging import merge, unmerge
from modicum.adapters.preparation import Preparation
from modicum.adapters.rewriting import check_base, check_readable, differs, restore, rewrite
from modicum.adapters.saving import Form
from modicum.adapters.sites import left_out, shared_name
from modicum.adapters.slices import check_apart, layer_name, open_slices
from modicum.adapters.states import check_takes
from modicum.adapters.steps import AdapterSteps, steps_of
from modicum.adapters.widths import check_rank_fits
from modicum.core.errors import InputError
from modicum.core.layers.full_model import FullModel
from modicum.core.layers.left_out import what_is_left_out
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_private import leave_out_of_ddp


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
        left_out: what `targets` leave out though it holds matrices, by name, with the reason: with
            `all-linear` all that it does not mean, with others experts that they name too.
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
        check_name(model, name)
        prepared = prepared or Preparation()
        named = [
            replace(site, prepared=prepared.values.get(site.name, {}))
            for site in method.sites(model)
        ]
        if not (sites := [site for site in named if not method.left_alone(site)]):
            raise InputError("what was found out gives no layer anything", field="prepared")
        check_has_sizes(model)
        check_numbers(method, sites)
        check_apart(model, sites)
        of_layers = () if "after_block" in method.traits else method.targets
        copied = method.copied(model)
        self.left_out = not_copied(left_out(model, of_layers, method.exclude), copied)
        # Before anything is changed: sizes that do not fit are refused here.
        device = device_of(model, sites[0].name)
        shared = SharedFactors(method, sites, device)
        layers = [method.layer(method, s, shared, device_of(model, s.name)) for s in sites]
        layers += own_copies(model, method, shared, copied, layers)
        if start:
            check_rank_fits(method, sites)
        start = start and device.type != "meta"
        check_base(model, layers, readable=weights is not None or not start)
        for layer in layers:
            layer.check_base(model.get_submodule(layer_name(layer.site)))
        by_name = {site.name: site for site in sites}
        super().__init__(model, method, name, seed, by_name, shared, copied, weights, prepared)
        self._merged: Merged | None = None
        with undone_on_failure(model, name):
            freeze(model, name)
            open_slices(model, sites)
            for layer in layers:
                wear(model.get_submodule(layer.site.name), name, layer)
            if next(itertools.chain(shared.parameters(), shared.buffers()), None) is not None:
                model.add_module(shared_name(name), shared.train(model.training))
            try:
                if start:
                    self.initialise(weights)
            except BaseException:
                restore(self)
                raise
            self.activate()
            leave_out_of_ddp(model, generated_names(model, name))
        watch_first_pass(model)
        if self.left_out:
            warnings.warn(what_is_left_out(self.left_out, method.targets), stacklevel=3)

    @property
    def instead(self) -> dict[str, str]:
        """The layers on which something else is than the method, by name, with what and why."""
        found = {name: self.method.instead(site) for name, site in self.sites.items()}
        return {name: why for name, why in found.items() if why is not None}

    @property
    def merged(self) -> bool:
        """Whether the adapter is folded into the base weights."""
        return self._merged is not None

    @property
    def weighting(self) -> float:
        """What the adapter's change is multiplied with while it is active, or merged."""
        self._check_attached()
        return next(layer.weighting for _, layer in self.everywhere())

    def _check_attached(self) -> None:
        if not self.sites:
            raise InputError("the adapter was detached", value=self.name)

    # State

    def _check_unmerged(self) -> None:
        self._check_attached()
        if self.merged:
            raise InputError("the adapter is merged; unmerge it first", value=self.name)

    def _wearer(self, name: str) -> AdaptedLayer:
        wearer = self.model.get_submodule(name)
        assert isinstance(wearer, AdaptedLayer)
        return wearer

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors back; what was taken out of the base weights is taken out anew if it differs.

        Raises:
            InputError: it is merged or detached; or as `check_takes`. Then nothing was changed.
        """
        self._check_unmerged()
        check_takes(self, state)
        if differs(self, state):
            restore(self)
            rewrite(self, {self.model_name(name): value for name, value in state.items()}, None)
        with torch.no_grad():
            for name, tensor in self.state_dict().items():
                tensor.copy_(state[name])
        for _, module in self.modules():
            module.redraw()

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
            InputError: it is merged or detached; the base is quantized, and the method needs the
                full-precision weight; or what it derives from the weight, or the layer, is not what
                `kept` is for.
        """
        self._check_unmerged()
        weights = weights or self.weights
        check_readable(self, weights)
        restore(self)
        self.weights, self.ranks = weights, ranks or self.ranks
        self.shared.initialise(seed=self.seed)
        self.shared.start_frozen(device_of(self.model, next(iter(self.sites))))
        for _, layer in self.everywhere():
            device = device_of(self.model, layer.site.name)
            layer.initialise(seed=self.seed, device=device)
            if kept is not None:
                names = {key: self.model_name(f"{layer.site.name}.{key}") for key in layer._buffers}
                layer.check_kept({key: kept[name] for key, name in names.items() if name in kept})
            layer.put(self.prepared.tensors.get(layer.site.name, {}))
        self._draw({} if kept is None else kept)
        rewrite(self, kept, ranks)
        derive(self, kept, ranks)

    def _draw(self, kept: Mapping[str, Tensor]) -> None:
        """Draw what is generated, from the seed that a checkpoint has, else from this adapter's."""
        first = next(iter(self.sites))
        for owner, module in self.modules():
            seed = kept.get(self.model_name(f"{owner}.seed"))
            device = device_of(self.model, first if owner == "shared" else owner)
            module.draw(self.seed if seed is None else int(seed), device)

    def steps(self) -> AdapterSteps:
        """The adapter's part in the steps of a loop of one's own, or of another trainer.

        Raises:
            InputError: its method does not have the trait `follows_steps`.
        """
        return steps_of(self)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.parameters())
        on = "a layer" if len(self.sites) == 1 else f"{len(self.sites)} layers"
        return f"<{self.method!r} as {self.name!r} on {on}, {count:,} trained numbers>"

    # Switching

    def activate(self, weight: float = 1.0, *, alone: bool = True) -> None:
        """Use and train this adapter; with `alone`, and no other on the same model.

        Args:
            weight: what its change of each layer's output, and of parameters of which it has
                copies, is multiplied with. Files hold the adapter without it.

        Raises:
            InputError: it has to be applied first, and so has another, or a part of the weight that
                it reads is in another; the weight is not finite; or it is merged with another, or
                was detached.

        >>> from modicum.adapters import LoRA
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> law, code = (LoRA(rank=1).attach(model, name=name) for name in ("law", "code"))
        >>> law.activate(0.7)
        >>> code.activate(0.3, alone=False)
        """
        self._check_attached()
        if not math.isfinite(weight):
            raise InputError("is not a finite number", field="weight", value=weight)
        if self.merged and weight not in (1.0, self.weighting):
            problem = f"the adapter is merged with {self.weighting:g}; unmerge it first"
            raise InputError(problem, field="weight", value=weight)
        apply(self, alone=alone, merged=self.merged)
        for _, layer in self.everywhere():
            layer.weighting = layer.weighting if self.merged else weight

    def deactivate(self) -> None:
        """Leave the adapter on the model, unused and untrained."""
        for name, _ in self.everywhere():
            wearer = self._wearer(name)
            wearer.active = tuple(other for other in wearer.active if other != self.name)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    @property
    def active(self) -> bool:
        """Whether it is in use, next to the weights: on all of its sites, or on none."""
        return bool(self.sites) and self.name in self._wearer(next(iter(self.sites))).active

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model without this adapter, for the length of a `with` block."""
        before = {name: self._wearer(name).active for name, _ in self.everywhere()}
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
            InputError: it is merged already, or was detached; layers would lose a part and `dense`
                is not given; or another adapter has rewritten the base and is neither merged nor
                detached.
        """
        if self.merged:
            how = "is merged already" if self.sites else "was merged and detached"
            raise InputError(f"the adapter {how}", value=self.name)
        self._check_attached()
        self._merged = merge(self, dense)
        self.deactivate()

    def unmerge(self) -> None:
        """Take a merged adapter out of the base weights and use it next to them again.

        Raises:
            InputError: it is not merged, or was detached; or the weights that it was merged into,
                in a low precision or another form, were changed since.
        """
        if self._merged is None:
            raise InputError("the adapter is not merged", value=self.name)
        self._check_attached()
        unmerge(self, self._merged)
        self._merged = None
        self.activate(self.weighting, alone=False)

    def detach(self) -> None:
        """Take the adapter off the model; layers without adapters become what they were.

        A merged adapter leaves its change in the weights. One that took its start out of the
        weights puts it back: exactly where it was given a reader of them, else to rounding.
        Parameters that it froze are trainable again when no other adapter on the model, on a model
        around it or on a part of it needs them frozen; one on another part, which shares some, is
        not seen. Of one that was detached already this does nothing.
        """
        if not self.sites:  # another adapter may have its name by now
            return
        if not self.merged:
            restore(self)
        take_off(self.model, self.name)
        self.sites, self.copied = {}, {}

    close = detach

    # Files

    def for_full_model(self) -> FullModel | None:
        """The model that `save` writes the adapter for, where that is not the one that has it."""
        return saving.full_model(self)

    def save(
        self,
        folder: str | Path,
        *,
        base_model: str | None = None,
        form: Form | None = None,
        dtype: torch.dtype | None = None,
        rank: int | None = None,
        tolerance: float = TOLERANCE,
        batches: Iterable[Any] | None = None,
        write: bool = True,
    ) -> Folding | None:
        """Write the adapter to a folder, from which `modicum.adapters.load` reads it.

        Tensors that are sharded over ranks are gathered: every rank calls this, and one writes.

        Args:
            base_model: what the folder says of the model that the adapter is for: a name, or a
                folder, whose absolute path is kept. None: the full model, where it is for that and
                it is known where that is.
            form: `peft`: a PEFT LoRA (`adapter_config.json`, `adapter_model.safetensors`) for the
                model as it was before the adapter came. `peft-rest`: a PEFT LoRA for the base
                weights as they are now, which must be saved too: another one for methods that
                rewrite them alone. `modicum`: the method's own tensors, and, where they were
                rewritten, quantized base weights. None: `peft` where that is exact, which is loaded
                as a LoRA whatever the method was.
            dtype: of the trained tensors in modicum's own form, where many small files count.
            rank: fold the adapter into a LoRA of this rank, which PEFT's form then holds, though
                it is not the adapter exactly. What that loses is returned.
            tolerance: how much it may lose of the change: of that of the logits where there are
                `batches` of held-out data to call the model with, else of that of the weights.

        Raises:
            InputError: the form cannot hold the adapter exactly; folded into a LoRA it loses more
                than `tolerance`; it has no values yet (meta), or was detached; or the folder holds
                what is no adapter's, which would be lost.
        """
        self._check_attached()
        how: Any = {"rank": rank, "tolerance": tolerance, "batches": batches, "write": write}
        return saving.save(self, folder, base_model=base_model, form=form, dtype=dtype, **how)
