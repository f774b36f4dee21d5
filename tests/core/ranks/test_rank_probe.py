"""What is seen of a rank by its ring: open calls, those being written, groups made anew."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from modicum.core.ranks.call_ring import RingReader, RingWriter
from modicum.core.ranks.observed_calls import ObservedCall
from modicum.core.ranks.rank_probe import RankProbe
from modicum.core.ranks.rank_reports import MOST_OPEN

FIRST_RECORD = 32768


@pytest.fixture
def ring(tmp_path: Path) -> RingWriter:
    return RingWriter(tmp_path / "ring", 0)


def began(ring: RingWriter, number: int, group: str = "0", *members: int) -> None:
    now = time.monotonic()
    ring.began(ObservedCall(number, "barrier", group, members or (0, 1), "", 0, now, now))


def test_of_many_open_calls_the_first_and_the_last_are_told(
    ring: RingWriter, tmp_path: Path
) -> None:
    probe = RankProbe(tmp_path / "ring")
    for number in range(40):
        began(ring, number)
        if number == 20:
            probe.look()  # some are looked at again, and others for the first time
    told = [call.sequence for call in probe.look().open]
    assert told == [*range(8), *range(32, 40)]
    assert len(told) == MOST_OPEN


@pytest.mark.parametrize("looks_before", [True, False])
def test_a_call_that_is_being_written_is_read_with_the_next_look(
    ring: RingWriter, tmp_path: Path, looks_before: bool
) -> None:
    began(ring, 0)
    began(ring, 1)
    probe = RankProbe(tmp_path / "ring")
    if looks_before:
        assert len(probe.look().open) == 2
    struct.pack_into("<Q", ring._map, FIRST_RECORD, 0)  # as in the middle of it
    probe.look()
    began(ring, 2)
    struct.pack_into("<Q", ring._map, FIRST_RECORD, 1)
    assert [call.sequence for call in probe.look().open] == [0, 1, 2]


def test_what_was_written_over_is_not_waited_for(tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / "ring", 0, capacity=4)
    began(ring, 0)
    probe = RankProbe(tmp_path / "ring")
    struct.pack_into("<Q", ring._map, FIRST_RECORD, 0)
    probe.look()
    for number in range(1, 6):
        began(ring, number)
    assert [call.sequence for call in probe.look().open] == [2, 3, 4, 5]
    assert not probe._unread


def test_groups_of_one_name_are_told_apart(ring: RingWriter, tmp_path: Path) -> None:
    """Those of a process that left its groups and made others, which have the names anew."""
    probe, reader = RankProbe(tmp_path / "ring"), RingReader(tmp_path / "ring")
    for number in range(5):
        began(ring, number, "1", 0, 1)
    assert probe.look().entered["1"] == 5
    began(ring, 0, "1", 0, 2)
    began(ring, 0, "2", 0, 3)
    reader.state()
    found = [reader.call(number) for number in (4, 5, 6)]
    groups = [(one.call.group, one.call.members) for one in found if one is not None]
    assert groups == [("1", (0, 1)), ("1", (0, 2)), ("2", (0, 3))]
    report = probe.look()
    assert report.entered == {"1": 1, "2": 1}
    assert report.members == {"1": (0, 2), "2": (0, 3)}
