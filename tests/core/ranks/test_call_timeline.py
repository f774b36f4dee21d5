"""Rows of updates' calls: which updates are kept, in how many rows, and what the sums are over."""

from __future__ import annotations

from itertools import count

from modicum.core.ranks.call_timeline import MOST_OF_UPDATE, CallTimeline
from modicum.core.ranks.observed_calls import ObservedCall
from modicum.report.wire_rows import _usual


def call(asked: float = 0.0, sent: int = 10, ended: float | None = 0.5) -> ObservedCall:
    made = ObservedCall(0, "all-reduce", "0", (0, 1), "head", sent, asked, asked + 0.25)
    if ended is not None:
        made.ended, made.waited = ended, 0.125
    return made


def run(timeline: CallTimeline, first: int, last: int, calls: int = 1, sent: int = 10) -> None:
    for step in range(first, last + 1):
        with timeline.update(step):
            for _ in range(calls):
                timeline.began(call(sent=sent))


def test_times_are_those_since_the_update_began() -> None:
    ticks = count(10)
    timeline = CallTimeline(now=lambda: float(next(ticks)))
    with timeline.update(1):
        timeline.began(call(asked=10.5, ended=10.875))
    timeline.finish()
    [row] = timeline.rows
    assert row["seconds"] == 1.0
    assert row["calls"] == [
        {
            "kind": "all-reduce",
            "group": "0",
            "ranks": 2,
            "label": "head",
            "bytes": 10,
            "asked": 0.5,
            "begun": 0.75,
            "ended": 0.875,
            "waited": 0.125,
        }
    ]


def test_a_call_that_outlasts_its_update_has_its_end() -> None:
    timeline, late = CallTimeline(), call(ended=None)
    with timeline.update(1):
        timeline.began(late)
    assert timeline.rows == []
    with timeline.update(2):
        late.ended, late.waited = 7.0, 0.5
    never = call(ended=None)
    with timeline.update(3):
        timeline.began(never)
    timeline.finish()
    assert timeline.rows[0]["calls"][0]["waited"] == 0.5
    assert timeline.rows[2]["calls"][0]["ended"] is None


def test_rows_are_bounded_and_evenly_spaced_and_sums_leave_nothing_out() -> None:
    timeline = CallTimeline(most=40)
    run(timeline, 1, 1001, calls=3)
    timeline.finish()
    assert sum(1 + len(row["calls"]) for row in timeline.rows) <= 40
    steps = [row["step"] for row in timeline.rows]
    every = timeline.every
    assert every > 64
    assert steps == [*range(every, 1001, every), 1001]
    assert {row["every"] for row in timeline.rows} == {every}
    assert timeline.rows[-1]["so_far"] == {
        "updates": 1001, "calls": 3003, "bytes": 30030, "waited": 375.375,
    }  # fmt: skip


def test_one_update_of_very_many_calls_is_bounded_too() -> None:
    timeline = CallTimeline(most=40)
    run(timeline, 1, 3, calls=MOST_OF_UPDATE + 7)
    timeline.finish()
    assert len(timeline.rows) == 1
    assert timeline.rows[0]["left_out"] == 7
    assert len(timeline.rows[0]["calls"]) == MOST_OF_UPDATE
    assert timeline.rows[0]["so_far"]["calls"] == 3 * (MOST_OF_UPDATE + 7)


def test_calls_between_updates_are_in_the_sums_and_in_no_row() -> None:
    timeline = CallTimeline()
    run(timeline, 1, 1)
    timeline.began(call(sent=1000))
    run(timeline, 2, 2)
    timeline.finish()
    assert [len(row["calls"]) for row in timeline.rows] == [1, 1]
    assert timeline.rows[-1]["so_far"]["bytes"] == 1020


def test_a_call_is_of_the_update_that_asked_for_it_whenever_it_begins() -> None:
    ticks = iter([10.0, 11.0, 20.0, 21.0])
    timeline = CallTimeline(now=lambda: next(ticks))
    with timeline.update(1):
        timeline.began(call(asked=10.5, sent=1))
    timeline.began(call(asked=10.75, sent=2))  # begins when the update is over
    timeline.began(call(asked=15.0, sent=100))
    with timeline.update(2):
        timeline.began(call(asked=10.875, sent=3))
        timeline.began(call(asked=20.5, sent=4))
    timeline.began(call(asked=20.75, sent=5))
    timeline.finish()
    assert [[each["bytes"] for each in row["calls"]] for row in timeline.rows] == [
        [1, 2, 3], [4, 5],
    ]  # fmt: skip
    assert timeline.rows[-1]["so_far"]["bytes"] == 115


def test_a_run_that_resumes_continues_its_rows() -> None:
    before = CallTimeline(most=40)
    run(before, 1, 100)
    before.finish()
    kept = [row for row in before.rows if row["step"] <= 81]
    after = CallTimeline(kept, most=40)
    assert after.every == before.every
    run(after, 82, 100)
    after.finish()
    assert after.rows[-1]["so_far"]["updates"] == kept[-1]["so_far"]["updates"] + 19
    steps = [row["step"] for row in after.rows]
    assert steps == sorted(set(steps))
    assert sum(1 + len(row["calls"]) for row in after.rows) <= 40


def test_what_is_to_be_written_is_said_once() -> None:
    timeline = CallTimeline(most=6)
    run(timeline, 1, 3)
    assert [row["step"] for row in timeline.written()[0]] == [1, 2]
    run(timeline, 4, 5)
    rows, dropped = timeline.written()
    assert dropped
    assert [row["step"] for row in rows] == [3]
    assert timeline.written() == ([], False)


def test_what_is_sent_in_turns_by_odd_and_even_updates_is_kept_of_both() -> None:
    timeline = CallTimeline(most=20)
    for step in range(1, 101):
        run(timeline, step, step, sent=1000 if step % 2 else 10)
    timeline.finish()
    sent = [{"calls": 1.0, "bytes": row["calls"][0]["bytes"], "waited": 0} for row in timeline.rows]
    assert timeline.every > 1
    for kept in range(2, len(sent)):  # the last update is kept whatever its number
        assert _usual(sent[:kept])["bytes"] == 505
