"""The moves of a full model's pass at any size, made of those of a model with fewer blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from modicum.core.errors import ModicumError
from modicum.core.layers.trace_moves import (
    OUTSIDE,
    Gradient,
    Kernel,
    Move,
    Release,
    Scratch,
    ScratchProduct,
    TracedPart,
    TracedPass,
)

# What is traced: two numbers to draw a line through, one to check it. A batch of one may take
# other ways through kernels and views than all others do.
_LINES = ((1, 2, 3), (2, 3, 5))


class NotAffine(ModicumError):
    """What a pass takes does not grow by as much with each sequence."""


@dataclass(frozen=True)
class PlayedPart:
    """A part of a pass, and how many of the model's blocks it counts for."""

    part: TracedPart
    count: int = 1


class PassMoves:
    """A pass of the full model at any number of sequences.

    Args:
        trace: the pass at so many sequences.
        counts: of the blocks that stay, by name, how many each counts for.
        known: passes that were traced before, by their sequences.
    """

    def __init__(
        self,
        trace: Callable[[int], TracedPass],
        counts: dict[str, int],
        known: Mapping[int, TracedPass] | None = None,
    ) -> None:
        self._trace, self._counts = trace, counts
        self._traced = dict(known or {})

    @property
    def points(self) -> dict[int, TracedPass]:
        """What is traced to draw a line through it, and other passes that were asked for."""
        _ = self._line
        return self._traced

    def at(self, sequences: int) -> TracedPass:
        """The pass of the short model, from a line through two where that is right."""
        line = self._line
        if line is None or sequences < line[0] or sequences in self._traced:
            return self._exact(sequences)
        return self._drawn(line, sequences)

    @property
    def affine(self) -> bool:
        """Whether every tensor grows by as much with each sequence."""
        return self._line is not None

    @cached_property
    def _line(self) -> tuple[int, int, int] | None:
        for line in _LINES:
            with suppress(NotAffine):
                if self._drawn(line, line[2]) == self._exact(line[2]):
                    return line
        return None

    def _drawn(self, line: tuple[int, int, int], sequences: int) -> TracedPass:
        one, two = self._exact(line[0]), self._exact(line[1])
        return _drawn(one, two, (sequences - line[0]) // (line[1] - line[0]))

    def parts(self, sequences: int) -> list[PlayedPart]:
        """The parts of the full model's pass, in order."""
        return [PlayedPart(p, self._counts.get(p.block, 1)) for p in self.at(sequences).parts]

    def _exact(self, sequences: int) -> TracedPass:
        if sequences not in self._traced:
            self._traced[sequences] = self._trace(sequences)
        return self._traced[sequences]


def _drawn(one: TracedPass, two: TracedPass, steps: int) -> TracedPass:
    """The pass that is so many steps from `one` on the line to `two` and beyond.

    Raises:
        NotAffine: they are not made of the same moves.
    """

    number = partial(_number, steps=steps)
    move = partial(_move, number=number)
    if [p.block for p in one.parts] != [p.block for p in two.parts]:
        raise NotAffine("blocks run in another order")
    parts = []
    for a, b in zip(one.parts, two.parts, strict=True):
        if len(a.moves) != len(b.moves):
            raise NotAffine(f"{a.block or 'outside'} makes another number of tensors")
        moves = [move(*pair) for pair in zip(a.moves, b.moves, strict=True)]
        parts.append(TracedPart(a.block, a.during, moves, number(a.flops, b.flops)))
    return TracedPass(number(one.batch_bytes, two.batch_bytes), tuple(parts))


def _number(a: int, b: int, steps: int) -> int:
    return a + (b - a) * steps


def _move(a: Move, b: Move, number: Callable[[int, int], int]) -> Move:
    if isinstance(a, int) and isinstance(b, int):
        return number(a, b)
    if isinstance(a, Release) and isinstance(b, Release) and a[1:] == b[1:]:
        return Release(number(a.bytes, b.bytes), *a[1:])
    if isinstance(a, Scratch) and isinstance(b, Scratch):
        return Scratch(_kernel(a.kernel, b.kernel, number), number(a.rows, b.rows))
    if isinstance(a, Gradient) and a == b:
        return a
    raise NotAffine(f"where {a} happens, {b} does with more sequences")


def _kernel(a: Kernel, b: Kernel, number: Callable[[int, int], int]) -> Kernel:
    """The kernel on the line; of LoRA's first matrix times its input, tokens are the columns."""
    if isinstance(a, ScratchProduct) and isinstance(b, ScratchProduct) and a.made == b.made:
        return ScratchProduct(a.made, number(a.inputs, b.inputs), number(a.outputs, b.outputs))
    if a == b:
        return a
    raise NotAffine(f"where {a} works, {b} does with more sequences")


@dataclass(frozen=True)
class PlayedPass:
    """What a pass of the full model comes to, in bytes beyond weights, batch and old gradients.

    Attributes:
        forward, loss, backward: the most in each phase. `loss` ends when the backward pass of the
            block that is first in it does, and `backward` begins with that of the last one; a
            moment between that is worse than both counts as `backward`.
        begun: the most in that block's backward pass.
        kept: when the forward pass has ended.
        block: kept of the block that is last in the backward pass.
        flops: of the forward and of the backward pass.
    """

    forward: int
    loss: int
    backward: int
    begun: int
    kept: int
    block: int
    flops: tuple[int, int]


def large_or_small(parts: list[PlayedPart], size: int, *, large: bool) -> list[PlayedPart]:
    """The parts with the moves of tensors of at least `size` bytes alone, or of smaller ones."""

    def of_size(move: Move) -> bool:
        return ((move if isinstance(move, int) else move.bytes) >= size) == large

    return [
        replace(p, part=replace(p.part, moves=[move for move in p.part.moves if of_size(move)]))
        for p in parts
    ]


class PlayedRun(NamedTuple):
    """Bytes that a part leaves, and at most has, beyond what is there when it begins."""

    net: int
    peak: int


def played(parts: list[PlayedPart], *, accumulated: bool = False) -> PlayedPass:
    """Play the parts one after the other, those that count for several so many times.

    Args:
        accumulated: whether gradients are added to those of a micro-batch before.
    """
    live = kept = block = begun = between = 0
    most: dict[str, int] = {"forward": 0, "loss": 0, "backward": 0}
    flops = {"forward": 0, "backward": 0}
    counts = {p.part.block: p.count for p in parts if p.part.block}
    ran = [p.part.block for p in parts if p.part.during == "backward" and p.part.block]
    ran = ran or [OUTSIDE]
    phase = "forward"
    for played_part in parts:
        part, count = played_part.part, played_part.count
        net, peak = _run(part, count, counts, accumulated=accumulated)
        flops[part.during] += count * part.flops
        if part.during == "forward":
            if part.block:
                block = block or net // count
            most["forward"] = max(most["forward"], live + peak)
            live += net
            kept = live
            continue
        worst = live + peak
        if phase == "forward":
            phase = "loss"
        elif phase == "loss" and part.block != ran[0]:
            phase = "between"
        if phase == "loss":
            most["loss"] = max(most["loss"], worst)
            begun = worst if part.block == ran[0] else begun
        if part.block == ran[-1]:
            phase = "backward"
        if phase == "backward":
            most["backward"] = max(most["backward"], worst)
        elif phase == "between":
            between = max(between, worst)
        live += net
    if between > max(most["loss"], most["backward"]):
        most["backward"] = between
    most["backward"] = max(most["backward"], live)
    return PlayedPass(
        most["forward"], most["loss"], most["backward"], begun, kept, block,
        (flops["forward"], flops["backward"]),
    )  # fmt: skip


def _run(part: TracedPart, count: int, counts: dict[str, int], *, accumulated: bool) -> PlayedRun:
    """Play a part `count` times.

    What outside of blocks ends of a block's ends for all blocks that this one counts for; what a
    block ends of what was made outside ends once, in the last time.
    """
    once = 0
    outside = part.block == OUTSIDE

    def play(last: bool) -> tuple[int, int]:
        nonlocal once
        live = peak = 0
        for move in part.moves:
            if isinstance(move, int):
                live += move
                peak = max(peak, live)
            elif isinstance(move, Scratch):
                peak = max(peak, live + move.bytes)
            elif isinstance(move, Release):
                if outside:
                    live -= move.bytes * counts.get(move.block, 1)
                elif last or move.block:
                    live -= move.bytes
            elif accumulated:
                live -= move.bytes
        return live, peak

    end, peak = play(True)
    if count == 1:
        return PlayedRun(end, peak)
    net, first = play(False)
    before = (count - 1) * net
    return PlayedRun(before + end, max(first, before - net + first, before + peak))
