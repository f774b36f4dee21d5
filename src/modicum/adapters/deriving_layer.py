"""A layer of an adapter with tensors that are a function of the base weight, and kept nowhere.

A state dict has two numbers that say which they were: projections of what the layer can compute, on
vectors that are the same everywhere. Two machines' rounding moves these by less than `SAME_BASIS`
and a step of fp16, in which they are kept; another base model, or another choice among singular
vectors of equal values, by more.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modicum.adapters import base_weights
from modicum.adapters.adapter_layer import AdapterLayer
from modicum.adapters.factors import FINGERPRINT, Factor, SharedFactors
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.core.ranks.sharding import is_sharded

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter

_MIXING = 42  # a seed
SAME_BASIS = 3e-3  # with fp16's rounding of numbers of about 1


def fingerprint(up: Tensor, down: Tensor) -> Tensor:
    """Two numbers of about 1 that say which products up_i down_i^T these are, whatever their signs.

    Args:
        up, down: [out, r] and [r, in], fp32 or fp64; each product has its own weight.

    Returns:
        [2], fp16.
    """
    size = (up.double().square().sum(0) * down.double().square().sum(1)).sum().sqrt()
    found = []
    for draw in range(2):
        one, other, each = (
            normal_(torch.empty(count, device=up.device), seed=draw, name=f"fingerprint/{side}")
            for side, count in (("up", len(up)), ("down", down.shape[1]), ("each", len(down)))
        )
        along = (one.double() @ up.double()) * (down.double() @ other.double())
        found.append((along @ each.double()) / size)
    return torch.stack(found).to(FINGERPRINT.dtype)


def mixed_fingerprint(up: Tensor, down: Tensor) -> Tensor:
    """The same where every column of `up` meets every row of `down`: their signs count then."""
    width = up.shape[1]
    mixing = normal_(up.new_empty(width, width), seed=_MIXING, name="mixed")
    return fingerprint(up @ mixing, down)


class DerivingLayer(AdapterLayer):
    """An adapter's layer whose method has `derived` tensors. Subclasses give `derive` too.

    They stay fp32, or fp64, whatever dtype the model is given: a basis in bf16 is none.
    """

    fingerprint: Tensor

    def __init__(
        self,
        method: Adapter,
        site: Site,
        shared: SharedFactors,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(method, site, shared, device)
        for name, factor in self._own():
            self.register_buffer(name, factor.empty(device), persistent=name == "fingerprint")
            self.precise_names += (name,)

    @property
    def constant_names(self) -> tuple[str, ...]:
        """The names of buffers that no forward or backward pass writes to."""
        return (*super().constant_names, *(name for name, _ in self._own()))

    def _own(self) -> list[tuple[str, Factor]]:
        """The tensors that this class adds, as precise as their weight."""
        derived = self.method.derived(self.site).items()
        exact = [(name, factor.at_least(self.site.dtype)) for name, factor in derived]
        return exact if self.of_held else [*exact, ("fingerprint", FINGERPRINT)]

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start every tensor but the derived ones, for which there is memory afterwards."""
        super().initialise(seed=seed, device=device)
        for name, factor in self._own():
            setattr(self, name, factor.empty(device).zero_())

    @abstractmethod
    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The derived tensors for a weight [out, in], fp32 or fp64, and their `fingerprint`.

        `X_0` among them is also where the factor X starts.

        Raises:
            InputError: the weight has not what they are made of.
        """

    def check_fingerprint(
        self, kept: Tensor | None, derived: Mapping[str, Tensor] | None = None
    ) -> None:
        """Make sure that tensors, this layer's own by default, are those that a state is for.

        Raises:
            InputError: they are not.
        """
        if kept is None or self.of_held:
            return
        own = self.fingerprint if derived is None else derived["fingerprint"]
        other = kept.to(own).float()
        step = torch.finfo(FINGERPRINT.dtype).eps * other.abs()  # two that fp16 rounds apart
        if bool(((own.float() - other).abs() <= SAME_BASIS + step).all()):
            return
        raise InputError(
            "what the adapter derives from this layer's weight is not what its state was trained "
            "with: the base model is another or has another precision, or a library chose another "
            "of several bases that are as good (equal singular values); give the weights that it "
            "was trained on, or merge it on the machine that it is from",
            value=self.site.name,
        )

    @torch.no_grad()
    def derive_again(self, kept: Tensor) -> None:
        """Derive from the layer's weight as it is now, where a state is for other tensors.

        Raises:
            InputError: that gives others too.
        """
        if self.fingerprint.is_meta:
            return
        try:
            self.check_fingerprint(kept)
        except InputError:
            if not base_weights.is_exact(self.layer):
                raise
            values = self.derive(base_weights.read(self.layer, self.site))
            self.check_fingerprint(kept, values)
            self.put(values)

    @torch.no_grad()
    def weight_changed(self, weight: Tensor) -> None:
        """Take up that the layer holds another weight [out, in] now: factors stay as they are."""
        if self.of_held:
            for name, value in self.derive(weight).items():
                self.get_buffer(name).copy_(value)

    @torch.no_grad()
    def _derive_of_held(self) -> None:
        """Derive from the weight that the layer has been given, where it has one to itself.

        A factor that is still where it started starts anew; one that was trained is left alone.
        """
        if any(tensor.is_meta or is_sharded(tensor) for tensor in self.layer.parameters()):
            return
        for name, value in self.derive(base_weights.read(self.layer, self.site)).items():
            if self._untrained(name):
                self.put({name: value})
            else:
                self.get_buffer(name).copy_(value)

    def _untrained(self, name: str) -> bool:
        """Whether the factor that starts as this buffer, if there is one, has not moved."""
        factor = self._parameters.get(name.removesuffix("_0"))
        if factor is None:
            return True
        return torch.equal(factor, self.get_buffer(name).to(factor))

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any
    ) -> None:
        kept = state_dict.get(f"{prefix}fingerprint")
        if self.of_held:
            self._derive_of_held()
        elif kept is not None and kept.shape == self.fingerprint.shape:
            try:
                self.derive_again(kept)
            except InputError as error:
                errors: list[str] = others[-1]
                errors.append(str(error))
                return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)
