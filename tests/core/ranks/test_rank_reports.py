"""What a controller and its agents say to each other: nothing else is taken."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.core.ranks.rank_reports import (
    MOST_EVENT_BYTES,
    OVER,
    RankReport,
    parse_event,
    parse_ranks,
    parse_reports,
)

EVENT = {"sentence": "rank 1 is dead", "ends": True, "kind": "dead", "rank": 1, "seconds": 0.5}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.mark.parametrize("event", [{}, OVER, EVENT])
def test_an_event_arrives_as_it_is(event: dict[str, Any]) -> None:
    assert parse_event(json.dumps(event).encode()) == event


@settings(max_examples=200, deadline=None)
@given(line=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nothing_but_events_and_ranks_is_taken(line: bytes) -> None:
    with suppress(ValueError):
        assert parse_event(line) in ({}, OVER)
    with suppress(ValueError):
        assert parse_ranks(line, 4) <= {0, 1, 2, 3}


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(EVENT)) | st.text(), value=JSON)
def test_a_spoilt_event_is_refused_or_a_line_that_can_be_written(name: str, value: Any) -> None:
    try:
        found = parse_event(json.dumps(EVENT | {name: value}).encode())
    except ValueError:
        return
    assert found["sentence"].isprintable()
    assert type(found["ends"]) is bool
    text = json.dumps(found, ensure_ascii=False, allow_nan=False)
    assert json.loads(text.encode()) == found


@pytest.mark.parametrize(
    "line",
    [
        b"[" * MOST_EVENT_BYTES,
        b"{}" + b" " * MOST_EVENT_BYTES,
        b'"rank 1 is dead"',
        b'{"over": false}',
        b'{"ends": true}',
        b'{"sentence": "rank 1 is dead"}',
        b'{"sentence": "rank 1 is dead", "ends": 1}',
        b'{"sentence": ["rank 1"], "ends": true}',
        b'{"sentence": "\\u001b[2Jrank 1", "ends": true}',
        b'{"sentence": "rank 1\\nrank 2", "ends": true}',
        b'{"sentence": "\\ud800", "ends": true}',
        b'{"sentence": "rank 1", "ends": true, "\\u001b": 0}',
        b'{"sentence": "rank 1", "ends": true, "seconds": NaN}',
        b'{"sentence": "rank 1", "ends": true, "seconds": 1e999}',
    ],
    ids=lambda line: ascii(line[:60]),
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"nested|Expecting|more than|no |neither"):
        parse_event(line)


@pytest.mark.parametrize("huge", [10**400, -(10**400)])
def test_seconds_beyond_all_floats_are_refused(huge: int) -> None:
    report = RankReport(
        rank=1, host="b", process="running", process_seconds=0.0, beat_seconds=0.1, starved=0.0,
        left=0, words="", marked=False, place="", entered={}, members={}, open=(), done=(),
    )  # fmt: skip
    with pytest.raises(ValueError, match="no seconds"):
        parse_reports(json.dumps([asdict(report) | {"process_seconds": huge}]).encode(), 2)
