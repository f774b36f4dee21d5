"""Ranks for all layers of a model by one threshold on their spectra, and which layers are trained.

Every spectrum is brought to 0 to 1 by its own least and largest value. One threshold for all layers
then says how many of a layer's singular values stay, so that a layer with many small ones loses
much, and a flat one little. Where factors of what stays would be larger than the weight, the layer
stays dense, in full, and is frozen: it is the factored layers that are trained.

Source: "From Low Rank Gradient Subspace Stabilization to Low-Rank Weights" (WeLore), arXiv
2407.11239, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan, LayerForm

Rule = Literal["elements", "half"]

_DIGITS = 9  # values that differ by less are one, as those of a weight and of a multiple of it are


def normalized(spectrum: Tensor) -> Tensor:
    """(s - min) / (max - min) of singular values [q], float64; all 1 where they are all equal.

    >>> normalized(torch.tensor([5.0, 2.0, 1.0])), normalized(torch.full((2,), 3.0))
    (tensor([1.0000, 0.2500, 0.0000], dtype=torch.float64), tensor([1., 1.], dtype=torch.float64))
    """
    wide = spectrum.detach().double().cpu()
    low, width = wide.min(), wide.max() - wide.min()
    if width <= 1e-12 * wide.max():
        return torch.ones_like(wide)
    return ((wide - low) / width).round(decimals=_DIGITS)


def is_factored(rank: int, shape: tuple[int, int], rule: Rule = "elements") -> bool:
    """Whether a layer of this shape [out, in] has factors of this rank, or stays dense.

    Args:
        rule: `elements`: where they have at most as many elements as the weight; `half`, the
            paper's: where at least half of the singular values go, which is the same for a square
            weight and asks for more of every other.

    >>> is_factored(6, (8, 24)), is_factored(6, (8, 24), "half"), is_factored(4, (8, 8))
    (True, False, True)
    """
    most = min(shape) / 2 if rule == "half" else math.prod(shape) / sum(shape)
    return rank <= most


@dataclass(frozen=True)
class PlannedRank:
    """What one threshold makes of a layer.

    Args:
        shape: of its weight, [out, in].
        rank: of its factors; None: it stays dense, and is frozen.
        full: how many singular values it has.
    """

    shape: tuple[int, int]
    rank: int | None
    full: int

    @property
    def elements(self) -> int:
        """Of the factors, or of the weight."""
        return math.prod(self.shape) if self.rank is None else self.rank * sum(self.shape)

    @property
    def trained(self) -> bool:
        """Whether it is one of those that are trained."""
        return self.rank is not None


@dataclass(frozen=True)
class RankPlan:
    """Which layers have factors, of which rank, and are trained; the others are dense and frozen.

    Args:
        threshold: normalized singular values below it go.
        layers: by the layer's full name.
    """

    threshold: float
    layers: Mapping[str, PlannedRank]

    @property
    def ranks(self) -> dict[str, int]:
        """Of the layers that have factors."""
        return {name: one.rank for name, one in self.layers.items() if one.rank is not None}

    @property
    def elements(self) -> int:
        """Of all layers together; times a number's bytes it is what they weigh."""
        return sum(one.elements for one in self.layers.values())

    @property
    def dense_elements(self) -> int:
        """Of all layers together, were they dense."""
        return sum(math.prod(one.shape) for one in self.layers.values())

    @property
    def trained_elements(self) -> int:
        """Of the factors: what has gradients and state of an optimizer."""
        return sum(one.elements for one in self.layers.values() if one.trained)

    def forms(self, within: FormPlan | None = None) -> FormPlan:
        """The plan of forms with low-rank factors where this one has them."""
        made = {name: LayerForm("low_rank", {"rank": rank}) for name, rank in self.ranks.items()}
        return (within or FormPlan()).with_forms(made)

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values: for each layer its rank or `dense`, trained or frozen."""
        layers = {
            name: {
                "rank": "dense" if one.rank is None else one.rank,
                "trained": one.trained,
                "shape": list(one.shape),
                "full": one.full,
            }
            for name, one in self.layers.items()
        }
        return {"threshold": self.threshold, "layers": layers}

    @classmethod
    def from_json(cls, raw: Any) -> RankPlan:
        """The plan that `as_json` wrote.

        Raises:
            InputError: it is no such plan.
        """
        try:
            layers = {
                str(name): PlannedRank(
                    (int(one["shape"][0]), int(one["shape"][1])),
                    None if one["rank"] == "dense" else int(one["rank"]),
                    int(one["full"]),
                )
                for name, one in raw["layers"].items()
            }
            return cls(float(raw["threshold"]), layers)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            problem = "a plan of ranks has a threshold, and of each layer rank, shape and full"
            raise InputError(problem, field="ranks") from None


def planned_at(
    threshold: float,
    spectra: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rule: Rule = "elements",
) -> RankPlan:
    """What a threshold makes of layers: at 0 all stay dense, at 1 each keeps its largest value.

    Args:
        threshold: up to 1; above it nothing would stay.
        spectra: singular values [min(out, in)] by layer.
        shapes: of the weights, [out, in].
        rule: see `is_factored`.

    Raises:
        InputError: the threshold is above 1.

    >>> spectra = {"a": torch.tensor([8.0, 1.0, 0.0]), "b": torch.tensor([8.0, 7.0, 6.0])}
    >>> planned_at(0.2, spectra, {"a": (3, 3), "b": (3, 3)}).ranks
    {'a': 1}
    """
    if threshold > 1:
        problem = "above 1 no singular value stays"
        raise InputError(problem, field="threshold", value=threshold, allowed="up to 1")
    layers = {}
    for name, spectrum in spectra.items():
        kept = int((normalized(spectrum) >= threshold).sum())
        factored = is_factored(kept, shapes[name], rule)
        layers[name] = PlannedRank(shapes[name], kept if factored else None, len(spectrum))
    return RankPlan(threshold, layers)


def plan_within(
    elements: int,
    spectra: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rule: Rule = "elements",
) -> RankPlan:
    """The plan of the lowest threshold at which all layers have at most `elements` together.

    So no plan of a lower threshold would fit: with spectra that have no value twice it misses what
    it may have by less than one rank of one layer. Equal values go or stay together.

    Raises:
        InputError: no threshold leaves so few, which keeps each layer's largest value at least.
    """

    def fits(plan: RankPlan, _: float) -> bool:
        return plan.elements <= elements

    found = _lowest(spectra, shapes, rule, fits)
    if found is None:
        least = planned_at(1.0, spectra, shapes, rule).elements
        whole = sum(math.prod(shapes[name]) for name in spectra)
        raise InputError(
            f"the layers' largest singular values alone leave {least:,} of {whole:,} elements, as "
            "layers stay dense whose values are alike",
            field="elements",
            value=elements,
        )
    return found


def plan_without(
    share: float,
    spectra: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rule: Rule = "elements",
) -> RankPlan:
    """The plan of the lowest threshold below which lies this share of all layers' singular values.

    It is the paper's target, an average reduction of ranks. It counts those of layers that stay
    dense too, so parameters and bytes go by less: see `RankPlan.elements`.

    Raises:
        InputError: fewer values than that are below all layers' largest ones.

    >>> spectra = {"a": torch.tensor([8.0, 1.0, 0.0]), "b": torch.tensor([8.0, 7.0, 6.0])}
    >>> plan = plan_without(0.4, spectra, {"a": (3, 3), "b": (3, 3)})
    >>> plan.threshold, plan.ranks, plan.elements, plan.dense_elements
    (0.5, {'a': 1}, 15, 18)
    """
    everything = sum(len(spectrum) for spectrum in spectra.values())
    asked = math.ceil(share * everything - 1e-9)
    values = torch.cat([normalized(spectrum) for spectrum in spectra.values()])

    def fits(_: RankPlan, threshold: float) -> bool:
        return int((values < threshold).sum()) >= asked

    found = _lowest(spectra, shapes, rule, fits)
    if found is None:
        most = int((values < 1).sum())
        problem = f"of {everything} singular values {most} are below their layer's largest one"
        raise InputError(problem, field="reduction", value=share)
    return found


def _lowest(
    spectra: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, int]],
    rule: Rule,
    fits: Callable[[RankPlan, float], bool],
) -> RankPlan | None:
    """By bisection over the values that there are, as nothing changes in between."""
    candidates = torch.cat([normalized(spectrum) for spectrum in spectra.values()]).unique()
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high) // 2
        threshold = float(candidates[middle])
        if fits(planned_at(threshold, spectra, shapes, rule), threshold):
            high = middle
        else:
            low = middle + 1
    if low == len(candidates):
        return None
    return planned_at(float(candidates[low]), spectra, shapes, rule)


def train_factors_alone(model: nn.Module, layers: Mapping[str, Any]) -> None:
    """Freeze all of a model but the factors of these layers, which stay as trained as they are."""
    kept = {
        id(parameter)
        for name in layers
        for key, parameter in model.get_submodule(name).named_parameters(recurse=False)
        if key != "bias"
    }
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.requires_grad_(False)
