"""The parts of a model's blocks that lose units, and how many units stay: by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from torch import nn

from modicum.core.contracts.ledger import Entry, Ledger, ModelQuery, Phase, Work
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.map_edits import tensor_of
from modicum.core.layers.map_parts import MappedAttention, MappedBlock, MappedMlp, Units

T = TypeVar("T", MappedAttention, MappedMlp)
SAVED: tuple[Phase, ...] = ("forward", "loss", "backward")


@dataclass(frozen=True)
class PrunedPart:
    """An attention that loses kv groups, or an MLP that loses neurons.

    Args:
        block: the full name of its block.
        units: as the full model has them.
        keep: how many of them stay.
        elements: parameters of one unit; `products`, those of them in matrices.
        between: numbers that autograd keeps of one unit at each position.
        scores: FLOPs of one unit for a position and each that it attends to, in the forward pass.
        widths: of the block when the others are gone, by field of `BlockPlan`.
    """

    block: str
    units: Units
    keep: int
    elements: int
    products: int
    between: int
    scores: int
    widths: tuple[tuple[str, int], ...]

    @cached_property
    def removed(self) -> int:
        """How many units go."""
        return self.units.count - self.keep

    def ledger(self, shape: ModelQuery) -> Ledger:
        """What is spent beyond the full part at the shape of a micro-batch: less than nothing.

        Gradients and optimizer state follow from the parameters.
        """
        weights, products = -self.removed * self.elements, -self.removed * self.products
        copies = products * shape.compute_bytes if shape.compute_bytes < shape.weight_bytes else 0
        kept = -self.removed * self.between * shape.positions * shape.compute_bytes
        scores = -self.removed * self.scores * shape.positions * shape.tokens
        work = 2 * shape.positions * products + scores
        return Ledger.of(
            Entry("weight", weights * shape.weight_bytes, what="units that were removed"),
            Entry("activation", kept, SAVED, "of units that were removed"),
            Entry("activation", copies, SAVED, "removed units in bf16"),
            Work(work),
            Work(2 * work, phase="backward"),
        )


@dataclass(frozen=True)
class PrunerQuery:
    """What a pruner's ledger is asked at: a part of a block and the shape of a micro-batch."""

    part: PrunedPart
    shape: ModelQuery


def neurons_of(model: nn.Module, block: MappedBlock, keep: int) -> PrunedPart:
    """The MLP of a block with so many neurons.

    Raises:
        InputError: the block has several, its MLP is one of experts, or neurons cannot go.
    """
    mlp = _only(block.mlps, block, "an MLP")
    if mlp.experts:
        problem = "experts share their neurons' places, so none can be removed from one of them"
        raise InputError(f"{problem}; leave the block out", value=mlp.name)
    # Before and after the activation; with a gate, both factors, the gate's output, the product.
    between = 4 if mlp.gate else 2
    return _part(model, block, mlp.neurons, keep, between, 0, (("mlp_width", keep),))


def groups_of(model: nn.Module, block: MappedBlock, keep: int) -> PrunedPart:
    """The attention of a block with so many groups: kv heads, each with its query heads.

    Raises:
        InputError: the block has several, or groups cannot go.
    """
    found = _only(block.attentions, block, "an attention")
    each = found.heads.count // found.kv_heads
    both = found.head_width + found.value_width
    widths = (("heads", keep * each), ("kv_heads", keep))
    between = (each + 1) * both  # rotated queries and keys, values, and the output
    return _part(model, block, found.groups, keep, between, 2 * each * both, widths)


def parts_of(model: nn.Module, blocks: Sequence[MappedBlock], plan: FormPlan) -> list[PrunedPart]:
    """What of a full model's blocks has fewer units in a plan of forms.

    Raises:
        InputError: the plan names no block of the model, or gives one more than it has.
    """
    known, found = {block.name: block for block in blocks}, []
    for name, own in plan.blocks.items():
        if name not in known:
            raise InputError("the model has no block of this name", value=name, candidates=known)
        if own.kv_heads is not None:
            found.append(groups_of(model, known[name], own.kv_heads))
        if own.mlp_width is not None:
            found.append(neurons_of(model, known[name], own.mlp_width))
    for part in found:
        if part.keep > part.units.count:
            problem = f"has {part.units.count} {part.units.kind}, and not {part.keep}"
            raise InputError(problem, value=part.units.name)
    return found


def planned(parts: tuple[PrunedPart, ...], within: FormPlan | None) -> FormPlan:
    """The plan of forms with the widths of the parts' blocks."""
    plan = within or FormPlan()
    for part in parts:
        plan = plan.with_block(part.block, **dict(part.widths))
    return plan


def _part(
    model: nn.Module,
    block: MappedBlock,
    units: Units,
    keep: int,
    between: int,
    scores: int,
    widths: tuple[tuple[str, int], ...],
) -> PrunedPart:
    if units.needed:
        raise InputError(f"cannot lose {units.kind}: {units.needed}", value=units.name)
    sizes = list(_elements(model, units))
    elements, products = (sum(each) for each in zip(*sizes, strict=True))
    return PrunedPart(block.name, units, keep, elements, products, between, scores, widths)


def _elements(model: nn.Module, units: Units) -> Iterator[tuple[int, int]]:
    """Of each slice the parameters of one unit, and those that are in matrices."""
    for piece in dict.fromkeys(units.slices):
        tensor = tensor_of(model, piece.tensor)
        each = tensor.numel() // tensor.shape[piece.dim] * (piece.length // units.count)
        yield each, each if tensor.ndim > 1 else 0


def _only(found: tuple[T, ...], block: MappedBlock, kind: str) -> T:
    if len(found) != 1:
        problem = f"a block that loses units has {kind}, of which its map knows {len(found)} here"
        raise InputError(f"{problem}; leave the block out", value=block.name)
    return found[0]
