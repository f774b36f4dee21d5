"""A model's ledger without an author: traced on tensors without memory, block by block.

One block of each kind and what stands outside of blocks run at two batch sizes; a third checks that
every tensor grows by as much with each sequence. What was seen is then played for any number of
blocks, sequences and micro-batches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import ALWAYS, Entry, Ledger, Phase, Work
from modicum.core.errors import ModicumError
from modicum.core.layers.recomputing import recomputed
from modicum.core.layers.trace import (
    OUTSIDE,
    Gradient,
    Move,
    Release,
    Scratch,
    TracedPart,
    TracedPass,
    trace_pass,
)
from modicum.core.machine.memory import tensor_bytes
from modicum.models.block_kinds import block_lists, shortened

_GENERATOR_BYTES = 5056  # the state of torch's generator, which a recomputed block restores
# What is traced: two numbers to draw a line through, one to check it. A batch of one may take
# other ways through kernels and views than all others do.
_LINES = ((1, 2, 3), (2, 3, 5))
Batch = Callable[[int], Any]
Loss = Callable[[Any, Any], Tensor]


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
    """

    def __init__(self, trace: Callable[[int], TracedPass], counts: dict[str, int]) -> None:
        self._trace, self._counts = trace, counts
        self._traced: dict[int, TracedPass] = {}

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

    def number(a: int, b: int) -> int:
        return a + (b - a) * steps

    def move(a: Move, b: Move) -> Move:
        if isinstance(a, int) and isinstance(b, int):
            return number(a, b)
        if isinstance(a, Release) and isinstance(b, Release) and a[1:] == b[1:]:
            return Release(number(a.bytes, b.bytes), *a[1:])
        if isinstance(a, Scratch) and isinstance(b, Scratch) and a.kernel == b.kernel:
            return Scratch(a.kernel, number(a.rows, b.rows))
        if isinstance(a, Gradient) and a == b:
            return a
        raise NotAffine(f"where {a} happens, {b} does with more sequences")

    if [p.block for p in one.parts] != [p.block for p in two.parts]:
        raise NotAffine("blocks run in another order")
    parts = []
    for a, b in zip(one.parts, two.parts, strict=True):
        if len(a.moves) != len(b.moves):
            raise NotAffine(f"{a.block or 'outside'} makes another number of tensors")
        moves = [move(*pair) for pair in zip(a.moves, b.moves, strict=True)]
        parts.append(TracedPart(a.block, a.during, moves, number(a.flops, b.flops)))
    return TracedPass(number(one.batch_bytes, two.batch_bytes), tuple(parts))


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


class Run(NamedTuple):
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


def _run(part: TracedPart, count: int, counts: dict[str, int], *, accumulated: bool) -> Run:
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
        return Run(end, peak)
    net, first = play(False)
    before = (count - 1) * net
    return Run(before + end, max(first, before - net + first, before + peak))


class TracedModel:
    """A model whose ledger is traced, at any number of sequences and micro-batches.

    The first question of each kind takes some tenths of a second, all others are arithmetic.

    Args:
        model: with or without memory, such as built under `on_meta`; adapters are on it, and what
            is not trained is frozen.
        batch: makes a batch of so many sequences; it is called where tensors have no memory.
        loss: the sum of losses of a batch, one element: `loss(model, batch)`. It enters the
            run's own autocast.
        blocks: the model's blocks, where it says which they are; else those of its outermost lists.
        device: where the run is.
        dtype: of its matrix products.
        rows: says how many rows an operation gives whose result the data decides.

    >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    >>> model = nn.Sequential(*layers)
    >>> traced = TracedModel(model, lambda n: torch.zeros(n, 8), lambda m, x: m(x).sum())
    >>> traced.ledger(4).bytes("weight")
    1728
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Batch,
        loss: Loss,
        *,
        blocks: Iterable[nn.Module] = (),
        device: torch.device | str = "cpu",
        dtype: str = "float32",
        rows: Callable[[str, tuple[int, ...]], int] | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        self._batch, self._loss, self._device, self._rows = batch, loss, device, rows
        self._lists = block_lists(model, blocks)
        self._counts = {e.full_name(n): c for e in self._lists for n, c in e.kept.items()}
        self._passes: dict[tuple[bool, bool], PassMoves] = {}

    @cached_property
    def weights(self) -> int:
        """Bytes of all parameters and buffers, those of adapters too."""
        return tensor_bytes([*self.model.parameters(), *self.model.buffers()])

    @cached_property
    def gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def moves(self, *, recompute: bool = False, backward: bool = True) -> PassMoves:
        """The moves of a training pass, or of an evaluation's."""
        key = (recompute, backward)
        if key not in self._passes:
            trace = lambda sequences: self._traced(sequences, *key)  # noqa: E731
            self._passes[key] = PassMoves(trace, self._counts)
        return self._passes[key]

    def ledger(self, sequences: int, *, micro_batches: int = 1, recompute: bool = False) -> Ledger:
        """What the model spends at such a micro-batch, gradients that stay not counted.

        Args:
            sequences: in a micro-batch.
            micro_batches: in an update.
            recompute: whether blocks keep their input alone and run again in the backward pass.
        """
        again = micro_batches > 1
        moves = self.moves(recompute=recompute)
        parts, batch = moves.parts(sequences), moves.at(sequences).batch_bytes
        if recompute:
            parts = [_with_state(each) for each in parts]
        trained = played(parts, accumulated=again)
        evaluated = played(self.moves(backward=False).parts(sequences))
        there = 0 if again else self.gradients  # among what the backward pass leaves
        backward = max(0, trained.backward - there)
        own = min(trained.block, backward)
        kept: tuple[Phase, ...] = ("forward", "loss")
        return Ledger.of(
            Entry("weight", self.weights, what="model"),
            Entry("buffer", batch * micro_batches, ALWAYS, "batch"),
            Entry("activation", trained.kept, kept, "activations"),
            Entry("activation", own, ("backward",), "activations of one block"),
            Entry("workspace", evaluated.forward, ("evaluation",), "a block, or what follows"),
            Entry("workspace", trained.forward - trained.kept, ("forward",), "in passing"),
            Entry("workspace", trained.loss - trained.kept, ("loss",), "losses and gradients"),
            Entry("workspace", backward - own, ("backward",), "gradients of a block"),
            Work(trained.flops[0], dtype=self.dtype, phase="forward"),
            Work(trained.flops[1], dtype=self.dtype, phase="backward"),
        )

    def slack(self, sequences: int, *, recompute: bool = False) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        found = played(self.moves(recompute=recompute).parts(sequences))
        return max(0, found.loss - found.begun)

    def _traced(self, sequences: int, recompute: bool, backward: bool) -> TracedPass:
        before = self.model.training
        with shortened(self.model, self._lists) as lists:
            every = [block for each in lists for block in each.values()]
            undo = _running_again(self.model, every) if recompute else (lambda: None)
            try:
                self.model.train(backward)
                return trace_pass(
                    self.model,
                    lists,
                    lambda: self._batch(sequences),
                    self._loss,
                    device=self._device,
                    backward=backward,
                    rows=self._rows,
                )
            finally:
                undo()
                self.model.train(before)


def _running_again(model: nn.Module, blocks: list[nn.Module]) -> Callable[[], None]:
    """Let blocks run again in the backward pass; what undoes that."""
    if isinstance(before := getattr(model, "recompute", None), bool):
        model.recompute = True  # type: ignore[assignment]

        def undo() -> None:
            model.recompute = before  # type: ignore[assignment]

        return undo
    for block in blocks:
        forward = block.forward
        block.forward = functools.partial(_again, forward)

    def without() -> None:
        for block in blocks:
            del block.forward

    return without


def _again(forward: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    return recomputed(functools.partial(forward, **keywords), *arguments)


def _with_state(played_part: PlayedPart) -> PlayedPart:
    """A block that runs again keeps the generator's state, which is in no tensor of the trace."""
    part = played_part.part
    if not part.block:
        return played_part
    state = _GENERATOR_BYTES if part.during == "forward" else Release(_GENERATOR_BYTES, part.block)
    return replace(played_part, part=replace(part, moves=[*part.moves, state]))
