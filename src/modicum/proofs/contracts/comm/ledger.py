"""What a schedule sends against what its ledger says."""

from __future__ import annotations

from modicum.comm.base import ScheduleQuery
from modicum.proofs.contracts.comm.subjects import STEPS, CommSubject, Odd, comm_check, two_ranks
from modicum.proofs.contracts.comm.subjects import schedule as schedule_of
from modicum.proofs.contracts.comm.two_ranks import on_two_ranks


@comm_check()
def check_alone_nothing_is_sent(subject: CommSubject) -> None:
    """Of one process alone the ledger says no traffic, and of more ranks, more per rank."""
    value = schedule_of(subject)
    sent = [sum(w.bytes for w in value.ledger(_at(n, 4)).wire) for n in (1, 2, 4, 8)]
    assert sent[0] == 0, f"the ledger says {sent[0]} bytes of traffic of one process"
    assert sent == sorted(set(sent)), f"with 1, 2, 4, 8 ranks a rank sends {sent} bytes"


@comm_check(expensive=True)
def check_traffic(subject: CommSubject) -> None:
    """The ledger's bytes and calls of an update are those that the meter counts at two ranks."""
    value = schedule_of(subject)
    wires = [*value.ledger(_at(2, 4)).wire, *value.ledger(_at(2, 2)).wire]
    for found in on_two_ranks(two_ranks, value):
        for name in sorted({*found["sent"], *(wire.collective for wire in wires)}):
            said = sum(wire.bytes for wire in wires if wire.collective == name)
            calls = sum(wire.count for wire in wires if wire.collective == name)
            counted = (found["sent"].get(name, 0) / STEPS, found["calls"].get(name, 0) / STEPS)
            assert counted == (said, calls), (
                f"{name}: the ledger says {said} bytes in {calls} calls an update, the meter "
                f"counts {counted[0]:g} in {counted[1]:g}"
            )


def _at(ranks: int, element_bytes: int) -> ScheduleQuery:
    """The trained layers of the small model whose elements have so many bytes."""
    layers = []
    for module in Odd().modules():
        own = [p for p in module.parameters(recurse=False) if p.requires_grad]
        sizes = tuple(p.numel() for p in own if p.itemsize == element_bytes)
        layers += [sizes] if sizes else []
    return ScheduleQuery(tuple(layers), ranks, element_bytes)
