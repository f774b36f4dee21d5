"""Every method of the catalog against every check of its room: a new method needs no new test."""

from __future__ import annotations

import warnings

import pytest

from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.core.errors import InputError
from modicum.proofs.contracts.base import BATTERIES, Check, NotApplicable, checks

# Tasks are what methods work on; they have tests of their own.
WITHOUT = {"tasks"}
# Where expensive checks start several ranks, and what a room's battery has at least.
WITH_RANKS = {"comm", "linears", "optim"}
LEAST = {"adapters": 25, "comm": 9, "compress": 20, "linears": 15, "memory": 10, "optim": 15}
CHECKED = [record for record in catalog().values() if record.room not in WITHOUT]


def marks(record: MethodRecord, entry: Check) -> list[pytest.MarkDecorator]:
    if not entry.expensive:
        return []
    return [pytest.mark.expensive, *([pytest.mark.ranks] if record.room in WITH_RANKS else [])]


@pytest.mark.parametrize(
    ("record", "entry"),
    [
        pytest.param(record, entry, id=f"{record.name}-{entry.name}", marks=marks(record, entry))
        for record in CHECKED
        for entry in checks(record.room, slot=record.info.slot)
    ],
)
def test_method(record: MethodRecord, entry: Check) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entry.run(record.load())
        except NotApplicable as reason:
            pytest.skip(str(reason))


@pytest.mark.parametrize("room", BATTERIES)
def test_every_check_says_what_it_promises(room: str) -> None:
    records = [record for record in CHECKED if record.room == room]
    assert records
    for slot in {record.info.slot for record in records}:
        battery = checks(room, slot=slot)
        assert len(battery) == len({entry.name for entry in battery}) >= 9
        assert all(entry.sentence.endswith((".", ":")) for entry in battery)
    assert max(len(checks(room, slot=record.info.slot)) for record in records) >= LEAST[room]


def test_a_room_without_a_battery_is_refused() -> None:
    with pytest.raises(InputError, match="no battery"):
        checks("solvers")
