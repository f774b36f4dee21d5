"""WeLore: one threshold on all layers' spectra says which have factors, and only these train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor, nn

from modicum.compress.low_rank_base import FactorCompressor
from modicum.core.contracts.method import Against, Info, Probability
from modicum.core.contracts.search import LinearRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration, Loss, Mask
from modicum.core.layers.dense_layers import all_layers
from modicum.core.layers.factorize import decomposed
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.linear_forms import forms_of
from modicum.core.layers.rank_plan import (
    RankPlan,
    is_factored,
    plan_within,
    plan_without,
    train_factors_alone,
)
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.turns import by_turns

_SPECTRUM = "spectrum"


class WeLore(FactorCompressor):
    """Ranks by one threshold for all layers; layers that are not low-rank stay dense and frozen.

    Singular values of each layer are brought to 0 to 1 by the layer's own least and largest one,
    and those below one threshold go, whichever layer they are of. A layer of which so few are left
    that factors are no larger than its weight gets them; the others stay as they are. No data is
    looked at: the calibration is the spectra. Afterwards only the factors train, with gradients and
    optimizer state for these alone. Which rank a layer gets is known once its weights were read, so
    `plan`, and the plan of a run, count the most that there may be; the run revises it.

    Prefer it for a model some of whose layers are nearly low-rank. At the quick size of its proof
    that is so of planted layers; a small decoder's spectra are flat, and there it is below uniform
    ranks of as many elements with a fifth of them gone and not with two fifths, and training the
    factors alone gains three quarters of what full training does. Half of all ranks gone is less
    than half of the bytes, as layers that stay dense count in full: `share` is of elements, and the
    report has the bytes.

    Args:
        share: of the elements of all target layers together, the part that is left at most.
        reduction: in place of it the paper's target: the share of all singular values that lies
            below the threshold.
        rule: which layers have factors: see `is_factored` in `core.layers.rank_plan`.
        train: what is trained on afterwards: the `factors` alone, or `all` that was.
        targets, exclude: see `LayerCompressor`; `examples` is unread.

    Raises:
        InputError: when fitted, of fewer elements than the layers' largest singular values have.

    Source: "From Low Rank Gradient Subspace Stabilization to Low-Rank Weights: Observations,
    Theories, and Applications", arXiv 2407.11239, sections 3 and 4.

    >>> import torch
    >>> from modicum.compress import WeLore
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    >>> with torch.no_grad():
    ...     _ = model[0].weight.copy_(torch.randn(64, 2) @ torch.randn(2, 16))
    >>> compressor = WeLore(share=0.8)
    >>> compressed = compressor.fit(model, compressor.calibrate(model))
    >>> compressed.report.bytes_before, compressed.report.bytes_after < 4096
    (4096, True)
    >>> optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    >>> [type(layer).__name__ for layer in (model[0], model[2])]
    ['LowRankLinear', 'Linear']
    """

    info = Info(
        name="welore",
        title="WeLore: ranks by one threshold for all layers, and only low-rank layers train",
        room="compress",
        paper="From Low Rank Gradient Subspace Stabilization to Low-Rank Weights, arXiv 2407.11239",
        claim="below uniform ranks at every size, and trained in its low-rank layers alone as good "
        "as in all, with 0.6 of the memory",
        traits=(
            "needs_trained_base",
            "plans_from_weights",
            "mergeable",
            "exact_resume",
            "compiles",
        ),
        traits_if=(("train", "factors", "freezes_the_rest"),),
        evidence="against paper",
        claim_verdict="in part",
        against=Against("better", "one share of each layer's energy"),
        reason="with half of the elements gone or more its loss rises by 0.73 and 0.65 of what "
        "it does with uniform ranks, and below that by 1.10 to 1.21, which is less than "
        "seeds spread but at 40 %; factors alone gain 0.98 of what full training does",
        run_on_gpu=True,
        tiny={"share": 0.5, "train": "all"},
    )
    search = SearchTable({"share": LinearRange(0.2, 0.9, 0.5)}, size="share")

    share: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] = 0.5
    reduction: Probability | None = None
    rule: Literal["elements", "half"] = "elements"
    train: Literal["factors", "all"] = "factors"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ()

    def metric(self, layer: Site, calibration: Calibration) -> None:
        return None

    def rank_of(self, layer: Site) -> int | None:
        """The rank that the spectra gave a layer; before they are known the largest it may have."""
        if "rank" in layer.prepared:
            return int(layer.prepared["rank"])
        shape = layer.out_features, layer.in_features
        most = min(shape) // 2 if self.rule == "half" else layer.elements // sum(shape)
        return most if most and is_factored(most, shape, self.rule) else None

    def calibrate(
        self,
        model: nn.Module,
        batches: Iterable[Any] = (),
        loss: Loss | None = None,
        *,
        mask: Mask | None = None,
        ranks: Ranks | None = None,
        cache: str | Path | None = None,
        progress: CountProgress | None = None,
    ) -> Calibration:
        """The spectra of the layers, of which each of the `ranks` takes some; no batch is read.

        Raises:
            InputError: as `plan`; or a weight has values that are not finite.
        """
        layers, names, sums = all_layers(model), list(self.plan(model).layers), {}

        def spectrum(name: str, _: None) -> dict[str, Tensor]:
            weight = model.get_submodule(name).get_parameter("weight").detach()
            if not weight.isfinite().all():
                raise InputError("its weight has values that are not finite", value=name)
            weight = weight.T if layers[name].transposed else weight
            # A copy: what comes from a file would hold all of it.
            return {_SPECTRUM: decomposed(weight, None, cache).values.cpu().clone()}

        for name, made in by_turns(names, spectrum, ranks or Ranks()):
            sums[_SPECTRUM, name] = made[_SPECTRUM]
            if progress is not None:
                progress(len(sums), len(names))
        return Calibration(sums, 0, dict.fromkeys(names, 0))

    def ranks(self, layers: Mapping[str, Site], calibration: Calibration) -> RankPlan:
        """What the spectra of these layers say of each: its rank, or that it stays dense.

        Raises:
            InputError: the calibration lacks a layer; or no threshold leaves so little.
        """
        for name in layers:
            if (_SPECTRUM, name) not in calibration.sums:
                problem = "the calibration has no spectrum of this layer; calibrate with WeLore"
                raise InputError(problem, value=name)
        spectra = {name: calibration.sums[_SPECTRUM, name] for name in layers}
        shapes = {name: (one.out_features, one.in_features) for name, one in layers.items()}
        if self.reduction is not None:
            return plan_without(self.reduction, spectra, shapes, self.rule)
        whole = sum(one.elements for one in layers.values())
        try:
            return plan_within(int(self.share * whole + 1e-6), spectra, shapes, self.rule)
        except InputError as error:
            raise InputError(error.problem, field="share", value=self.share) from None

    def settled(
        self, layers: Mapping[str, Site], calibration: Calibration
    ) -> tuple[Mapping[str, Site], Mapping[str, Any]]:
        plan = self.ranks(layers, calibration)
        if not plan.ranks:
            problem = "at this reduction every layer's factors would be larger than its weight"
            raise InputError(problem, field="reduction", value=self.reduction)
        found = {n: replace(layers[n], prepared={"rank": rank}) for n, rank in plan.ranks.items()}
        return found, {"ranks": plan.as_json()}

    def freeze(self, model: nn.Module) -> None:
        if self.train == "factors":
            formed = forms_of(model).layers
            train_factors_alone(model, {n: f for n, f in formed.items() if f.name == "low_rank"})
