"""What a merge leaves behind to be undone with."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class Merged:
    """What a merge replaced and sums cannot give back: low-precision tensors, codes, layers.

    `slices` are the rows that slices of fused layers had before, `patches` the entries that patches
    replaced; a rank's own. `rounding` is, by layer that was
    rounded, the norm of the rounding error over that of the adapter's own change. `marks` are sums
    over what layers of which something is kept held after the merge.
    """

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    copied: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    layers: dict[str, nn.Module] = field(default_factory=dict)
    rounding: dict[str, float] = field(default_factory=dict)
    slices: dict[str, Tensor] = field(default_factory=dict)
    patches: dict[str, Tensor] = field(default_factory=dict)
    marks: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def kept(self) -> list[str]:
        """The names of layers and slices of which something is kept."""
        copied = [name for name, tensors in self.copied.items() if tensors]
        return sorted({*self.tensors, *self.slices, *self.patches, *self.layers, *copied})
