"""What all compressors share: which layers take factors, of which rank, and what that spends.

A method says which statistics of the data it asks for, and in which metric a layer's factors are
to be near its weight. Calibration, ranks, the walk over the layers, the report and files come from
here, `layers`, `compressed` and `files`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from modicum.compress.dense_layers import DenseLayer, choose
from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery, Phase, Work
from modicum.core.contracts.method import Context, Method, Names, PositiveInt, Strings
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration, Loss, Mask, calibrate
from modicum.core.layers.factorize import share_rank
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from modicum.compress.compressed_model import CompressedModel

SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")


@dataclass(frozen=True)
class CompressorQuery:
    """What a compressor's ledger is asked at: a layer and the shape of a micro-batch."""

    layer: DenseLayer
    shape: ModelQuery


class Compressor(Method):
    """The fields and services of every method that puts low-rank factors in a weight's place.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`, which leaves
            out the output head; embeddings are never compressed.
        exclude: of those, the ones to leave out.
        share: of each layer's weight elements, the part that its factors have at most.
        rank: of every layer, in place of what `share` gives. A layer that would not become
            smaller stays dense.
        multiple: ranks are multiples of it, where they are no smaller; 128 suits tensor cores.
        examples: how many examples `calibrate` looks at.
    """

    targets: Names = ("all-linear",)
    exclude: Strings = ()
    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    rank: PositiveInt | None = None
    multiple: PositiveInt = 1
    examples: PositiveInt = 1024

    @property
    @abstractmethod
    def statistics(self) -> tuple[str, ...]:
        """What a calibration must note of each layer, by the names of `core.layers.statistics`."""

    @abstractmethod
    def metric(self, layer: DenseLayer, calibration: Calibration) -> Tensor | None:
        """Where a layer's factors must be near its weight: see `factorize.decompose`."""

    def rank_of(self, layer: DenseLayer) -> int | None:
        """The rank of a layer's factors; None where they would save nothing."""
        ins, outs = layer.in_features, layer.out_features
        rank = self.rank or share_rank(ins, outs, self.share, self.multiple)
        return rank if rank * (ins + outs) < layer.elements else None

    def plan(self, layers: Iterable[DenseLayer]) -> dict[str, int]:
        """The ranks by name of the layers that become smaller, by arithmetic alone."""
        ranks = {layer.name: self.rank_of(layer) for layer in layers}
        return {name: rank for name, rank in ranks.items() if rank is not None}

    def ranks(self, model: nn.Module) -> dict[str, int]:
        """The same for a model, which may be without memory.

        Raises:
            InputError: a target matches no layer or a tied one, or nothing would become smaller.
        """
        planned = self.plan(choose(model, self.targets, self.exclude))
        if not planned:
            raise InputError("at this rank no layer becomes smaller", field="rank", value=self.rank)
        return planned

    def calibrate(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        mask: Mask | None = None,
        ranks: Ranks | None = None,
        cache: str | Path | None = None,
        progress: CountProgress | None = None,
    ) -> Calibration:
        """Note what this method needs of the layers that it would compress.

        It looks at `examples` examples, each of the `ranks` at its part of them, in full batches;
        see `modicum.compress.calibrate`. What it found serves any share, rank and damping.

        Raises:
            InputError: as `ranks` and `calibrate`.
        """
        ranks = ranks or Ranks()
        return calibrate(
            model,
            batches,
            loss,
            layers=self.ranks(model),
            statistics=self.statistics,
            limit=-(-self.examples // ranks.size),
            mask=mask,
            ranks=ranks,
            cache=cache,
            progress=progress,
        )

    def bind(self, context: Context) -> CompressedModel:
        """The handle to the context's model, of which nothing is changed yet.

        Raises:
            InputError: as `ranks`.
        """
        from modicum.compress.compressed_model import CompressedModel

        return CompressedModel(context.model, self.ranks(context.model), self)

    def wrap(self, model: nn.Module) -> CompressedModel:
        """Put the forms in without numbers: for a model on meta, or one to load factors into."""
        compressed = self.bind(Context(model))
        compressed.wrap()
        return compressed

    def fit(self, model: nn.Module, calibration: Calibration, **how: Any) -> CompressedModel:
        """Put the best factors into a trained model; `how` as in `CompressedModel.fit`."""
        compressed = self.bind(Context(model))
        compressed.fit(calibration, **how)
        return compressed

    def trained(self, layer: DenseLayer) -> int:
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
