"""What compressors that take units out of blocks share: how many go, from where, and the handle.

A method says what a unit is worth to it. Which units a model has, and what must go together, is
read off its map; the plan has the widths by block, so a model on meta has them too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from modicum.compress.base import Compressor
from modicum.compress.pruned_model import PrunedModel
from modicum.compress.pruned_parts import PrunedPart, PrunerQuery, groups_of, neurons_of, planned
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Context, PositiveInt, Probability
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.map import map_of
from modicum.core.layers.map_parts import Units


class UnitPruner(Compressor):
    """The fields and services of every method that takes neurons and heads out of blocks.

    Hidden width, norms, embeddings and head stay. The blocks that lose units lose equally many of a
    kind; of experts none are taken.

    Args:
        neurons: the share of each MLP's neurons that goes; at least one stays.
        groups: the share of each attention's kv heads that goes, each with its query heads; at
            least one stays.
        multiple: of neurons a multiple of it stays, or all.
        first_blocks, last_blocks: so many blocks at the model's ends stay as they are.
        examples: see `Compressor`.
    """

    neurons: Probability = 0.25
    groups: Probability = 0.0
    multiple: PositiveInt = 1
    first_blocks: Annotated[int, Field(ge=0)] = 0
    last_blocks: Annotated[int, Field(ge=0)] = 0

    @abstractmethod
    def worth(self, model: nn.Module, units: Units, calibration: Calibration, seed: int) -> Tensor:
        """What each unit is worth, float64 [count]: those that are worth most stay."""

    def parts(self, model: nn.Module) -> tuple[PrunedPart, ...]:
        """What loses units, by arithmetic; the model may be without memory.

        Raises:
            InputError: nothing does, or a block has parts of which none can be removed.
        """
        blocks = map_of(model).blocks
        found = []
        for block in blocks[self.first_blocks : len(blocks) - self.last_blocks]:
            if self.groups and block.attentions:
                keep = _kept(block.attentions[0].groups.count, self.groups)
                found.append(groups_of(model, block, keep))
            if self.neurons and block.mlps:
                keep = _kept(block.mlps[0].neurons.count, self.neurons, self.multiple)
                found.append(neurons_of(model, block, keep))
        parts = tuple(part for part in found if part.removed)
        for kind in ("neurons", "groups"):
            share = getattr(self, kind)
            if share and not any(part.units.kind == kind for part in parts):
                problem = f"at this share no block loses {kind}: there are too few of them"
                raise InputError(problem, field=kind, value=share)
        if not parts:
            problem = "neither neurons nor groups are removed; give one of them a share"
            raise InputError(problem, field="neurons", value=self.neurons)
        return parts

    def plan(self, model: nn.Module, within: FormPlan | None = None) -> FormPlan:
        return planned(self.parts(model), within)

    def bind(self, context: Context) -> PrunedModel:
        worth = partial(self._worth, context)
        return PrunedModel(context.model, self.parts(context.model), self, worth)

    def ledger(self, at: PrunerQuery) -> Ledger:
        return at.part.ledger(at.shape)

    def _worth(self, context: Context, calibration: Calibration) -> Mapping[str, Tensor]:
        """Of each part, by the name of its units."""
        return {
            part.units.name: self.worth(context.model, part.units, calibration, context.seed)
            for part in self.parts(context.model)
        }


def _kept(count: int, share: float, multiple: int = 1) -> int:
    """How many of `count` units stay where at most `share` of them goes.

    >>> _kept(8, 0.25), _kept(22, 0.25, 8), _kept(3, 0.9)
    (6, 22, 1)
    """
    removed = min(int(share * count + 1e-9), count - 1)
    return min(-(-(count - removed) // multiple) * multiple, count)
