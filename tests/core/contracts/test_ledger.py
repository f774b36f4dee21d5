from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from modicum.core.contracts.ledger import PHASES, Entry, Ledger, ModelQuery, Wire, Work

kinds = st.sampled_from(["weight", "gradient", "optimizer", "activation", "workspace"])
phases = st.lists(st.sampled_from(PHASES), min_size=1, unique=True).map(tuple)
entries = st.builds(
    Entry,
    kinds,
    st.integers(0, 10**12),
    phases,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["device", "device", "host"]),
)
ledgers = st.lists(entries, max_size=6).map(lambda items: Ledger.of(*items))


@given(ledgers, ledgers, ledgers)
def test_ledgers_add(one, two, three):
    assert (one + two) + three == one + (two + three) == Ledger.sum([one, two, three])
    assert one + Ledger() == one
    for phase in PHASES:
        assert (one + two).bytes(phase=phase) == one.bytes(phase=phase) + two.bytes(phase=phase)
    assert max(one.peak(), two.peak()) <= (one + two).peak() <= one.peak() + two.peak()


@given(ledgers)
def test_the_peak_is_the_largest_phase(ledger):
    def on_device(phase):
        return sum(e.bytes for e in ledger.entries if phase in e.phases and e.place == "device")

    assert ledger.by_phase() == {phase: on_device(phase) for phase in PHASES}
    assert ledger.peak() == max(on_device(phase) for phase in PHASES)
    assert sum(row["bytes"] for row in ledger.table()) == sum(e.bytes for e in ledger.entries)


def test_what_is_alive_at_different_times_shares_the_memory():
    ledger = Ledger.of(
        Entry("weight", 100),
        Entry("activation", 70, ("forward", "loss")),
        Entry("optimizer", 50, ("step",)),
        Entry("host", 1000, place="host"),
        Entry("gradient", 0),
        Work(10),
        Work(20, phase="backward"),
        Wire("all_reduce", 8),
    )
    assert ledger.peak() == 170
    assert ledger.bytes("optimizer", "forward") == 0
    assert ledger.bytes("weight", "step") == 100
    assert (ledger.flops(), ledger.flops("backward")) == (30, 20)
    assert len(ledger.entries) == 4
    assert ledger.wire[0].bytes == 8


def test_a_policy_maps_entries():
    ledger = Ledger.of(Entry("weight", 8), Entry("activation", 6), Entry("buffer", 4))

    def recompute(entry: Entry) -> Entry | None:
        if entry.kind == "buffer":
            return None
        return replace(entry, bytes=entry.bytes // 2) if entry.kind == "activation" else entry

    assert [entry.bytes for entry in ledger.map_entries(recompute).entries] == [8, 3]


def test_alike_entries_are_one_row_of_the_table():
    ledger = Ledger.of(
        Entry("weight", 1, what="a"), Entry("weight", 5, what="b"), Entry("weight", 2, what="a")
    )
    assert [(row["what"], row["bytes"], row["phase"]) for row in ledger.table()] == [
        ("b", 5, "always"),
        ("a", 3, "always"),
    ]
    assert Entry("activation", 1, ("forward", "loss")).phase == "forward, loss"


def test_positions_of_a_shape():
    assert ModelQuery(sequences=3, tokens=7).positions == 21
