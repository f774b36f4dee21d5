"""What a part of a run spends, by arithmetic, before anything runs.

A `Ledger` is a list of entries in bytes, work in floating-point operations and traffic on wires.
Ledgers add. An entry says in which phases of a step it is alive; the peak is the largest sum over
the phases. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from modicum.core.heap import mapped_from

EntryKind = Literal[
    "weight", "gradient", "optimizer", "activation", "workspace", "buffer", "host", "disk"
]
# The instants of a step at which memory can peak, in the order in which they come. `loss` is the
# moment between forward and backward when logits and their gradient exist; `backward` the backward
# pass of the first block, when nearly all gradients are there.
Phase = Literal["load", "evaluation", "forward", "loss", "backward", "step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
ALWAYS: tuple[Phase, ...] = PHASES
# What a trained parameter is to optimizers: see `modicum.core.contracts.parameters.classes`.
ParameterClass = Literal["matrix", "embedding", "head", "vector", "convolution"]


@dataclass(frozen=True)
class Entry:
    """`bytes` of one kind, alive in `phases`; `what` names it for people.

    Args:
        large: of the bytes, at most so many in tensors that are mapped on their own.
        rest: at most so many in others, where that is another moment; None: what `large` leaves.
    """

    kind: EntryKind
    bytes: int
    phases: tuple[Phase, ...] = ALWAYS
    what: str = ""
    place: Literal["device", "host", "disk"] = "device"
    large: int = 0
    rest: int | None = None

    @property
    def small(self) -> int:
        """Bytes in tensors that share pages with others, at most."""
        left = max(0, self.bytes - self.large)
        return left if self.rest is None else max(left, self.rest)

    def in_tensors(self, sizes: Iterable[int]) -> Entry:
        """The same, known to be tensors of these bytes.

        >>> from modicum.core.heap import LARGEST
        >>> Entry("gradient", LARGEST + 5).in_tensors([LARGEST, 5]).small
        5
        """
        least = mapped_from()
        large = sum(size for size in sizes if size >= least)
        return replace(self, large=min(large, self.bytes))

    def in_one(self) -> Entry:
        """The same, known to be one tensor."""
        return self.in_tensors([self.bytes])

    @property
    def phase(self) -> str:
        """The phases as one word or list: `always`, `forward`, `forward, loss`."""
        return "always" if self.phases == ALWAYS else ", ".join(self.phases)


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiply and an add are two) in a phase.

    Those of the phases `forward` and `backward` are a micro-batch's, those of `step` an update's.
    """

    flops: int
    dtype: str = "float32"
    phase: Literal["forward", "backward", "step"] = "forward"


@dataclass(frozen=True)
class CodedNumbers:
    """Numbers of an update that one rank codes for a wire, and those that it decodes.

    Args:
        bits: of a number on the wire.
        transformed: numbers that a Hadamard transform mixes, before they are coded or after.
    """

    bits: int
    encoded: int
    decoded: int
    transformed: int = 0


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank puts on the wire in `count` calls of a collective over an axis.

    Args:
        coding: what makes these bytes of numbers, where that takes time; None: they are numbers.
    """

    collective: str
    bytes: int
    axis: str = "data"
    count: int = 1
    coding: CodedNumbers | None = None


@dataclass(frozen=True)
class Ledger:
    """Entries, work and wire traffic of a part of a run.

    >>> adapter = Ledger.of(Entry("weight", 400), Entry("activation", 100, ("forward", "loss")))
    >>> (adapter + adapter).peak()
    1000
    """

    entries: tuple[Entry, ...] = ()
    work: tuple[Work, ...] = ()
    wire: tuple[Wire, ...] = ()

    @classmethod
    def of(cls, *items: Entry | Work | Wire) -> Ledger:
        """A ledger of these items, in any order; entries of no bytes are left out."""
        return cls(
            tuple(item for item in items if isinstance(item, Entry) and item.bytes),
            tuple(item for item in items if isinstance(item, Work)),
            tuple(item for item in items if isinstance(item, Wire)),
        )

    @classmethod
    def sum(cls, ledgers: Iterable[Ledger]) -> Ledger:
        """All of these together."""
        entries: list[Entry] = []
        work: list[Work] = []
        wire: list[Wire] = []
        for ledger in ledgers:
            entries += ledger.entries
            work += ledger.work
            wire += ledger.wire
        return cls(tuple(entries), tuple(work), tuple(wire))

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger.sum((self, other))

    def map_entries(self, change: Callable[[Entry], Entry | None]) -> Ledger:
        """A ledger with every entry changed, or left out where `change` returns None."""
        changed = (change(entry) for entry in self.entries)
        return replace(self, entries=tuple(entry for entry in changed if entry is not None))

    def without_backward(self) -> Ledger:
        """The same where no gradient is computed: forward passes are those of an evaluation.

        >>> kept = Entry("activation", 8, ("forward", "loss", "backward"))
        >>> passing = Entry("workspace", 2, ("evaluation",))
        >>> Ledger.of(kept, passing, Entry("weight", 4)).without_backward().peak()
        6
        """

        def change(entry: Entry) -> Entry | None:
            if entry.phases == ALWAYS:
                return entry
            if "evaluation" not in entry.phases:
                return None
            return replace(entry, phases=("evaluation", "forward", "loss"))

        work = tuple(work for work in self.work if work.phase != "backward")
        return replace(self.map_entries(change), work=work)

    def bytes(self, kind: EntryKind | None = None, phase: Phase | None = None) -> int:
        """Bytes on the device, of one kind and one phase where these are given."""
        return sum(
            entry.bytes
            for entry in self.entries
            if entry.place == "device"
            and (kind is None or entry.kind == kind)
            and (phase is None or phase in entry.phases)
        )

    def by_phase(self) -> dict[Phase, int]:
        """Bytes on the device alive in each phase."""
        return {phase: self.bytes(phase=phase) for phase in PHASES}

    def peak(self) -> int:
        """The largest sum over the phases: what the device must have."""
        return max(self.by_phase().values())

    def flops(self, phase: str | None = None) -> int:
        """Floating-point operations, in one phase or in all."""
        return sum(work.flops for work in self.work if phase is None or work.phase == phase)

    def table(self) -> list[dict[str, object]]:
        """Rows of kind, phase, what and bytes, alike entries added up, largest first."""
        rows: dict[tuple[str, str, str], int] = {}
        for entry in self.entries:
            key = (entry.kind, entry.phase, entry.what)
            rows[key] = rows.get(key, 0) + entry.bytes
        ordered = sorted(rows.items(), key=lambda item: -item[1])
        return [
            {"kind": kind, "phase": phase, "what": what, "bytes": size}
            for (kind, phase, what), size in ordered
        ]


@dataclass(frozen=True)
class ModelQuery:
    """The shape of one micro-batch, and how many make an update: what a ledger is asked at.

    Args:
        sequences: sequences in a micro-batch.
        tokens: tokens in a sequence.
        micro_batches: micro-batches in an update.
        weight_bytes: bytes an element of a frozen weight.
        compute_bytes: bytes an element of what matrix products make.
        residual_bytes: bytes an element of the stream between blocks.
        segments: whether rows hold several documents, kept apart by a mask.
        device: where it runs, cpu or cuda; kernels keep other things, and need other scratch.
    """

    sequences: int
    tokens: int
    micro_batches: int = 1
    weight_bytes: int = 4
    compute_bytes: int = 4
    residual_bytes: int = 4
    segments: bool = False
    device: str = "cpu"

    @property
    def positions(self) -> int:
        """Tokens in a micro-batch."""
        return self.sequences * self.tokens


# The dimension of a weight's outputs; then, in turn, how many blocks there are of how many outputs.
HeadBlocks = tuple[int, ...]


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that an optimizer trains.

    Args:
        name: the model's.
        shape: of the full parameter, whatever a rank holds of it.
        parameter_class: what it is to optimizers that treat classes apart.
        element_bytes: bytes of an element of the parameter and of its gradient.
        heads: of attention whose queries or keys its rows make, each as many rows; 0: none. Of
            fused layers the blocks of neighbouring outputs that are a head's, or alone.
    """

    name: str
    shape: tuple[int, ...]
    parameter_class: ParameterClass
    element_bytes: int = 4
    heads: int | HeadBlocks = 0

    @property
    def matrix(self) -> bool:
        """Whether optimizers that work on matrices take it for one, by its class."""
        return self.parameter_class == "matrix"

    @property
    def bytes(self) -> int:
        """Bytes of the full parameter, and of its gradient."""
        return math.prod(self.shape) * self.element_bytes

    def rows(self, rank: int, shards: int) -> int:
        """Rows (of dimension 0) that one of so many ranks holds.

        >>> [TrainedParameter("w", (5, 2), "matrix").rows(rank, 3) for rank in range(3)]
        [2, 2, 1]
        """
        rows = self.shape[0] if self.shape else 1
        each = -(-rows // shards)
        return max(0, min(each, rows - rank * each))


@dataclass(frozen=True)
class ClassTreatment:
    """What an optimizer does with the parameters of one class.

    Args:
        parameters: how many there are.
        rule: by which they are updated.
        bytes: of their state, all ranks together.
    """

    parameter_class: ParameterClass
    parameters: int
    rule: str
    bytes: int

    def row(self) -> dict[str, object]:
        """The treatment as plain values."""
        return {
            "class": self.parameter_class,
            "parameters": self.parameters,
            "rule": self.rule,
            "bytes": self.bytes,
        }


@dataclass(frozen=True)
class OptimizerQuery:
    """What an optimizer's ledger is asked at.

    Args:
        parameters: all that it trains, in the model's order.
        shards: ranks that hold one copy of the weights between them, sharded along dimension 0.
        micro_batches: in an update.
        batch: the shape of a micro-batch and how many make an update, for methods that keep
            something of each row; None where nobody says it.
    """

    parameters: tuple[TrainedParameter, ...]
    shards: int = 1
    micro_batches: int = 1
    batch: ModelQuery | None = field(default=None, kw_only=True)
