"""A model's ledger without an author: traced on tensors without memory, block by block.

One block of each kind and what stands outside of blocks run at two batch sizes; a third checks that
every tensor grows by as much with each sequence. What was seen is then played for any number of
blocks, sequences and micro-batches.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.ledger import ALWAYS, Entry, Ledger, Phase, Work
from modicum.core.heap import mapped_from
from modicum.core.layers.recomputing import recomputed
from modicum.core.layers.trace import Around, RowsGiven, trace_pass
from modicum.core.layers.trace_moves import Gradient, Release, TracedPass
from modicum.core.machine.memory import tensor_bytes
from modicum.models.block_kinds import block_lists, shortened
from modicum.models.traced_moves import PassMoves, PlayedPart, large_or_small, played

_GENERATOR_BYTES = 5056  # the state of torch's generator, which a recomputed block restores
MakesBatch = Callable[[int], Any]
SumOfLosses = Callable[[Any, Any], Tensor]


class TracedLedgers(ABC):
    """What is known of a traced model: its ledger at any number of sequences and micro-batches.

    Attributes:
        weights: bytes of all parameters and buffers, those of adapters too.
        gradients: bytes of all gradients.
        dtype: of matrix products.
    """

    weights: int
    gradients: int
    dtype: str

    @abstractmethod
    def moves(self, *, recompute: bool = False, backward: bool = True) -> PassMoves:
        """The moves of a training pass, or of an evaluation's."""

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
            undone = {each.part.block for each in parts if each.part.during == "backward"}
            parts = [_with_state(each) if each.part.block in undone else each for each in parts]
        after = self.moves(backward=False).parts(sequences)
        trained, evaluated = played(parts, accumulated=again), played(after)
        there = 0 if again else self.gradients  # among what the backward pass leaves
        backward = max(0, trained.backward - there)
        own = min(trained.block, backward)
        kept: tuple[Phase, ...] = ("forward", "loss")
        entries = [
            Entry("activation", trained.kept, kept, "activations"),
            Entry("activation", own, ("backward",), "activations of one block"),
            Entry("workspace", evaluated.forward, ("evaluation",), "a block, or what follows"),
            Entry("workspace", trained.forward - trained.kept, ("forward",), "in passing"),
            Entry("workspace", trained.loss - trained.kept, ("loss",), "losses and gradients"),
            Entry("workspace", backward - own, ("backward",), "gradients of a block"),
        ]
        large = _by_moment(parts, after, there, large=True, accumulated=again)
        if any(large):
            small = _by_moment(parts, after, there, large=False, accumulated=again)
            sizes = zip(entries, large, small, strict=True)
            entries = [replace(entry, large=most, rest=rest) for entry, most, rest in sizes]
        return Ledger.of(
            Entry("weight", self.weights, what="model"),
            Entry("buffer", batch * micro_batches, ALWAYS, "batch"),
            *entries,
            Work(trained.flops[0], dtype=self.dtype, phase="forward"),
            Work(trained.flops[1], dtype=self.dtype, phase="backward"),
        )

    def slack(self, sequences: int, *, recompute: bool = False) -> int:
        """How far the begin of the blocks' backward passes is below the worst of phase `loss`."""
        found = played(self.moves(recompute=recompute).parts(sequences))
        return max(0, found.loss - found.begun)

    def kept_by_block(self, sequences: int, *, recompute: bool = False) -> list[int]:
        """Bytes that each block keeps until its backward pass is over, in the order they run."""
        found: list[int] = []
        for each in self.moves(recompute=recompute).parts(sequences):
            if each.part.block and each.part.during == "forward":
                alone = played([replace(each, count=1)]).kept
                found += [max(0, alone)] * each.count
        return found


class TracedModel(TracedLedgers):
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
        rows: says how many rows an operation gives whose result the data decides; None: none may.
        around: gives the context of the forward pass of training, such as a policy's on what is
            saved.

    >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    >>> model = nn.Sequential(*layers)
    >>> traced = TracedModel(model, lambda n: torch.zeros(n, 8), lambda m, x: m(x).sum())
    >>> traced.ledger(4).bytes("weight")
    1728
    """

    def __init__(
        self,
        model: nn.Module,
        batch: MakesBatch,
        loss: SumOfLosses,
        *,
        blocks: Iterable[nn.Module] = (),
        device: torch.device | str = "cpu",
        dtype: str = "float32",
        rows: RowsGiven | None = None,
        around: Around | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        self.weights = tensor_bytes([*model.parameters(), *model.buffers()])
        self.gradients = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self._batch, self._loss, self._device, self._rows = batch, loss, device, rows
        self._around = around
        self._lists = block_lists(model, blocks)
        self.counts = {e.full_name(n): c for e in self._lists for n, c in e.kept.items()}
        self._passes: dict[tuple[bool, bool], PassMoves] = {}
        self._ran = False  # with the blocks that stay

    def moves(self, *, recompute: bool = False, backward: bool = True) -> PassMoves:
        """The moves of a training pass, or of an evaluation's."""
        key = (recompute, backward)
        if key not in self._passes:
            trace = lambda sequences: self._traced(sequences, *key)  # noqa: E731
            self._passes[key] = PassMoves(trace, self.counts)
        return self._passes[key]

    def _traced(self, sequences: int, recompute: bool, backward: bool) -> TracedPass:
        try:
            found = self._traced_in(sequences, recompute, backward)
        except Exception:  # whatever a user's model says
            if self._ran or not self._keep_all():
                raise
            found = self._traced_in(sequences, recompute, backward)
        self._ran = True
        return found

    def _keep_all(self) -> bool:
        """Have all blocks stay, as a model may look up what one gets by its number; if any went."""
        every = [each.of_all(self.model) for each in self._lists]
        went = every != self._lists
        self._lists = every
        self.counts.update({e.full_name(n): 1 for e in every for n in e.kept})
        return went

    def _traced_in(self, sequences: int, recompute: bool, backward: bool) -> TracedPass:
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
                    around=self._around if backward else None,
                )
            finally:
                undo()
                self.model.train(before)


def _by_moment(
    parts: list[PlayedPart],
    evaluated: list[PlayedPart],
    gradients: int,
    *,
    large: bool,
    accumulated: bool,
) -> tuple[int, ...]:
    """Of the entries for what comes and goes, the most in large tensors, or in small ones.

    Args:
        gradients: bytes of those, large and small, that other ledgers count.
    """
    own = large_or_small(parts, mapped_from(), large=large)
    found = played(own, accumulated=accumulated)
    there = sum(
        move.bytes * each.count
        for each in own
        for move in each.part.moves
        if isinstance(move, Gradient)
    )
    backward = max(0, found.backward - min(there, gradients))
    block = min(found.block, backward)
    passing = played(large_or_small(evaluated, mapped_from(), large=large)).forward
    return (
        found.kept, block, passing,
        max(0, found.forward - found.kept), max(0, found.loss - found.kept), backward - block,
    )  # fmt: skip


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


@dataclass(frozen=True)
class EvenRows:
    """What data is taken to decide: rows are spread evenly over some of a layer's experts.

    Args:
        experts: how many get rows.
    """

    experts: int

    def __call__(self, operation: str, shape: tuple[int, ...]) -> int:
        """Rows of a `nonzero`: the experts that get any, or what each of them gets."""
        if sum(side > 1 for side in shape) <= 1:
            return self.experts
        return -(-math.prod(shape) // self.experts)


def experts_of(model: nn.Module) -> tuple[int, int] | None:
    """How many experts a model's layers choose from and how many they choose; None: no layer does.

    >>> layer = nn.Linear(2, 2)
    >>> layer.num_experts, layer.top_k = 8, 2
    >>> experts_of(nn.Sequential(layer))
    (8, 2)
    """
    for module in model.modules():
        experts, chosen = (getattr(module, name, None) for name in ("num_experts", "top_k"))
        if isinstance(experts, int) and isinstance(chosen, int):
            return experts, chosen
    return None


def traced_ledger(
    model: nn.Module,
    batch: MakesBatch,
    loss: SumOfLosses,
    sequences: int,
    *,
    micro_batches: int = 1,
    recompute: bool = False,
    **how: Any,
) -> tuple[Ledger, Ledger]:
    """The ledger of any model, from less to more: alike but where data decides.

    Data decides where a layer chooses among experts. Spread over all of them, or given to as few
    as a token chooses, rows take the least and the most.

    Args:
        model, batch, loss: and what else `TracedModel` takes.
        sequences: in a micro-batch.
        micro_batches: in an update.
        recompute: whether blocks run again in the backward pass.

    >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    >>> batch, loss = lambda n: torch.zeros(n, 8), lambda model, x: model(x).sum()
    >>> least, most = traced_ledger(nn.Sequential(*layers), batch, loss, 4)
    >>> least == most, least.bytes("weight")
    (True, 1728)
    """
    found = experts_of(model)
    rows = [EvenRows(number) for number in found] if found else [None]
    traced = [TracedModel(model, batch, loss, rows=each, **how) for each in rows]
    ledgers = [
        each.ledger(sequences, micro_batches=micro_batches, recompute=recompute) for each in traced
    ]
    ledgers.sort(key=lambda ledger: ledger.peak())
    return ledgers[0], ledgers[-1]
