"""An adapter at one layer: its tensors, what they compute, which change of the layer that is."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modicum.adapters.factors import SharedFactors
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter

RoundTrip = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerChange:
    """What is added to a layer's weight [out, in] and to its bias [out]: fp32, or fp64.

    None: nothing.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None


class AdapterLayer(nn.Module):
    """An adapter at one site. Subclasses give `forward`, and `delta` or `change`.

    Factors are parameters, what is not trained is a buffer. Factors are fp32, on an fp64 weight
    fp64; they compute in their own dtype, under autocast in that one's.

    One whose method has the trait `rewrites_base` takes a part out of the base weight W when it is
    attached: `split` says which, and from then on the base is W less `taken`. Its method's `frozen`
    tensors are the first values of factors: `A_0` is that of `A`. They say what was taken out, so a
    checkpoint that keeps them keeps the base.

    Attributes:
        merged: whether it is folded into the weight now.
        rewrote: whether the base weight is W less `taken` now, not W and not a merged weight.
    """

    merged = False
    rewrote = False

    def __init__(
        self,
        method: Adapter,
        site: Site,
        shared: SharedFactors,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.method, self.site = method, site
        self._shared = (shared,)  # in a tuple it is no submodule: the model owns it
        for name, factor in method.factors(site).items():
            self.register_parameter(name, nn.Parameter(factor.at_least(site.dtype).empty(device)))
        for name, factor in method.frozen(site).items():
            self.register_buffer(name, factor.at_least(site.dtype).empty(device))

    @property
    def shared(self) -> SharedFactors:
        """What this adapter's layers share."""
        return self._shared[0]

    @property
    def layer(self) -> nn.Module:
        """The layer of the model that this is attached to."""
        return self._layer[0]

    def put_on(self, layer: nn.Module) -> None:
        """Say which layer of the model this is attached to."""
        self._layer = (layer,)  # in a tuple, as it is no part of this

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start every tensor; the same seed and site give the same values anywhere."""
        for key, factor in self.method.factors(self.site).items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"{self.site.name}/{key}")
        for key, factor in self.method.frozen(self.site).items():
            setattr(self, key, factor.at_least(self.site.dtype).empty(device).zero_())

    def get_extra_state(self) -> Tensor:
        """Which method with which fields this is, and whether it is merged, for a state dict."""
        fields = self.method.model_dump(exclude={"targets", "exclude"})
        about = {"method": self.method.info.name, "fields": fields, "merged": self.merged}
        if self.site.prepared:
            about["prepared"] = dict(self.site.prepared)
        text = json.dumps(about, sort_keys=True)
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Make sure that a state dict is of this method with these fields.

        Raises:
            InputError: it is of another.
        """
        own, other = decoded(self.get_extra_state()), decoded(state)
        if own["method"] != other.get("method"):
            raise InputError("the state is of another method", value=other.get("method"))
        if self.merged != other.get("merged"):
            problem = (
                "one of the state and this adapter is merged into the weights, the other is not"
            )
            raise InputError(f"{problem}; merge or unmerge this one first", value=self.site.name)
        if own.get("prepared") != other.get("prepared"):
            problem = "the state is of an adapter that data prepared otherwise; attach that one"
            raise InputError(problem, field="prepared", value=self.site.name)
        fields = other.get("fields", {})
        for name, value in own["fields"].items():
            if name != "dropout" and fields.get(name) != value:
                problem = (
                    f"the state is of an adapter with {fields.get(name)!r}; attach one with it"
                )
                raise InputError(problem, field=name, value=value)

    @abstractmethod
    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's output, where `base` computes what the layer gives without this adapter."""

    def delta(self) -> Tensor:
        """The change of the weight that the adapter amounts to, [out, in]: fp32, or fp64."""
        raise TypeError(f"{type(self).__name__} defines neither delta() nor change()")

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange | None:
        """What the adapter amounts to as a change of its layer; None: it has no dense form.

        By default that is `delta`, whatever the layer. A method whose change depends on the weight
        has the trait `reads_base`.

        Args:
            weight: the layer's, [out, in], unsharded, fp32 or fp64, as if this adapter had never
                come; `bias` [out] alike, None where the layer has none.
        """
        return LayerChange(self.delta())

    def as_lora(self) -> tuple[Tensor, Tensor, float] | None:
        """(A [r, in], B [out, r], s) with delta = s B A, where that is exact; else None."""
        return None

    # What a method with the trait `rewrites_base` gives in addition

    @property
    def rewrites(self) -> bool:
        """Whether it takes a part out of the base weight."""
        return "rewrites_base" in self.method.traits

    def split(
        self, weight: Tensor, round_trip: RoundTrip, *, seed: int, name: str
    ) -> Mapping[str, Tensor]:
        """The frozen tensors, for a weight [out, in].

        Args:
            round_trip: what is left of a weight that is kept in the base layer's form.
        """
        raise TypeError(f"{type(self).__name__} rewrites its base and defines no split()")

    def taken(self) -> Tensor:
        """The part of the base weight that the frozen tensors represent: [out, in], or a zero."""
        return torch.zeros(())

    def original(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """What the layer gave before it was rewritten, where `base` is the residual."""
        return base(inputs)

    def lora_on_residual(self) -> tuple[Tensor, Tensor, float] | None:
        """(A, B, s) of the LoRA that is added to the residual; that of `as_lora` is added to W."""
        return self.as_lora()

    @torch.no_grad()
    def put(self, values: Mapping[str, Tensor]) -> None:
        """Set tensors by name; `X_0` is also where the factor X starts. A rank takes its part."""
        for key, value in values.items():
            if key in self._buffers:
                self.get_buffer(key).copy_(value)
            if (name := key.removesuffix("_0")) in self._parameters:
                part, before = own_part(self.get_parameter(name).detach())
                part.copy_(value[before : before + part.shape[0]])


def decoded(state: Tensor) -> dict[str, Any]:
    """What `AdapterLayer.get_extra_state` says.

    Raises:
        InputError: it is something else.
    """
    try:
        value = json.loads(bytes(state.to(torch.uint8).flatten().tolist()))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError("the state does not say of which adapter it is")
    return value


def check_state(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Make sure that a state is of the adapter whose own this is.

    Raises:
        InputError: names or shapes differ.
    """
    if own.keys() != state.keys():
        different = sorted(own.keys() ^ state.keys())[:3]
        raise InputError(f"these are not this adapter's factors; they differ in {different}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise InputError(
                f"has shape {tuple(state[name].shape)}, this adapter's {tuple(tensor.shape)}",
                field=name,
            )
