"""What all adapters share: the value, the layer with its factors, and the ledger of both.

A method says which factors it has at a site, what they do to the layer's output, and which change
of the weight that amounts to. Targets, freezing, several adapters, merging, files and switching
come from here, `sites`, `attached` and `peft_files`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.ledger import Entry, Ledger, Phase, Shape, Work
from modicum.core.method import Context, Method, Names, Probability, Strings
from modicum.core.random import normal_, uniform_
from modicum.core.sharding import elements_before, own_part

if TYPE_CHECKING:
    from modicum.adapters.attached import AttachedAdapter

SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")


@dataclass(frozen=True)
class Factor:
    """A trained tensor of an adapter at one site, and how it starts.

    `bound` b starts it as U(-b, b), `std` s as N(0, s^2); neither, as zeros.
    """

    shape: tuple[int, ...]
    bound: float = 0.0
    std: float = 0.0

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
class Placement:
    """What an adapter's ledger is asked at: a site and the shape of a micro-batch."""

    site: Site
    shape: Shape


class AdapterLayer(nn.Module):
    """An adapter at one site. Subclasses give `forward` and `delta`; factors are parameters.

    Factors are fp32 whatever the base weight is stored in, and compute in the input's dtype.
    """

    def __init__(
        self, method: Adapter, site: Site, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.method, self.site = method, site
        for name, factor in method.factors(site).items():
            value = torch.empty(factor.shape, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(value))

    def initialise(self, *, seed: int, name: str) -> None:
        """Start every factor; the same seed and names give the same values anywhere."""
        for key, factor in self.method.factors(self.site).items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"{name}/{self.site.name}/{key}")

    @abstractmethod
    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's output, where `base` computes what the layer gives without this adapter."""

    @abstractmethod
    def delta(self) -> Tensor:
        """The change of the weight that the adapter amounts to: fp32 [out, in]."""

    def as_lora(self) -> tuple[Tensor, Tensor, float] | None:
        """(A [r, in], B [out, r], s) with delta = s B A, where that is exact; else None."""
        return None


class Adapter(Method):
    """The fields and services of every adapter.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`.
        exclude: of those, the ones to leave out.
        dropout: probability with which an adapter's input is dropped in training.
    """

    layer: ClassVar[type[AdapterLayer]]

    targets: Names = ("all-linear",)
    exclude: Strings = ()
    dropout: Probability = 0.0

    @abstractmethod
    def factors(self, site: Site) -> Mapping[str, Factor]:
        """The trained tensors at a site, by name."""

    def attach(self, model: nn.Module, *, name: str = "default", seed: int = 0) -> AttachedAdapter:
        """Freeze `model`, put this adapter on its target layers, and return the handle to it.

        Raises:
            InputError: a target matches no layer, or a tied one; or the name is taken.
        """
        from modicum.adapters.attached import AttachedAdapter

        return AttachedAdapter(model, self, name=name, seed=seed)

    def bind(self, context: Context) -> AttachedAdapter:
        """Attach to the context's model, seeded by the context."""
        return self.attach(context.model, seed=context.seed)

    def trained(self, site: Site) -> int:
        """Trained elements at a site."""
        return sum(math.prod(factor.shape) for factor in self.factors(site).values())

    def saves_input(self, site: Site) -> bool:
        """Whether the layer's input is kept for the backward pass: by a linear map, undropped."""
        return site.kind == "linear" and not self.dropout

    def ledger(self, at: Placement) -> Ledger:
        """Factors, what `layer.forward` saves beyond the layer's input, and the extra work."""
        compute = at.shape.compute_bytes
        saved = self.saved_elements(at.site) * at.shape.positions
        # What dropout lets through, and what it multiplied with.
        dropped = 2 * at.site.in_features * at.shape.positions if self.dropout else 0
        casts = compute * self.trained(at.site) if compute < 4 else 0
        return Ledger.of(
            Entry("weight", 4 * self.trained(at.site), what="adapter factors"),
            Entry("activation", saved * compute, SAVED, "adapter activations"),
            Entry("activation", dropped * compute, SAVED, "dropout"),
            Entry("activation", casts, SAVED, "factors in bf16"),
            *self.work(at),
        )

    @abstractmethod
    def saved_elements(self, site: Site) -> int:
        """Elements that one position's forward saves for backward, beside the layer's input."""

    @abstractmethod
    def work(self, at: Placement) -> tuple[Work, ...]:
        """Matrix-product work beyond the frozen layer's own, forward and backward."""

    def with_fields(self, **fields: Any) -> Adapter:
        """This value with some fields changed, checked again."""
        return type(self)(**(self.model_dump() | fields))
