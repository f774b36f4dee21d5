"""What optimizers spend: gradients, state and scratch memory, of the rank that has most."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from modicum.core.contracts.ledger import (
    ClassTreatment,
    Entry,
    Ledger,
    OptimizerQuery,
    ParameterClass,
    Phase,
    TrainedParameter,
    Wire,
    Work,
)
from modicum.core.heap import mapped_from
from modicum.optim.blocks import BlockRule
from modicum.optim.owners import assign
from modicum.optim.parts import COUNTER, TOGETHER, MatrixMap, OptimizerParts
from modicum.optim.quantized import BLOCK, CHUNK
from modicum.optim.row_steps import opened_bytes, row_bytes, rows_together
from modicum.optim.rules import SummingRule, UpdateRule, copies_of


def local_elements(parameter: TrainedParameter, rank: int, shards: int) -> int:
    """Elements of a parameter that one of so many ranks holds."""
    return parameter.rows(rank, shards) * math.prod(parameter.shape[1:])


def gradients(at: OptimizerQuery) -> Ledger:
    """All gradients at once; with several micro-batches they stay in between."""
    phases: tuple[Phase, ...] = ("backward", "step")
    if at.micro_batches > 1:
        phases = ("forward", "loss", *phases)
    sizes = _gradient_bytes(at)
    return Ledger.of(Entry("gradient", sum(sizes), phases, "gradients").in_tensors(sizes))


def largest_gradient(at: OptimizerQuery) -> Ledger:
    """One gradient at a time: each is used up in the backward pass, before the next is there."""
    largest = max(_gradient_bytes(at), default=0)
    return Ledger.of(Entry("gradient", largest, ("backward",), "one gradient").in_one())


def _gradient_bytes(at: OptimizerQuery) -> list[int]:
    """Of each parameter, what this rank has of its gradient."""
    return [local_elements(p, 0, at.shards) * p.element_bytes for p in at.parameters]


def elementwise(at: OptimizerQuery, *, moments: int, counter: bool, what: str) -> Ledger:
    """Gradients, and moments that have the dtype and the layout of their parameters."""
    size = sum(
        moments * local_elements(p, 0, at.shards) * p.element_bytes + COUNTER * counter
        for p in at.parameters
    )
    return gradients(at) + Ledger.of(Entry("optimizer", size, what=what))


def of_matrices(parts: OptimizerParts, at: OptimizerQuery, *, in_backward: bool) -> Ledger:
    """What an optimizer made of these parts spends; scratch memory is an upper bound on a CPU."""
    rules = [(p, parts.row_rule(p)) for p in at.parameters]
    matrices = [parameter for parameter, rule in rules if rule is None]
    rows = [(parameter, rule) for parameter, rule in rules if rule is not None]
    costs = {index: parts.kept_bytes(_shape(p)) for index, p in enumerate(matrices)}
    owners = assign(costs, at.shards)
    kept, work, wire = [0] * at.shards, [0] * at.shards, [0] * at.shards
    for rank in range(at.shards):
        kept[rank] = sum(_row_bytes(parts, p, rule, p.rows(rank, at.shards)) for p, rule in rows)
    for rank, size in enumerate(_of_matrices(parts, costs, owners, at.shards)):
        kept[rank] += size
    for index, parameter in enumerate(matrices):
        owner, elements = owners[index], math.prod(parameter.shape)
        work[owner] += _products(parts, _shape(parameter))
        for rank in range(at.shards):
            # Gradients go to the owner, updates (fp32) come back.
            local = local_elements(parameter, rank, at.shards)
            wire[rank] += (
                4 * (elements - local) if rank == owner else parameter.element_bytes * local
            )
    scratch = [_scratch(parts, parameter, at.shards) for parameter in matrices]
    device = "cpu" if at.batch is None else at.batch.device
    if parts.finish is not None and scratch:
        updates, mapping = _finishing(parts.finish, matrices, device, alone=in_backward)
        scratch = [updates + max(*scratch, mapping)]
    scratch += [_row_scratch(parts, p, rule, at.shards, device) for p, rule in rows]
    phase: Phase = "backward" if in_backward else "step"
    ledger = largest_gradient(at) if in_backward else gradients(at)
    if at.shards > 1 and matrices:
        rounds = max(list(owners.values()).count(rank) for rank in range(at.shards))
        count = 2 * (len(matrices) if in_backward else rounds)
        ledger += Ledger.of(Wire("all_to_all", max(wire), "shard", count))
    shared: dict[int, int] = {}
    for parameter in matrices:
        shared |= parts.projector.shared_elements(_shape(parameter))
    if shared:
        size = 4 * sum(shared.values())
        ledger += Ledger.of(Entry("workspace", size, what="bases that matrices share"))
    ledger += _sums(rows, at.shards, in_backward)
    return ledger + Ledger.of(
        Entry("optimizer", max(kept), what="moments and projectors"),
        _of_update(max(scratch, default=0), matrices, phase),
        Work(max(work), phase="step"),
    )


def _of_update(scratch: int, matrices: Sequence[TrainedParameter], phase: Phase) -> Entry:
    """Scratch memory of an update: of matrices pieces as large as these, of rows smaller ones."""
    entry = Entry("workspace", scratch, (phase,), "of one parameter's update")
    whole = max((4 * math.prod(p.shape) for p in matrices), default=0)
    return entry.in_one() if whole >= mapped_from() else entry


def _of_matrices(
    parts: OptimizerParts, costs: Mapping[int, int], owners: Mapping[int, int], shards: int
) -> list[int]:
    """Bytes of state of the matrices that each rank owns; of a choice, in its largest round."""
    owned = [[index for index in costs if owners[index] == rank] for rank in range(shards)]
    if parts.choice is None:
        return [sum(costs[index] for index in indices) for indices in owned]
    number, rounds = parts.choice.number(len(costs)), parts.choice.rounds(len(costs))
    found = []
    for indices in owned:
        moments = {index: costs[index] - COUNTER for index in indices}
        if rounds is None:
            most = sum(sorted(moments.values())[-number:])
        else:
            active = (parts.choice.active(len(costs), round_) for round_ in range(rounds))
            most = max(sum(moments.get(index, 0) for index in chosen) for chosen in active)
        found.append(COUNTER * len(indices) + most)
    return found


def treatment_of(
    parts: OptimizerParts, at: OptimizerQuery, name: str
) -> tuple[ClassTreatment, ...]:
    """By class and rule, how many parameters there are and the bytes of their state.

    Args:
        name: of what is done with those that it takes.
    """
    found: dict[tuple[ParameterClass, str], tuple[int, int]] = {}
    for p in at.parameters:
        taken, rule = parts.takes(p.name, p.shape, p.parameter_class), parts.row_rule(p)
        rows = p.rows(0, 1)
        kept = _row_bytes(parts, p, rule, rows) if rule else parts.kept_bytes(_shape(p))
        key = p.parameter_class, name if taken else _other(parts, rule or parts.rest)
        count, size = found.get(key, (0, 0))
        found[key] = count + 1, size + kept
    if parts.choice is not None:
        # Not all matrices have moments at a time.
        sizes = [
            _shape(p) for p in at.parameters if parts.takes(p.name, p.shape, p.parameter_class)
        ]
        costs = {index: parts.kept_bytes(shape) for index, shape in enumerate(sizes)}
        largest = _of_matrices(parts, costs, dict.fromkeys(costs, 0), 1)[0]
        for key in [key for key in found if key[1] == name]:
            count, size = found[key]
            found[key] = count, largest * size // sum(costs.values())
    return tuple(
        ClassTreatment(parameter_class, count, rule, size)
        for (parameter_class, rule), (count, size) in found.items()
    )


def _other(parts: OptimizerParts, rule: UpdateRule) -> str:
    """What a plan calls the rule of a parameter that the method does not take."""
    rate = f" at {parts.rest_rate:g} of the rate" if parts.rest_rate != 1 else ""
    return type(rule).__name__ + rate


def _row_bytes(
    parts: OptimizerParts, parameter: TrainedParameter, rule: UpdateRule, rows: int
) -> int:
    """Bytes that are kept for so many rows of a parameter."""
    shape, bits, each = parameter.shape, parts.rest_bits, parameter.element_bytes
    return COUNTER + row_bytes(rule, shape, rows, bits, each)


def _sums(
    rows: Sequence[tuple[TrainedParameter, UpdateRule]], shards: int, in_backward: bool
) -> Ledger:
    """The sums over rows that ranks exchange, of all parameters in one call."""
    numbers = [
        rule.numbers(parameter.shape) for parameter, rule in rows if isinstance(rule, SummingRule)
    ]
    calls = sum(map(bool, numbers)) if in_backward else 1
    if shards == 1 or not sum(numbers):
        return Ledger()
    # A ring sends (k - 1) / k of it twice.
    sent = 2 * 4 * sum(numbers) * (shards - 1) // shards
    return Ledger.of(Wire("all_reduce", sent, "shard", calls))


def _shape(parameter: TrainedParameter) -> tuple[int, int]:
    rows, columns = parameter.shape
    return rows, columns


def _products(parts: OptimizerParts, shape: tuple[int, int]) -> int:
    """Operations of the matrix products that bring a gradient down and an update back up."""
    work = parts.projector.work(shape)
    # What is outside is the gradient without what comes up again.
    ups = 1 + (parts.carried is not None) + (parts.outside != "nothing")
    total = (work.refresh if parts.update_gap == 1 else work.down) + ups * work.up
    if isinstance(parts.inner, BlockRule):
        total += parts.inner.flops(parts.projector.inner(shape))
    if parts.within is not None:
        total += parts.within.flops(parts.projector.inner(shape))
    return total + (0 if parts.finish is None else parts.finish.flops(shape))


def _scratch(parts: OptimizerParts, parameter: TrainedParameter, shards: int) -> int:
    """Bytes in addition to state and gradient, of the worst moment of a matrix's update."""
    shape, half = _shape(parameter), parameter.element_bytes < 4
    whole, inside = math.prod(shape), math.prod(parts.projector.inner(shape))
    bases = 4 * sum(one.elements for one in parts.projector.bases(shape).values())
    padded = shards * parameter.rows(0, shards) * shape[1]
    gathered = whole * parameter.element_bytes if shards > 1 else 0
    gradient = gathered + (4 * whole if half else 0)
    kept = parts.inside(shape).values()
    opened = sum(one.copied(parts.bits) for one in kept)
    coded = [one.elements for one in kept if one.coded(parts.bits)]
    # A chunk's padded copy, its magnitudes, the scaled values, their places, codes and borders.
    codes = 6 * 4 * min(CHUNK, max(coded) + BLOCK) if coded else 0
    refresh, mapped = (4 * elements for elements in parts.projector.scratch(shape))
    turning = 4 * 2 * inside + 4 * bases if parts.on_refresh == "rotate" else 0
    total = gradient + (0 if parts.carried is None else parts.carried.copied(shape))
    left = 4 * whole if parts.carried is not None or parts.outside != "nothing" else 0
    finite = 6 * whole if bases else 0
    within = 0
    if parts.within is not None:
        within = 4 * (inside + parts.within.scratch_elements(parts.projector.inner(shape)))
    if isinstance(parts.inner, BlockRule):
        within += 4 * parts.inner.scratch_elements(parts.projector.inner(shape))
    moments = [
        gathered + parameter.element_bytes * padded if shards > 1 else 0,
        gradient + finite,
        total + refresh + bases + 4 * inside,
        total + left + mapped + bases + 4 * inside,
        total + bases + opened + turning + codes + 4 * inside,
        gradient + mapped + 4 * inside,
        gradient + opened + 3 * 4 * inside + codes + within,
        gradient + mapped + 2 * 4 * inside + 4 * whole + left,
        4 * whole + (4 * (whole + 2 * padded) if shards > 1 else 0) + (4 * whole if half else 0),
    ]
    return max(moments)


def _finishing(
    finish: MatrixMap, matrices: list[TrainedParameter], device: str, *, alone: bool
) -> tuple[int, int]:
    """Bytes of the updates that are finished together, and of what mapping them works in."""
    sizes = [math.prod(parameter.shape) for parameter in matrices]
    together = max(sizes) if alone else min(sum(sizes), max(*sizes, TOGETHER))
    each = [finish.scratch_elements(_shape(parameter)) for parameter in matrices]
    mapping = max(each)
    if finish.batches(device):
        mapping = math.ceil(together * max(a / b for a, b in zip(each, sizes, strict=True)))
    return 4 * together, 4 * mapping


def _row_scratch(
    parts: OptimizerParts, parameter: TrainedParameter, rule: UpdateRule, shards: int, device: str
) -> int:
    """Directions, and copies in fp32 of what is in bf16: gradient and parameter, moments.

    Of what is kept for each row or block alone a step makes two more: sums, and their roots.
    """
    together = rows_together(rule, parameter.shape, device)
    rows = min(parameter.rows(0, shards), together)
    held = rows * math.prod(parameter.shape[1:])
    opened = opened_bytes(rule, parameter.shape, rows, parts.rest_bits)
    kept = rule.state((rows, *parameter.shape[1:])).values()
    small = sum(size for one in kept if (size := math.prod(one.shape)) < held)
    copies = copies_of(rule) + (2 if parameter.element_bytes < 4 else 0)
    return 4 * (held * copies + 2 * small) + opened
