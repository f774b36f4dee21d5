"""What all adapters share: the value, the layer with its factors, and the ledger of both.

A method says which factors it has at a site, what they do to the layer's output, and which change
of the weight that amounts to. Some also have tensors that are not trained, or train tensors
that many sites use. Targets, freezing, several adapters, merging, files and switching come from the
other modules of the room.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery, Phase, Work
from modicum.core.contracts.method import Context, Method, Names, Probability, Strings
from modicum.core.errors import InputError
from modicum.core.random import normal_, uniform_
from modicum.core.ranks.sharding import elements_before, own_part

if TYPE_CHECKING:
    from modicum.adapters.attached_adapter import AttachedAdapter

SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")
ReadWeight = Callable[[str], Tensor]


@dataclass(frozen=True)
class Factor:
    """A tensor of an adapter, and how it starts.

    `bound` b starts it as U(-b, b), `std` s as N(0, s^2); neither, as zeros.
    """

    shape: tuple[int, ...]
    bound: float = 0.0
    std: float = 0.0
    dtype: torch.dtype = torch.float32

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, of the full tensor."""
        return self.numel * self.dtype.itemsize

    def empty(self, device: torch.device | str | None) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def at_least(self, dtype: torch.dtype) -> Factor:
        """The same with that precision, if it is a number of less."""
        if not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=torch.promote_types(self.dtype, dtype))

    def fill(self, tensor: Tensor, *, seed: int, name: str) -> None:
        """Start `tensor` in place, as a function of (seed, name) alone; a rank, its part of it."""
        before = elements_before(tensor)
        with torch.no_grad():
            part, _ = own_part(tensor)
            if self.bound:
                uniform_(part, -self.bound, self.bound, seed=seed, name=name, offset=before)
            elif self.std:
                normal_(part, std=self.std, seed=seed, name=name, offset=before)
            else:
                part.zero_()


@dataclass(frozen=True)
class AdapterQuery:
    """What an adapter's ledger is asked at: a site and the shape of a micro-batch."""

    site: Site
    shape: ModelQuery


class SharedFactors(nn.Module):
    """The trained tensors of an adapter that many sites use, owned once, by the model itself.

    So optimizers, clipping, checkpoints and gradient buckets see each once, and FSDP2's root group
    keeps it gathered from the first block's forward to the last one's backward. Layers read them
    here at each forward pass, as FSDP2 puts other tensors in their place.
    """

    def __init__(
        self, method: Adapter, sites: Sequence[Site], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.method, self.sites = method, tuple(sites)
        for name, factor in method.shared(sites).items():
            made = factor.at_least(_widest(sites)).empty(device)
            self.register_parameter(name, nn.Parameter(made))

    def initialise(self, *, seed: int) -> None:
        """Start every tensor; the same seed gives the same values anywhere."""
        for key, factor in self.method.shared(self.sites).items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"shared/{key}")

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs: an `nn.Sequential` that owns this runs it as its last layer."""
        return inputs


def _widest(sites: Sequence[Site]) -> torch.dtype:
    wide = any(site.dtype == torch.float64 for site in sites)
    return torch.float64 if wide else torch.float32


class AdapterLayer(nn.Module):
    """An adapter at one site. Subclasses give `forward` and `delta`.

    Factors are parameters, what is not trained is a buffer. Factors are fp32, on an fp64 weight
    fp64; they compute in their own dtype, under autocast in that one's.

    Attributes:
        merged: whether it is folded into the weight now.
    """

    merged = False

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

    @abstractmethod
    def delta(self) -> Tensor:
        """The change of the weight that the adapter amounts to, [out, in]: fp32, or fp64."""

    def as_lora(self) -> tuple[Tensor, Tensor, float] | None:
        """(A [r, in], B [out, r], s) with delta = s B A, where that is exact; else None."""
        return None


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


class Adapter(Method):
    """The fields and services of every adapter.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`.
        exclude: of those, the ones to leave out.
        dropout: probability with which an adapter's input is dropped in training.
    """

    layer: ClassVar[type[AdapterLayer]]
    # Whether gradients of its factors need the layer's input, as LoRA's A does.
    needs_input: ClassVar[bool] = True

    targets: Names = ("all-linear",)
    exclude: Strings = ()
    dropout: Probability = 0.0

    @abstractmethod
    def factors(self, site: Site) -> Mapping[str, Factor]:
        """The trained tensors at a site, by name.

        Raises:
            InputError: the method's sizes do not fit the site.
        """

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        """What is kept at a site in addition, in checkpoints too, and not trained."""
        return {}

    def shared(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        """The trained tensors that the sites have in common, by name.

        Raises:
            InputError: the method's sizes do not fit the sites.
        """
        return {}

    def attach(
        self,
        model: nn.Module,
        *,
        name: str = "default",
        seed: int = 0,
        weights: ReadWeight | None = None,
    ) -> AttachedAdapter:
        """Freeze `model`, put this adapter on its target layers, and return the handle to it.

        Args:
            weights: gives the full-precision weight of a layer by its name, as the model's file
                stores it; None: the layer's own. A method that rewrites the base asks for it.

        Raises:
            InputError: a target matches no layer, or a tied one, or one that may compute something
                else than its type says; the name is taken; sizes do not fit; or the method needs
                weights that a quantized base has lost. After a failure the model is as it was.
        """
        from modicum.adapters.attached_adapter import AttachedAdapter

        return AttachedAdapter(model, self, name=name, seed=seed, weights=weights)

    def bind(self, context: Context) -> AttachedAdapter:
        """Attach to the context's model, seeded by the context."""
        return self.attach(context.model, seed=context.seed)

    def trained(self, site: Site) -> int:
        """Trained elements at a site, without what it shares with others."""
        return sum(factor.numel for factor in self.factors(site).values())

    def trained_shared(self, sites: Sequence[Site]) -> int:
        """Trained elements that the sites share, each once."""
        return sum(factor.numel for factor in self.shared(sites).values())

    def saves_input(self, site: Site) -> bool:
        """Whether the layer's input is kept for the backward pass: by a linear map, undropped."""
        return self.needs_input and site.kind == "linear" and not self.dropout

    def ledger(self, at: AdapterQuery) -> Ledger:
        """A site's own tensors, what `layer.forward` saves beyond its input, the extra work."""
        compute = at.shape.compute_bytes
        saved = self.saved_elements(at.site) * at.shape.positions
        # What dropout multiplied with, and what it let through.
        widths = (1 + self.needs_input) * at.site.in_features if self.dropout else 0
        frozen = sum(factor.bytes for factor in self.frozen(at.site).values())
        return Ledger.of(
            Entry("weight", 4 * self.trained(at.site), what="adapter factors"),
            Entry("weight", frozen, what="adapter tensors that are not trained"),
            Entry("activation", saved * compute, SAVED, "adapter activations"),
            Entry("activation", widths * at.shape.positions * compute, SAVED, "dropout"),
            Entry("activation", self.matrices_kept(at) * compute, SAVED, "adapter matrices"),
            *self.work(at),
        )

    def shared_ledger(self, sites: Sequence[Site]) -> Ledger:
        """What the sites share, once for the model; the ledgers of the sites do not hold it."""
        shared = self.shared(sites).values()
        # Each use makes a gradient of the full tensor, which is added to those before it.
        gradient = max((factor.bytes for factor in shared), default=0)
        return Ledger.of(
            Entry("weight", sum(factor.bytes for factor in shared), what="shared adapter factors"),
            Entry("workspace", gradient, ("backward",), "a gradient of shared factors"),
        )

    def matrices_kept(self, at: AdapterQuery) -> int:
        """Elements of matrices that one forward pass makes of factors and keeps for backward.

        By default those are the factors, cast to the dtype of the products where it is not theirs.
        """
        return self.trained(at.site) if at.shape.compute_bytes < 4 else 0

    @abstractmethod
    def saved_elements(self, site: Site) -> int:
        """Elements that one position's forward saves for backward, without the layer's input."""

    @abstractmethod
    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        """Matrix-product work beyond the frozen layer's own, forward and backward."""

    def with_fields(self, **fields: Any) -> Adapter:
        """This value with some fields changed, checked again."""
        return type(self)(**(self.model_dump() | fields))
