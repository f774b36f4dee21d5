"""The sample of tests by how long they take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import seconds
from seconds import SHARE, TIMED, SecondsNoted, drawn_once_in, timed

ROOT = Path(__file__).resolve().parents[1]


def report(test: str, when: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(
        test,
        (test, 0, test),
        {},
        "passed",
        None,
        when,
        duration=duration,  # type: ignore[arg-type]
    )


def test_each_costs_a_sample_the_same_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seconds, "timed", lambda: {"a": 10 * SHARE, "b": 2 * SHARE})
    assert [drawn_once_in(test) for test in ("a", "b[x-y[z]]", "c")] == pytest.approx([10, 2, 1])


def test_what_ran_is_timed_anew_and_what_is_gone_is_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "seconds.json"
    (tmp_path / "there.py").touch()
    before = {"there.py::quick": 9.0, "there.py::other": 3.0, "gone.py::test": 5.0}
    file.write_text(json.dumps(before))
    noted = SecondsNoted(file, tmp_path)
    for test, when, duration in [
        ("there.py::long[a]", "setup", 1.0),
        ("there.py::long[a]", "call", 3.0),
        ("there.py::long[b]", "call", 2.5),
        ("there.py::quick", "call", SHARE / 2),
    ]:
        noted.pytest_runtest_logreport(report(test, when, duration))
    noted.pytest_sessionfinish()
    assert json.loads(file.read_text()) == {"there.py::long": 3.25, "there.py::other": 3.0}


def test_what_is_committed_names_tests_that_are_there() -> None:
    gone = {test for test in timed() if not (ROOT / test.split("::")[0]).exists()}
    assert not gone, f"run the tests with --note-seconds to forget these: {sorted(gone)}"
    assert min(timed().values()) > SHARE
    assert TIMED.exists()
