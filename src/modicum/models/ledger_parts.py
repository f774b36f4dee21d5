"""What the parts of the decoder have in common in its ledger: the shape, and what learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.machine.kernels import ProductScratch, product_scratch
from modicum.models.config import ModelConfig

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter
    from modicum.core.layers.layer_sites import Site


@dataclass(frozen=True)
class AdapterActivations:
    """What adapters on the frozen decoder keep for the backward pass.

    Args:
        sites: bytes that the adapter of each layer or block keeps, by its full name.
        inputs: of those layers, the ones whose input is kept for their adapter.
        sums: of those layers, the ones of whose input sums are kept, of so many channels each.
        masked: of those layers, the ones whose adapter drops values of the input.
    """

    sites: Mapping[str, int] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()
    masked: frozenset[str] = frozenset()
    sums: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, adapter: Adapter, kept: Mapping[Site, int]) -> AdapterActivations:
        """Those of one adapter, which keeps so many bytes at its sites."""
        dropped = [site for site in kept if adapter.dropout and site.kind == "linear"]
        parts = {site.name: adapter.input_parts(site) for site in kept if adapter.saves_input(site)}
        return cls(
            {site.name: size for site, size in kept.items()},
            frozenset(name for name, each in parts.items() if each == 1),
            frozenset(site.name for site in dropped),
            {name: each for name, each in parts.items() if each > 1},
        )


@dataclass(frozen=True)
class DecoderPart:
    """A part of the decoder: which of its layers learn, and what is differentiated in it.

    Args:
        prefix: what the names of its layers begin with.
        flows: whether its input takes a gradient.
        counts: of a tensor's bytes, whether they are counted; by default all are.
    """

    config: ModelConfig
    shape: ModelQuery
    adapted: AdapterActivations | None
    prefix: str
    flows: bool
    counts: Callable[[int], bool] = field(default=bool, kw_only=True)

    def tensor(self, size: int) -> int:
        """Bytes of a tensor, if these are counted."""
        return size if self.counts(size) else 0

    def each(self, size: int) -> int:
        """Bytes a position of a tensor that has so many there, if it is counted."""
        return size if self.counts(size * self.shape.positions) else 0

    @property
    def trained(self) -> bool:
        """Whether all weights are."""
        return self.adapted is None

    @property
    def half(self) -> bool:
        """Whether weights that are trained in fp32 compute as bf16 copies."""
        return self.trained and self.shape.compute_bytes < 4

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between blocks."""
        return self.tensor(self.shape.positions * self.config.width * self.shape.residual_bytes)

    def learns(self, *layers: str) -> bool:
        """Whether the output of one of these linear layers depends on something trained in it."""
        return self.adapted is None or any(self.prefix + n in self.adapted.sites for n in layers)

    def inputs(self, *layers: str) -> int:
        """How many copies are kept of the one tensor that these linear layers read."""
        if self.adapted is None:
            return len(layers) if self.half else 1  # autocast makes each layer a copy of its own
        return int(any(self.prefix + name in self.adapted.inputs for name in layers))

    def sums(self, width: int, *layers: str) -> int:
        """Bytes a position of what is kept as sums of the one tensor that these layers read."""
        known = self.adapted.sums if self.adapted else {}
        parts = {known.get(self.prefix + n, 0) for n in layers} - {0}
        return sum(self.each(width // part * self.shape.compute_bytes) for part in parts)

    def mask(self, layer: str, width: int) -> int:
        """Bytes of the mask of an adapter's dropout, while a layer of so many inputs is undone."""
        masked = self.adapted is not None and self.prefix + layer in self.adapted.masked
        return self.tensor(masked * width * self.shape.positions)

    def scratch(self, inputs: int, outputs: int) -> ProductScratch:
        """What the products of a linear layer of these features work in."""
        if self.shape.device != "cpu":  # cuBLAS has a workspace of its own, the same for all
            return ProductScratch(0, 0, 0)
        half = self.shape.compute_bytes < 4
        sizes = product_scratch(self.shape.positions, inputs, outputs, half=half)
        return ProductScratch(*map(self.tensor, sizes))

    def gradient_of(self, elements: int, scratch: int) -> int:
        """Bytes of a weight's gradient as it is made.

        In bf16 the product's scratch comes first, then the fp32 copy.
        """
        if not self.trained:
            return 0
        if not self.half:
            return self.tensor(4 * elements)
        return self.tensor(2 * elements) + max(self.tensor(4 * elements), scratch)

    @property
    def fused_norms(self) -> bool:
        """Whether a norm is one kernel, that keeps its input as it came and a scale for each row.

        Else it is several, the first of which casts to fp32.
        """
        return self.shape.device == "cuda"

    @property
    def norm_input(self) -> int:
        """Bytes of the input that a norm keeps a position."""
        return self.each(self.config.width * (self.shape.residual_bytes if self.fused_norms else 4))

    @property
    def keeps_stream(self) -> bool:
        """Whether what a norm keeps is the very tensor that came in, not a copy."""
        return self.fused_norms or self.shape.residual_bytes == 4

    @property
    def norm(self) -> int:
        """Bytes that a norm keeps a position: input and scale, and of several kernels the output,
        if it is trained."""
        output = 4 * self.config.width if self.trained and not self.fused_norms else 0
        return self.norm_input + self.each(4) + self.each(output)

    @property
    def adapters(self) -> int:
        """Bytes that adapters keep here beyond the inputs."""
        sites = self.adapted.sites if self.adapted else {}
        here = (size for name, size in sites.items() if f"{name}.".startswith(self.prefix))
        return sum(map(self.tensor, here))
