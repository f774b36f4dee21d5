"""Roll calls: what a rank tells all hear; one that dies or does not come is named."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pool import Pool

from modicum.core.ranks import roll_call
from modicum.core.ranks.ranks import PeerLost, Ranks
from modicum.core.ranks.roll_call import RollCall, _SignsOfLife

ranked = pytest.mark.ranks


@contextmanager
def impatient() -> Iterator[None]:
    """Ranks that wait for a quarter of the time."""
    before, roll_call.SILENT_SECONDS = roll_call.SILENT_SECONDS, 1.5
    try:
        yield
    finally:
        roll_call.SILENT_SECONDS = before


def calls(ranks: Ranks, values: list[Any]) -> list[Any]:
    """Two in turn, of which the second one knows nothing of the first one's values."""
    found = []
    for _ in range(2):
        with RollCall("a value", ranks.rank, ranks.size) as call:
            found.append(call.gather("value", values[ranks.rank]))
            if ranks.rank == 1:
                call.tell("own", {"of": "rank 1"})
            found.append(call.ask("own", 1))
        values.reverse()
    return found


@ranked
def test_all_ranks_hear_what_each_tells(pool: Pool) -> None:
    values: list[Any] = [None, "Gr\u00fc\u00dfe\x00", {"a": [1.5, {}]}]
    own = [{"of": "rank 1"}]
    assert pool.run(calls, values, ranks=3) == [[values, own, values[::-1], own]] * 3


def with_one_that_is_slow(ranks: Ranks) -> list[int]:
    """Rank 1 takes longer than ranks wait for one of which they hear nothing; it lives."""
    with impatient(), RollCall("a value", ranks.rank, ranks.size) as call:
        if ranks.rank == 1:
            time.sleep(3.0)
        return call.gather("value", ranks.rank)


@ranked
def test_a_slow_rank_is_waited_for(pool: Pool) -> None:
    assert pool.run(with_one_that_is_slow, ranks=3) == [[0, 1, 2]] * 3


def missed(ranks: Ranks, guilty: int, what: str) -> tuple[str, float]:
    if ranks.rank == guilty and what == "absent":
        time.sleep(5.0)
        return "", 0.0
    begun = time.monotonic()
    try:
        with (
            impatient(),
            RollCall("a value", ranks.rank, ranks.size, coming_seconds=2.0) as call,
        ):
            call.gather("first", 1)
            if ranks.rank == guilty:
                os.kill(os.getpid(), signal.SIGKILL)
            call.gather("second", 2)
    except PeerLost as error:
        return str(error), time.monotonic() - begun
    return "nobody is missed", 0.0


@ranked
@pytest.mark.parametrize("what", ["absent", "killed"])
@pytest.mark.parametrize("guilty", [1, 2])
def test_who_is_missing_is_named_by_all(pool: Pool, guilty: int, what: str) -> None:
    lost = (guilty,) if what == "killed" else ()
    found = pool.run(missed, guilty, what, ranks=3, lost=lost)
    for rank in {0, 1, 2} - {guilty}:
        said, seconds = found[rank]
        assert said.startswith(f"rank {guilty}"), said
        assert "gives no sign of life since" in said
        assert "while ranks agreed on a value" in said
        assert 1.0 < seconds < 6.0


@ranked
def test_without_rank_0_the_store_is_gone(pool: Pool) -> None:
    found = pool.run(missed, 0, "killed", ranks=3, lost=(0,))
    for said, _ in found[1:]:
        assert said.startswith("rank 0 (host ")
        assert ", where the ranks met, is gone" in said


def test_a_beat_that_changes_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(roll_call.time, "monotonic", lambda: now[0])
    signs = _SignsOfLife(coming_seconds=20.0, grace_seconds=1.0)
    assert signs.silent({1: "0", 2: None}) == {}
    now[0] += 6.9
    assert signs.silent({1: "0", 2: None}) == {}
    now[0] += 0.2
    assert signs.silent({1: "0", 2: None}) == {1: pytest.approx(7.1)}
    assert signs.silent({1: "1", 2: None}) == {}
    now[0] += 14.0
    assert signs.silent({1: "2", 2: None}) == {2: pytest.approx(21.1)}
    now[0] += 300.0  # one that lives and does not come
    assert set(signs.silent({1: "3"})) == {1}
