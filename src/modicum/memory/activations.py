"""A policy at work on a model: the runtime that owns bounds and what is stored under them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.run_hooks import PassKind, RunHook
from modicum.core.errors import InputError
from modicum.core.layers.layer_sites import survey
from modicum.core.layers.saved_tensors import Need, SavedTensors, Shares
from modicum.core.layers.torch_calls import Call
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_private import storage_address
from modicum.memory.base import ActivationPolicy
from modicum.memory.convolutions import BoundedConvolution, momentum_of

_CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}


class Activations(RunHook):
    """A policy at work on a model; `ActivationPolicy.attach` makes it.

    A run hook: `forward_context()` goes around forward pass and loss, and `after_optimizer` reads
    the optimizer's momentum and sets bounds. Bounds are a function of statistics that are summed
    over ranks, so all ranks have the same.

    Attributes:
        layers: the convolutions, in the model's order, each with its `bound` (0: none yet) and what
            was `seen` of it last.
        measured: what was left of saved tensors after the last forward pass.
    """

    reads_output_gradients = True

    def __init__(self, policy: ActivationPolicy, model: nn.Module, ranks: Ranks) -> None:
        self.policy, self.model, self.ranks = policy, model, ranks
        sites = survey(model, ["convolution"]).every.values()
        self.layers = [BoundedConvolution(site, model.get_submodule(site.name)) for site in sites]
        if not self.layers:
            raise InputError("it compresses what convolutions keep, and this model has none")
        self.step = 0
        self.measured: Shares | None = None
        self.saved = SavedTensors(model, policy.codec(), self._bound, self._called)
        self._call: Call | None = None
        self._element_bytes = 4

    @contextmanager
    def context(self) -> Iterator[None]:
        """Store what is saved in here by the policy; where gradients are off, do nothing.

        Raises:
            InputError: this is the first time, and nothing is stored that could be compressed.
        """
        with self.saved.context():
            yield
        if torch.is_grad_enabled():
            self._note_shares()

    @property
    def held_bytes(self) -> int:
        """Bytes that are held now, those of tensors that are kept as they are among them."""
        return self.saved.held_bytes

    def forward_context(self, kind: PassKind = "train") -> AbstractContextManager[object]:
        """Store what a pass saves by the policy; one that runs again saves for itself alone."""
        return nullcontext() if kind == "recompute" else self.context()

    def before_update(self, step: int = 0) -> None:
        """Forget what forward passes since the last update have added up, such as a rehearsal's."""
        for layer in self.layers:
            layer.clear()

    @property
    def reads_gradients(self) -> bool:  # type: ignore[override]
        """Whether the update at hand is measured."""
        return self.measuring

    def after_optimizer(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Learn from an update that was made, whose gradients are there yet."""
        if optimizer is not None:
            self.observe(optimizer)
        self.after_step(step)

    def observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the optimizer's momentum, if this update is measured; gradients must be there yet.

        That is `momentum_buffer` (SGD) or `exp_avg / (1 - beta_1)` (the Adam family), both the sum
        of beta^k g. An optimizer that keeps neither in a weight's own shape (8-bit or projected
        states, SGD without momentum) is asked for the gradient, which is that sum with beta = 0:
        mostly smaller, so bounds are tighter than they need be.

        Raises:
            InputError: there is neither a momentum nor a gradient.
        """
        if not self.measuring:
            return
        for layer in self.layers:
            if layer.elements:
                layer.saw_momentum(momentum_of(optimizer, layer))

    def after_step(self, step: int | None = None) -> None:
        """Count an update (its number from 1, or one more), and set bounds if it was measured.

        Raises:
            InputError: it was measured, and nobody has called `observe`.
        """
        if self.measuring:
            self._retune()
        self.before_update()
        self.step = self.step + 1 if step is None else step

    def state_dict(self) -> dict[str, Any]:
        """The number of updates and every layer's bound: plain values."""
        return {"step": self.step, "bounds": {layer.name: layer.bound for layer in self.layers}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` gave.

        Raises:
            InputError: it is of another model.
        """
        bounds = state["bounds"]
        if list(bounds) != [layer.name for layer in self.layers]:
            raise InputError("these bounds are of a model with other convolutions")
        self.step = int(state["step"])
        for layer in self.layers:
            layer.bound = float(bounds[layer.name])
            layer.clear()

    @property
    def measuring(self) -> bool:
        """Whether the update at hand is measured, so that `observe` has something to read."""
        return self.policy.measures(self.step + 1)

    def _retune(self) -> None:
        """Set every bound from the sums over all ranks, which are the same everywhere."""
        if any(layer.elements and not layer.observed for layer in self.layers):
            raise InputError(
                "bounds follow the optimizer's momentum; call observe(optimizer) between the "
                "backward pass and zero_grad"
            )
        sums = self.ranks.sum(*(value for layer in self.layers for value in layer.sums))
        largest = self.ranks.max(*(layer.largest for layer in self.layers))
        start = 0
        for layer, most in zip(self.layers, largest, strict=True):
            stop = start + len(layer.sums)
            seen = layer.conclude(sums[start:stop], most)
            if seen is not None:
                layer.seen, layer.bound = seen, self.policy.next_bound(seen)
            start = stop

    def _bound(self, call: Call, tensor: Tensor) -> float | None:
        """The bound of a tensor that a call saves; None where it must stay exact."""
        layer = self._bounded(call, tensor)
        if layer is None:
            return None
        self._element_bytes = tensor.element_size()
        largest = max(abs(float(value)) for value in tensor.detach().aminmax())
        if not math.isfinite(largest):
            return None
        if self.measuring:
            layer.saw_input(tensor.detach(), largest)
        # Of nothing but zeros any bound is right.
        return layer.bound or self.policy.first_bound(largest) or 1.0

    def _bounded(self, call: Call, tensor: Tensor) -> BoundedConvolution | None:
        """The layer as whose input a call saves a tensor, if its values may be a little off."""
        repeated, self._call = self._call is call, call
        layer = self._layer(call)
        return layer if layer is not None and _is_input(call, tensor, repeated) else None

    def _called(self, call: Call, output: Any) -> None:
        """Ask for the gradient at a convolution's output in an update that is measured."""
        layer = self._layer(call) if self.measuring else None
        if layer is not None and output.requires_grad:
            output.register_hook(layer.saw_gradient)

    def _layer(self, call: Call) -> BoundedConvolution | None:
        """The trained layer whose weight a convolution is called with."""
        if call.function not in _CONVOLUTIONS:
            return None
        weight = call.argument(1, "weight")
        found = (layer for layer in self.layers if layer.weight is weight)
        layer = next(found, None)
        return layer if layer is not None and weight.requires_grad else None

    def _note_shares(self) -> None:
        """Note what was left of saved tensors when the forward pass ended."""
        by_need = self.saved.full()
        held, plain = by_need[Need.VALUES]
        if not plain and self.measured is None:
            raise InputError(
                "no convolution has kept an input that could be compressed: its weight must be a "
                "trained parameter (weight_norm makes it of others), its input need a gradient, "
                "and its block be neither compiled nor recomputed, as such blocks do not show "
                "what they compute"
            )
        if not plain:
            return
        signs = [by_need[need] for need in (Need.SHAPE, Need.SIGNS)]
        all_signs = sum(each for _, each in signs)
        expected = self.policy.shares(self._element_bytes).expected
        left = sum(each for each, _ in signs) / all_signs if all_signs else expected.signs
        self.measured = replace(expected, values=held / plain, signs=left)


def _is_input(call: Call, tensor: Tensor, repeated: bool) -> bool:
    """Whether a tensor that a convolution saves is its input, and not what its caller keeps.

    The input is saved first, under autocast as a copy of another dtype. One that has no history is
    the batch, or what frozen layers made of it.
    """
    given = call.argument(0, "input")
    if given.grad_fn is None:
        return False
    same = storage_address(tensor) == storage_address(given)
    return same or (not repeated and tensor.shape == given.shape and tensor.dtype != given.dtype)
