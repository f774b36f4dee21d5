"""A model that a compressor makes smaller: the runtime that fits forms, and files them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compress import files
from modicum.compress.base import CompressorQuery, FittedLayer, LayerCompressor
from modicum.core.contracts.ledger import Ledger, ModelQuery, Work
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.dense_layers import all_layers
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.formed_model import FormedModel, of_layer
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.turns import by_turns

_ERRORS = "errors"  # next to a fitted layer's tensors: what is lost, and what there was


@dataclass(frozen=True)
class LayerReport:
    """What became of a layer.

    Args:
        form: which form it has now.
        bytes_before, bytes_after: of its weight.
        error: tr((W - X) M (W - X)^T), X the weight that the form represents and M the method's
            metric.
        total: the same for X = 0.
    """

    name: str
    form: LayerForm
    bytes_before: int
    bytes_after: int
    error: float
    total: float

    @property
    def relative_error(self) -> float:
        """The error over what there was, 0 for a layer that is zero."""
        return self.error / self.total if self.total else 0.0


@dataclass(frozen=True)
class CompressionReport:
    """What became of each compressed layer."""

    layers: tuple[LayerReport, ...]

    @property
    def bytes_before(self) -> int:
        """Of the weights of all these layers."""
        return sum(layer.bytes_before for layer in self.layers)

    @property
    def bytes_after(self) -> int:
        """Of their forms."""
        return sum(layer.bytes_after for layer in self.layers)

    @property
    def error(self) -> float:
        """The sum of the layers' errors."""
        return sum(layer.error for layer in self.layers)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        sums = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        rows = [
            asdict(row) | {"form": row.form.as_json(), "relative_error": row.relative_error}
            for row in self.layers
        ]
        return sums | {"layers": rows}


class CompressedModel(FormedModel):
    """The handle to a model and the forms in it; `Compressor.fit`, `wrap` and `bind` make it.

    Args:
        plan: the forms of the layers that take one, by full name.
        method: what fits them; None where they were fitted before.

    Attributes:
        report: what `fit` did; None before.

    Raises:
        InputError: as `FormedModel`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: FormPlan,
        method: LayerCompressor | None = None,
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(model, plan, left_out)
        self.method = method
        self.report: CompressionReport | None = None
        self._found: Mapping[str, Any] = {}

    def fit(
        self,
        calibration: Calibration,
        *,
        ranks: Ranks | None = None,
        cache: str | Path | None = None,
        progress: CountProgress | None = None,
    ) -> CompressionReport:
        """Put the best forms in, layer by layer, so that one dense weight more is the peak.

        Make optimizers afterwards: parameters are new. Several `ranks` that hold the same weights
        share the work and end with the same bits.

        Args:
            cache: a folder that keeps what is expensive and serves other plans too.
            progress: is called with the layers done, and of how many.

        Raises:
            InputError: the weights have no memory, other forms already or values that are not
                finite, or the calibration lacks a layer.
        """
        self._settle(calibration)
        ranks, names, rows = ranks or Ranks(), list(self.layers), []

        def make(name: str, _: None) -> dict[str, Tensor]:
            made = self._fitted(name, calibration, cache)
            errors = torch.tensor([made.error, made.total], dtype=torch.float64)
            return {key: t.cpu().double() for key, t in made.tensors.items()} | {_ERRORS: errors}

        for name, tensors in by_turns(names, make, ranks):
            rows.append(self._fill(name, tensors))
            if progress is not None:
                progress(len(rows), len(names))
        self.report = CompressionReport(tuple(rows))
        if self.method is not None:
            self.method.freeze(self.model)
        return self.report

    def _settle(self, calibration: Calibration) -> None:
        """Take over what the method decides once it has the calibration."""
        if self.method is None or self.report is not None:
            return
        layers, self._found = self.method.settled(self.layers, calibration)
        forms = {name: self.method.form_of(layer) for name, layer in layers.items()}
        planned = {name: form for name, form in forms.items() if form is not None}
        self.layers, self.plan = dict(layers), FormPlan().with_forms(planned)

    @torch.no_grad()
    def _fitted(self, name: str, calibration: Calibration, cache: str | Path | None) -> FittedLayer:
        if self.method is None:
            raise InputError("the layers of this model were fitted before", value=name)
        weight, form = self._weight(name), self.plan.of(name)
        with of_layer(name):
            return self.method.fitted(self.layers[name], weight, form, calibration, cache)

    @torch.no_grad()
    def _fill(self, name: str, made: Mapping[str, Tensor]) -> LayerReport:
        """Replace a layer by the form that one rank fitted."""
        form, layer = self._replace(name), self.layers[name]
        own = {key: p for key, p in form.named_parameters(recurse=False) if key != "bias"}
        for key, tensor in own.items():
            tensor.copy_(made[key])
        error, total = made[_ERRORS].tolist()
        before = layer.elements * next(iter(own.values())).element_size()
        after = sum(tensor.nbytes for tensor in own.values())
        return LayerReport(name, self.plan.of(name), before, after, error, total)

    def ledger(self, shape: ModelQuery) -> Ledger:
        """What the forms spend beyond the dense layers, at the shape of a micro-batch.

        Where only they are trained, the products for gradients of the other weights are left out.

        Raises:
            InputError: the layers were fitted before, and it is not known by what.
        """
        if self.method is None:
            raise InputError("the layers of this model were fitted before")
        layers = self.layers.values()
        found = Ledger.sum(self.method.ledger(CompressorQuery(each, shape)) for each in layers)
        if "freezes_the_rest" in self.method.traits:
            frozen = sum(each.elements for each in all_layers(self.model).values())
            found += Ledger.of(Work(-2 * shape.positions * frozen, phase="backward"))
        return found

    def facts(self) -> dict[str, Any]:
        """What was done, as plain values that go next to the model's files."""
        return {} if self.report is None else {**self._found, "report": self.report.as_json()}

    def save(self, folder: str | Path, *, write: bool = True) -> Path:
        """Write the model with its forms; `modicum.compress.load` reads it. See `files.save`."""
        return files.save(self.model, self.plan, self.method, folder, write=write)
