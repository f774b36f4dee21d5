"""What compressors by low-rank factors share: ranks, the fit in a metric, and what it spends.

A method says which statistics of the data it asks for, and in which metric a layer's factors are
to be near its weight.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from modicum.compress.base import CompressorQuery, FittedLayer, LayerCompressor
from modicum.core.contracts.ledger import Entry, Ledger, Phase, Work
from modicum.core.contracts.method import PositiveInt
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.factorize import decomposed, share_rank
from modicum.core.layers.form_plan import LayerForm
from modicum.core.layers.layer_sites import Site

if TYPE_CHECKING:
    from torch import Tensor

SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")


class FactorCompressor(LayerCompressor):
    """The services of every method that puts low-rank factors in a weight's place.

    Args:
        targets, exclude, examples: see `LayerCompressor`.
    """

    @abstractmethod
    def metric(self, layer: Site, calibration: Calibration) -> Tensor | None:
        """Where a layer's factors must be near its weight: see `factorize.decompose`."""

    @abstractmethod
    def rank_of(self, layer: Site) -> int | None:
        """The rank of a layer's factors; None where they would save nothing."""

    def form_of(self, layer: Site) -> LayerForm | None:
        rank = self.rank_of(layer)
        return None if rank is None else LayerForm("low_rank", {"rank": rank})

    def fitted(
        self,
        layer: Site,
        weight: Tensor,
        form: LayerForm,
        calibration: Calibration,
        cache: str | Path | None,
    ) -> FittedLayer:
        basis, rank = decomposed(weight, self.metric(layer, calibration), cache), form.arguments
        down, up = basis.factors(weight, int(rank["rank"]))
        factors = {"down": down, "up": up}
        return FittedLayer(factors, basis.error(int(rank["rank"])), basis.error(0))

    def trained(self, layer: Site) -> int:
        """Elements of the layer's weight in its new form, the bias aside."""
        rank = self.rank_of(layer)
        return layer.elements if rank is None else rank * (layer.in_features + layer.out_features)

    def ledger(self, at: CompressorQuery) -> Ledger:
        """What the layer spends beyond its dense form; where it spends less, less than nothing.

        Gradients and optimizer state follow from `trained`.
        """
        layer, shape, rank = at.layer, at.shape, self.rank_of(at.layer)
        if rank is None:
            return Ledger()
        more = self.trained(layer) - layer.elements
        copies = more * shape.compute_bytes if shape.compute_bytes < shape.weight_bytes else 0
        product = 2 * shape.positions * more
        between = shape.positions * rank * shape.compute_bytes
        return Ledger.of(
            Entry("weight", more * shape.weight_bytes, what="low-rank factors"),
            Entry("activation", between, SAVED, "between low-rank factors"),
            Entry("activation", copies, SAVED, "factors in bf16"),
            Work(product),
            Work(2 * product, phase="backward"),
        )


class LowRankCompressor(FactorCompressor):
    """The fields of every method whose ranks follow from shapes.

    Args:
        share: of each layer's weight elements, the part that its factors have at most.
        rank: of every layer, in place of what `share` gives. A layer that would not become
            smaller stays dense.
        multiple: ranks are multiples of it, where they are no smaller; 128 suits tensor cores.
        targets, exclude, examples: see `LayerCompressor`.
    """

    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    rank: PositiveInt | None = None
    multiple: PositiveInt = 1

    def rank_of(self, layer: Site) -> int | None:
        ins, outs = layer.in_features, layer.out_features
        rank = self.rank or share_rank(ins, outs, self.share, self.multiple)
        return rank if rank * (ins + outs) < layer.elements else None
