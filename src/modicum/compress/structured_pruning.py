"""Structured pruning: neurons and heads that matter least are taken out of a trained model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.compress.base import Making
from modicum.compress.unit_pruner import UnitPruner
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.contracts.method import Against, Info
from modicum.core.contracts.search import LinearRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration, Loss, example_count
from modicum.core.layers.gradient_probe import probe_gradients
from modicum.core.layers.layer_sites import survey
from modicum.core.layers.map_edits import tensor_of
from modicum.core.layers.map_parts import MappedSlice, Units
from modicum.core.progress import CountProgress
from modicum.core.random import uniform_
from modicum.core.ranks.ranks import Ranks


class StructuredPruning(UnitPruner):
    """Smaller MLPs and attentions, by what the loss would lose with each of their units.

    A neuron is its row of up and gate with its column of down; a group is a kv head with its query
    heads and their columns of the output. To first order, the loss changes by w dL/dw when a weight
    w becomes zero; a unit is worth the sum of |w dL/dw| over its matrices, with the gradient summed
    over all examples. By magnitude it is worth the product of the norms of its matrices, which no
    scale that one matrix takes from another can change. Biases have no say.

    Prefer it to low-rank factors where plain layers of fewer neurons are wanted, which run fast
    everywhere. Train on afterwards, or, with an adapter, in the same recipe.

    Args:
        score: `first_order` looks at data; `magnitude` and `random` look at none.
        neurons, groups, multiple, first_blocks, last_blocks, examples: see `UnitPruner`.

    Source: Ma, Fang and Wang, "LLM-Pruner: On the Structural Pruning of Large Language Models",
    NeurIPS 2023, arXiv 2305.11627, section 3.2, its element-wise first-order score summed over a
    group. Its graph of dependencies is the model's map here.

    >>> import torch
    >>> from modicum.compress import StructuredPruning
    >>> from modicum.models import ModelConfig, create
    >>> model = create(ModelConfig(vocabulary_size=16, width=8, layers=1, heads=2), seed=0)
    >>> batches = [torch.randint(16, (4, 9)) for _ in range(2)]
    >>> def loss(model, ids):
    ...     return torch.nn.functional.cross_entropy(model(ids).mT[..., :-1], ids[:, 1:])
    >>> pruning = StructuredPruning(neurons=0.5)
    >>> small = pruning.fit(model, pruning.calibrate(model, batches, loss))
    >>> small.report.parts[0].units, model.blocks[0].mlp.up_proj.out_features
    (32, 16)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # and train on, to recover
    """

    info = Info(
        name="structured_pruning",
        title="Structured pruning: neurons and heads that the loss needs least go",
        room="compress",
        paper="LLM-Pruner: On the Structural Pruning of Large Language Models, arXiv 2305.11627",
        claim="units that a first-order score chooses are missed less than as many random ones",
        traits=("needs_trained_base", "mergeable", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("equal", "magnitude at equal widths"),
        reason="its loss after recovery rises by half of what random units cost, and by 0.89 of "
        "what magnitude does, which is less than seeds spread (0.18)",
        run_on_gpu=True,
        tiny={"neurons": 0.3, "groups": 0.5, "examples": 16},
    )
    search = SearchTable(
        {"neurons": LinearRange(0.05, 0.8, 0.25), "groups": LinearRange(0.0, 0.5, 0.0)},
        size="neurons",
    )

    score: Literal["first_order", "magnitude", "random"] = "first_order"

    def calibrate(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        loss: Loss,
        *,
        ranks: Ranks | None = None,
        progress: CountProgress | None = None,
    ) -> Calibration:
        names = _matrices(model, [part.units for part in self.parts(model)])
        if self.score != "first_order":
            return Calibration({}, 0, {})
        ranks, sites, seen = ranks or Ranks(), survey(model, ["linear"]).sites, [0]
        for name in names:
            if name not in sites:
                problem = "gradients are known of plain linear layers alone; score by magnitude"
                raise InputError(problem, field="score", value=name)
        found = probe_gradients(
            model,
            _counted(batches, seen),
            loss,
            partial(_sums, model, {name for name in names if sites[name].transposed}),
            sites=[sites[name] for name in names],
            limit=-(-self.examples // ranks.size),
            ranks=ranks,
            progress=progress,
        )
        sums = {(key, name): total for name, own in found.items() for key, total in own.items()}
        return Calibration(sums, int(ranks.sum(seen[0])[0]), dict.fromkeys(names, 0))

    def making(self, model: nn.Module, shape: ModelQuery) -> Making:
        """By first order the gradient of each matrix that has units, 4 bytes an element."""
        if self.score != "first_order":
            return Making("none")
        names = _matrices(model, [part.units for part in self.parts(model)])
        weights = [model.get_submodule(name).get_parameter("weight") for name in names]
        copies = 4 * max(sum(weight.shape) for weight in weights) if shape.weight_bytes < 4 else 0
        sums = sum(4 * weight.numel() for weight in weights)
        return Making("backward", sums, copies * shape.positions, layers=tuple(names))

    def worth(self, model: nn.Module, units: Units, calibration: Calibration, seed: int) -> Tensor:
        if self.score == "random":
            drawn = torch.empty(units.count, dtype=torch.float64)
            return uniform_(drawn, 0.0, 1.0, seed=seed, name=f"{units.name}/{units.kind}")
        each = torch.stack(
            [
                _norms(model, piece, units)
                if self.score == "magnitude"
                else _changes(calibration, piece, units)
                for piece in _pieces(model, units)
            ]
        )
        return each.prod(0) if self.score == "magnitude" else each.sum(0)


def _pieces(model: nn.Module, units: Units) -> list[MappedSlice]:
    """The units' slices of matrices."""
    pieces = dict.fromkeys(units.slices)
    return [piece for piece in pieces if tensor_of(model, piece.tensor).ndim == 2]


def _matrices(model: nn.Module, parts: list[Units]) -> list[str]:
    """The layers whose weights hold units, each once."""
    names = [p.tensor.removesuffix(".weight") for units in parts for p in _pieces(model, units)]
    return list(dict.fromkeys(names))


def _norms(model: nn.Module, piece: MappedSlice, units: Units) -> Tensor:
    weight = tensor_of(model, piece.tensor).detach()
    squares = weight.double().square().sum(1 - piece.dim).cpu()
    return _by_unit(squares, piece, units).sqrt()


def _changes(calibration: Calibration, piece: MappedSlice, units: Units) -> Tensor:
    name = piece.tensor.removesuffix(".weight")
    key = (_KEYS[piece.dim], name)
    if key not in calibration.sums:
        problem = "the calibration knows no changes of this layer; calibrate with this method"
        raise InputError(problem, value=name)
    return _by_unit(calibration.sums[key].cpu(), piece, units)


def _by_unit(total: Tensor, piece: MappedSlice, units: Units) -> Tensor:
    """The sum over each unit's places: [size] to [count]."""
    return total[piece.places().reshape(units.count, -1)].sum(1)


# By the dimension of the stored weight over whose places they are.
_KEYS = ("change of rows", "change of columns")


def _sums(
    model: nn.Module, transposed: Collection[str], name: str, gradient: Tensor
) -> dict[str, Tensor]:
    """The sums of |w dL/dw| over each row and each column of a layer's weight as it is stored."""
    weight = model.get_submodule(name).get_parameter("weight").detach()
    gradient = gradient.T if name in transposed else gradient
    change = (weight.to(gradient.dtype) * gradient).abs().double()
    return {_KEYS[0]: change.sum(1), _KEYS[1]: change.sum(0)}


def _counted(batches: Iterable[Any], seen: list[int]) -> Iterator[Any]:
    for batch in batches:
        seen[0] += example_count(batch)
        yield batch
