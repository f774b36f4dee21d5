"""What all compressors share: a plan by arithmetic, a pass over data, and the handle that fits.

`LayerCompressor` is for methods that give layers another form, `unit_pruner.UnitPruner` for those
that take heads and neurons out of blocks. Files come from `files`; factors of low rank have a base
of their own, `low_rank_base`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.method import Context, Method, Names, PositiveInt, Strings
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration, Loss, Mask, calibrate
from modicum.core.layers.dense_layers import all_layers, choose, left_out
from modicum.core.layers.factorize import svd_bytes
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.left_out import warn_of_left_out
from modicum.core.layers.statistics import noting_bytes, statistic
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch import Tensor, nn

    from modicum.compress.compressed_model import CompressedModel


@dataclass(frozen=True)
class CompressorQuery:
    """What a compressor's ledger is asked at: a layer and the shape of a micro-batch."""

    layer: Site
    shape: ModelQuery


@dataclass(frozen=True)
class FittedLayer:
    """What a compressor makes of a layer's weight.

    Args:
        tensors: the form's, by name; rounded to the model's dtype when they are put in.
        error: of the weight that they represent, in the method's metric, squared.
        total: the same of a weight of zeros.
    """

    tensors: Mapping[str, Tensor]
    error: float
    total: float


@dataclass(frozen=True)
class Making:
    """What a rank holds while a model is made smaller, next to the dense model.

    Args:
        passes: whether batches go through the model, and backward too.
        sums: bytes of what a calibration notes.
        noting: bytes in which what one layer was given becomes part of that, at most.
        fitting: bytes that the fit of one layer takes at most.
        layers: names of those whose inputs are kept for that in a pass backward.
    """

    passes: Literal["none", "forward", "backward"] = "backward"
    sums: int = 0
    noting: int = 0
    fitting: int = 0
    layers: tuple[str, ...] = ()


class Report(Protocol):
    """What became of a model, in bytes of what was changed, and as plain values."""

    @property
    def bytes_before(self) -> int: ...
    @property
    def bytes_after(self) -> int: ...
    def as_json(self) -> dict[str, Any]: ...


class Compressed(Protocol):
    """The handle to a model that a compressor makes smaller.

    Attributes:
        plan: what layers and blocks have of their own afterwards.
        method: what fits them; None where they were fitted before.
        report: what `fit` did; None before.
    """

    model: nn.Module
    plan: FormPlan
    method: Any

    @property
    def report(self) -> Report | None: ...
    def wrap(self) -> None: ...
    def fit(
        self,
        calibration: Calibration,
        *,
        ranks: Ranks | None = None,
        progress: CountProgress | None = None,
    ) -> Report: ...
    def merge(self) -> None: ...
    def ledger(self, shape: ModelQuery) -> Ledger: ...
    def facts(self) -> dict[str, Any]: ...
    def save(self, folder: str | Path, *, write: bool = True) -> Path: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...
    def close(self) -> None: ...


class Compressor(Method):
    """The fields and services of every method that makes a trained model smaller.

    Args:
        examples: how many examples `calibrate` looks at.
    """

    examples: PositiveInt = 1024

    @abstractmethod
    def plan(self, model: nn.Module, within: FormPlan | None = None) -> FormPlan:
        """What layers or blocks have of their own afterwards; the model may be without memory.

        Args:
            within: the plan that this one extends.

        Raises:
            InputError: nothing would become smaller, or the model is not fit for it.
        """

    @abstractmethod
    def calibrate(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        ranks: Ranks | None = None,
        progress: CountProgress | None = None,
    ) -> Calibration:
        """Note what this method needs to know of the data, from `examples` of them.

        Each of the `ranks` looks at its part, in full batches. What was found serves other values
        of the method too.

        Raises:
            InputError: as `plan`; or the data or the loss say nothing.
        """

    def making(self, model: nn.Module, shape: ModelQuery) -> Making:
        """What `calibrate` and `fit` hold next to the model, which may be without memory.

        Args:
            shape: of a batch that `calibrate` is given; `weight_bytes` are the model's.
        """
        return Making()

    def left_out(self, model: nn.Module) -> dict[str, str]:
        """What is left dense though it holds matrices, by name, with the reason.

        Here nothing: a method that chooses no layers by name leaves none out.
        """
        return {}

    def freeze(self, model: nn.Module) -> None:
        """Freeze what of a model that was made small is not trained on; here nothing."""

    @abstractmethod
    def bind(self, context: Context) -> Compressed:
        """The handle to the context's model, of which nothing is changed yet.

        Raises:
            InputError: as `plan`.
        """

    def wrap(self, model: nn.Module) -> Compressed:
        """Make it small without numbers: a model on meta, or one to load numbers into."""
        compressed = self.bind(Context(model))
        compressed.wrap()
        return compressed

    def fit(self, model: nn.Module, calibration: Calibration, **how: Any) -> Compressed:
        """Make a trained model small; `how` as in the handle's `fit`."""
        compressed = self.bind(Context(model))
        compressed.fit(calibration, **how)
        return compressed


class LayerCompressor(Compressor):
    """The fields and services of every method that gives trained layers a smaller form.

    Args:
        targets: layers by full name, last name (`q_proj`), pattern, or `all-linear`, which leaves
            out the output head; embeddings are never compressed.
        exclude: of those, the ones to leave out.
        examples: see `Compressor`.
    """

    targets: Names = ("all-linear",)
    exclude: Strings = ()

    @property
    @abstractmethod
    def statistics(self) -> tuple[str, ...]:
        """What a calibration must note of each layer, by the names of `core.layers.statistics`."""

    @abstractmethod
    def form_of(self, layer: Site) -> LayerForm | None:
        """The form that a layer takes, by arithmetic alone; None where it stays dense."""

    @abstractmethod
    def fitted(
        self,
        layer: Site,
        weight: Tensor,
        form: LayerForm,
        calibration: Calibration,
        cache: str | Path | None,
    ) -> FittedLayer:
        """The tensors of the form that represent `weight` [out, in] best.

        Args:
            cache: a folder for what is expensive and serves other forms too; None for none.
        """

    def settled(
        self, layers: Mapping[str, Site], calibration: Calibration
    ) -> tuple[Mapping[str, Site], Mapping[str, Any]]:
        """Those of the planned layers that take a form, and facts of the choice, as plain values.

        A method with the trait `plans_from_weights` knows them by the calibration, and says in
        `prepared` of a layer what it found. Its `plan` is a bound: what layers have at most.
        """
        return layers, {}

    def plan(self, model: nn.Module, within: FormPlan | None = None) -> FormPlan:
        """The forms by name of the layers that become smaller; the model may be without memory.

        Args:
            within: the plan that this one extends.

        Raises:
            InputError: a target matches no layer or a tied one, or nothing would become smaller.
        """
        planned = {
            layer.name: form
            for layer in choose(model, self.targets, self.exclude)
            if (form := self.form_of(layer)) is not None
        }
        if not planned:
            raise InputError("with these fields no layer becomes smaller", field="targets")
        return (within or FormPlan()).with_forms(planned)

    def making(self, model: nn.Module, shape: ModelQuery) -> Making:
        """Sums of float64 for each layer, and one layer's decomposition in float64."""
        kinds, sites = [statistic(name) for name in self.statistics], all_layers(model)
        layers = [sites[name] for name in self.plan(model).layers]
        sums = [kind.shape(layer.in_features) for kind in kinds for layer in layers]
        gradients = any(kind.needs_gradients for kind in kinds)
        return Making(
            "backward" if gradients else "forward" if kinds else "none",
            sum(8 * math.prod(each) for each in sums),
            max(noting_bytes(layer.in_features, layer.out_features, shape) for layer in layers),
            max(svd_bytes(layer.out_features, layer.in_features) for layer in layers),
            tuple(layer.name for layer in layers),
        )

    def left_out(self, model: nn.Module) -> dict[str, str]:
        """What `targets` leave dense though it holds matrices, by name, with the reason.

        Such are the stacked experts of a mixture. `wrap` and `fit` warn of them.

        Args:
            model: without adapters; it may be without memory.
        """
        return left_out(model, self.targets, self.exclude)

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
        see `modicum.compress.calibrate`. What it found serves other values of the method too.

        Raises:
            InputError: as `plan` and `calibrate`.
        """
        ranks = ranks or Ranks()
        return calibrate(
            model,
            batches,
            loss,
            layers=self.plan(model).layers,
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
            InputError: as `plan`.
        """
        from modicum.compress.compressed_model import CompressedModel

        model = context.model
        return CompressedModel(model, self.plan(model), self, self.left_out(model))

    def wrap(self, model: nn.Module) -> CompressedModel:
        """Put the forms in without numbers: for a model on meta, or one to load numbers into."""
        compressed = self.bind(Context(model))
        compressed.wrap()
        warn_of_left_out(compressed.left_out, self.targets)
        return compressed

    def fit(self, model: nn.Module, calibration: Calibration, **how: Any) -> CompressedModel:
        """Put the best forms into a trained model; `how` as in `CompressedModel.fit`."""
        compressed = self.bind(Context(model))
        compressed.fit(calibration, **how)
        warn_of_left_out(compressed.left_out, self.targets)
        return compressed

    @abstractmethod
    def trained(self, layer: Site) -> int:
        """Elements of the layer's weight in its new form, the bias aside."""
