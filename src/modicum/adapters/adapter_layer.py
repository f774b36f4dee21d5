"""An adapter at one layer: its tensors, what they compute, which change of the layer that is."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from modicum.adapters.factors import Factor, FrozenBuffers, Generated, SharedFactors, generated
from modicum.adapters.names import plain_name
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter

RoundTrip = Callable[[Tensor], Tensor]
COPY = "copy_"  # before the name that a copied parameter has in its layer


@dataclass(frozen=True)
class LayerChange:
    """What is added to a layer's weight [out, in] and to its bias [out]: fp32, or fp64.

    None: nothing.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None


class AdapterLayer(FrozenBuffers):
    """An adapter at one site. Subclasses give `forward`, and `delta` or `change`.

    Factors are parameters, what is not trained is a buffer. Factors are fp32, on an fp64 weight
    fp64; they compute in their own dtype, under autocast in that one's.

    One whose method has the trait `rewrites_base` takes a part out of the base weight W when it is
    attached: `split` says which, and from then on the base is W less `taken`. Its method's `frozen`
    tensors are the first values of factors: `A_0` is that of `A`. They say what was taken out, so a
    checkpoint that keeps them keeps the base.

    It may have copies of parameters of its layer, which are trained in full (`Adapter.also`).

    Attributes:
        merged: whether it is folded into the weight now.
        weighting: what the change that it makes of the layer is multiplied with.
        rewrote: whether the base weight is W less `taken` now, not W and not a merged weight.
        of_held: whether its `derived` tensors are of the weight as the layer holds it, quantized or
            not, and cheap. Then they are made anew with every state that is loaded, and nothing
            says which they were.
        planned_positions: by how many positions it chooses how to compute; None: by its inputs'.
    """

    of_held: ClassVar[bool] = False
    planned_positions: int | None = None

    merged = False
    rewrote = False
    weighting = 1.0

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
        for name, factor in self.trained_factors().items():
            made = nn.Parameter(factor.at_least(site.dtype).empty(device))
            self.register_parameter(name, factor.described(made))
        self.hold(self.frozen_factors(), site.dtype, device)

    def trained_factors(self) -> Mapping[str, Factor]:
        """The trained tensors of its own, by name."""
        return self.method.factors(self.site)

    def frozen_factors(self) -> Mapping[str, Factor]:
        """The tensors of its own that are not trained, by name."""
        return self.method.frozen(self.site)

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

    def check_base(self, base: nn.Module) -> None:
        """Make sure that a layer of the model can be the base of this, before anything is changed.

        Raises:
            InputError: it cannot.
        """

    @property
    def dropout(self) -> float:
        """The probability with which its input is dropped now: none but in training."""
        return self.method.dropout if self.training else 0.0

    def positions(self, inputs: Tensor) -> int:
        """By how many positions it chooses how to compute: a plan's, or those of `inputs`."""
        planned = self.planned_positions
        return math.prod(inputs.shape[:-1]) if planned is None else planned

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of the parts of W in each of which the change is one number."""
        return None

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start every tensor; the same seed and site give the same values anywhere.

        Generated tensors are drawn when this is done.
        """
        for key, factor in self.trained_factors().items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"{self.site.name}/{key}")
        for key, factor in self.frozen_factors().items():
            if not isinstance(factor, Generated):
                setattr(self, key, factor.at_least(self.site.dtype).empty(device).zero_())
        for leaf, copy in self.copies().items():
            with torch.no_grad():
                part, _ = own_part(self.layer.get_parameter(leaf))
                own_part(copy)[0].copy_(part)

    def drawn(self, seed: int) -> dict[str, Tensor]:
        """The generated tensors of this site: a function of seed, the layer's name and their own.

        The adapter's name is none of it, as one may be loaded under another.
        """
        site = plain_name(self.site.name)
        found = generated(self.frozen_factors())
        return {key: each.value(seed=seed, name=f"{site}/{key}") for key, each in found.items()}

    def copies(self) -> dict[str, Tensor]:
        """Its copies of parameters of the layer, by their names there."""
        known = self._parameters.items()
        return {n.removeprefix(COPY): t for n, t in known if n.startswith(COPY) and t is not None}

    def used_copies(self) -> dict[str, Tensor]:
        """Its copies as the layer takes them: own + weighting (copy - own)."""
        if self.weighting == 1:
            return self.copies()
        own = {leaf: self.layer.get_parameter(leaf).detach() for leaf in self.copies()}
        return {n: own[n] + self.weighting * (copy - own[n]) for n, copy in self.copies().items()}

    def get_extra_state(self) -> Tensor:
        """Which method with which fields this is, and whether it is merged, for a state dict."""
        fields = self.method.model_dump(exclude={"targets", "exclude", "also"})
        about: dict[str, Any] = {
            "method": self.method.info.name,
            "fields": fields,
            "merged": self.merged,
        }
        if self.merged and self.weighting != 1:
            about["weighting"] = self.weighting
        if self.site.kind == "module":
            about["kind"] = "module"
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
        if own.get("weighting") != other.get("weighting"):
            problem = "the state is of an adapter that is merged with another weight; unmerge this"
            raise InputError(problem, field="weighting", value=self.site.name)
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

    def weighted(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's output with `weighting` times the change that `forward` makes of it."""
        if self.weighting == 1:
            found: Tensor = self(inputs, base)
            return found
        outputs = base(inputs)
        base = known(inputs, outputs, base)
        without = self.original(inputs, base) if self.rewrote else outputs
        found = self(inputs, base)
        # What computes within the layer has its weighting there.
        return outputs if found is outputs else without + self.weighting * (found - without)

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

    def in_files(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of a change of its layer as those of the model that PEFT's files are for.

        That is another model with the trait `for_full_model` alone.
        """
        return a, b

    def check_kept(self, kept: Mapping[str, Tensor]) -> None:
        """Make sure that a state is for a layer like this, before it is put back.

        Args:
            kept: by name, what the state has of its own tensors; it may lack some.

        Raises:
            InputError: it is for another.
        """

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *others: Any
    ) -> None:
        own = dict(self.kept_buffers())
        there = {key: state_dict[f"{prefix}{key}"] for key in own if f"{prefix}{key}" in state_dict}
        try:
            # `load_state_dict` itself names what has another shape, and nothing of that is used.
            self.check_kept({key: t for key, t in there.items() if t.shape == own[key].shape})
        except InputError as error:
            errors: list[str] = others[-1]
            errors.append(str(error))
            return
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, *others)

    def as_peft(self) -> tuple[Tensor, Tensor, float] | None:
        """The same as a file of PEFT's has it, next to the method's `peft_tensors`."""
        return self.as_lora()

    def peft_bias(self) -> Tensor | None:
        """What such a file adds to the bias [out], over s; None: nothing."""
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


class CopiesLayer(AdapterLayer):
    """What an adapter has at a module of which it trains copies, and nothing else."""

    rewrites = False

    def trained_factors(self) -> Mapping[str, Factor]:
        return {}

    def frozen_factors(self) -> Mapping[str, Factor]:
        return {}

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return base(inputs)


def known(
    inputs: Tensor, outputs: Tensor, base: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """`base`, where what it gives of these inputs is known: a second run could count or store."""
    return lambda x: outputs if x is inputs else base(x)


def decoded(state: Tensor) -> dict[str, Any]:
    """What `AdapterLayer.get_extra_state` says.

    Raises:
        InputError: it is something else.
    """
    try:
        value = json.loads(bytes(state.to(torch.uint8).flatten().tolist()))
    except (ValueError, RecursionError):
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
        check_shape(name, tensor.shape, state[name])


def check_shape(name: str, own: Sequence[int], tensor: Tensor) -> None:
    """Make sure that what is loaded has the shape that it has on this model.

    Raises:
        InputError: it has another.
    """
    if tuple(own) != tuple(tensor.shape):
        there = f"{tuple(tensor.shape)} in what is loaded, and {tuple(own)} on this model"
        raise InputError(f"has shape {there}", field=name)
