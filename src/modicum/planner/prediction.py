"""What a rank's update takes under a choice, as plans, budgets and reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modicum.adapters.travel import Travel
from modicum.core.contracts.ledger import (
    ALWAYS,
    PHASES,
    ClassTreatment,
    Entry,
    Ledger,
    Phase,
    Wire,
)
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.layout import Layout

ALONE = Layout()


@dataclass(frozen=True)
class Choice:
    """What the planner may choose without changing the arithmetic.

    Args:
        micro_batch_size, micro_batches: of each rank.
        recompute: whether blocks run again in the backward pass.
        layout: how the ranks share the work.
        asynchronous: whether checkpoints are copied in memory and written while training continues.
        shares: what a policy on saved activations was seen to leave of them; None: not seen yet.
    """

    micro_batch_size: int
    micro_batches: int
    recompute: bool
    layout: Layout = ALONE
    asynchronous: bool = False
    shares: Shares | None = None

    @classmethod
    def of(
        cls, batch_size: int, size: int, recompute: bool, layout: Layout, asynchronous: bool
    ) -> Choice:
        """The choice with micro-batches of at most `size` that make a rank's share of the batch.

        >>> Choice.of(10, 2, False, Layout(replicas=4), False).micro_batches
        2
        """
        share = -(-batch_size // layout.ranks)
        size = min(size, share)
        return cls(size, -(-share // size), recompute, layout, asynchronous)


@dataclass(frozen=True)
class Prediction:
    """Bytes and work of one rank in an update, under a choice.

    Args:
        total, trainable: elements of the full model and its adapters.
        frozen_bytes: of weights that are read once and never change.
        half: whether matrix products are in bf16.
        traced: whether the model's part is traced; if not, it is arithmetic.
        travel: where the adapter can be used outside of modicum; None: there is none.
        narrow: layers that the adapter's rank is above the smaller width of, with the largest
            rank that fits them.
        treated: what the optimizer does with each class of parameters, if not the same.
        sent_dense: trained tensors of which a method of `comm` sends the numbers themselves, with
            how many they are.
        narrow_matrices: those narrower than the optimizer's rank, with their smaller width.
        coding_flops: by which a method of `comm` makes what an update sends; not among `flops`.
        thin_matrices: those of which the optimizer's density rounds to nothing, with their parts.
        larger_forms: layers whose form takes more bytes than a dense weight, with how many times
            as many.
        positions: of a micro-batch.
        built: layers whose adapter chooses by `positions` whether its change is built, forward and
            backward, with what it chooses.
        update_wires: of the ledger's calls the last ones, which the optimizer makes in its update.
        left_out: by section of the recipe, matrices that its `targets` leave out, with the reasons.
        before: what is held before the first update, where the model is made smaller first.
    """

    choice: Choice
    ledger: Ledger
    total: int
    trainable: int
    frozen_bytes: int
    half: bool
    traced: bool = False
    travel: Travel | None = None
    narrow: Mapping[str, int] = field(default_factory=dict)
    treated: tuple[ClassTreatment, ...] = ()
    sent_dense: Mapping[str, int] = field(default_factory=dict)
    narrow_matrices: Mapping[str, int] = field(default_factory=dict)
    coding_flops: int = 0
    thin_matrices: Mapping[str, int] = field(default_factory=dict)
    larger_forms: Mapping[str, float] = field(default_factory=dict)
    positions: int = 0
    built: Mapping[str, tuple[bool, bool]] = field(default_factory=dict)
    update_wires: tuple[Wire, ...] = ()
    left_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    before: Ledger = field(default_factory=Ledger)

    @property
    def peak_bytes(self) -> int:
        """Tensor bytes at the peak of an update."""
        return self.ledger.peak()

    @property
    def peak_before(self) -> int:
        """Tensor bytes at the peak before the first update, where a model is made smaller; or 0."""
        return self.before.peak()

    @property
    def flops(self) -> int:
        """Of an update: every micro-batch's forward and backward pass, and the step."""
        step = self.ledger.flops("step")
        return (self.ledger.flops() - step) * self.choice.micro_batches + step

    @property
    def wire_bytes(self) -> int:
        """Bytes that the rank sends in an update, around a ring."""
        return sum(wire.bytes for wire in self.ledger.wire)

    def wire_rows(self) -> list[dict[str, Any]]:
        """The same by collective and axis, with the calls that there are in an update."""
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for wire in self.ledger.wire:
            named = {"collective": wire.collective, "axis": wire.axis}
            row = rows.setdefault((wire.collective, wire.axis), {**named, "bytes": 0, "calls": 0})
            row["bytes"] += wire.bytes
            row["calls"] += wire.count
        return list(rows.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in addition to the device's: of what is staged for checkpoints."""
        return sum(entry.bytes for entry in self.ledger.entries if entry.place == "host")

    @property
    def lasting_bytes(self) -> int:
        """Tensor bytes that are there in every phase: weights, and the optimizer's state."""
        return _lasting(self.ledger)

    @property
    def small_bytes(self) -> int:
        """Bytes in tensors that come and go and are not mapped on their own, in the worst phase."""
        return _small(self.ledger)

    def process_bytes(self, base: int, kept: float, *, staged: bool = True) -> int:
        """The process's resident size at an update's largest.

        Args:
            base: what it holds before the first tensor.
            kept: bytes that the allocator keeps next to each byte of tensors that come and go.
            staged: whether a checkpoint is still being written then, from a copy of the state.
        """
        return max(self.process_by_phase(base, kept, staged=staged))

    def process_by_phase(self, base: int, kept: float, *, staged: bool = True) -> tuple[int, ...]:
        """The same, for each phase in which large tensors come and go.

        Of what comes and goes, small blocks take what they took in their worst phase: the C library
        keeps those pages when they are free, and with holes between them. A large tensor is mapped
        on its own, and given back when it is free. What is always there has no holes.
        """
        host = self.host_bytes if staged else 0
        return tuple(base + host + each for each in _resident(self.ledger, kept))

    def process_before(self, base: int, kept: float) -> int:
        """The same before the first update, where no block runs again and nothing is staged."""
        return base + max(_resident(self.before, kept))


def _resident(ledger: Ledger, kept: float) -> list[int]:
    """What tensors on the device and the allocator take of a process, in each phase."""
    small = _small(ledger)
    steady = _lasting(ledger) + small + round(small * kept)
    return [
        steady + sum(min(entry.large, entry.bytes) for entry in _passing(ledger, phase))
        for phase in PHASES
    ]


def _lasting(ledger: Ledger) -> int:
    there = [entry for entry in ledger.entries if entry.phases == ALWAYS]
    return sum(entry.bytes for entry in there if entry.place == "device")


def _small(ledger: Ledger) -> int:
    return max(sum(entry.small for entry in _passing(ledger, phase)) for phase in PHASES)


def _passing(ledger: Ledger, phase: Phase) -> list[Entry]:
    """What is on the device in a phase, and not in all."""
    entries = [entry for entry in ledger.entries if entry.place == "device"]
    return [e for e in entries if phase in e.phases and e.phases != ALWAYS]
