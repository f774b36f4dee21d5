"""How long tests took, where they were timed: what the sample is drawn by.

A test is drawn so often that it costs a sample `SHARE` seconds on average. So the time of
`make test` grows with the number of tests and not with the longest ones. Tests of one function
count alike, by their mean, so those that were never run are drawn as rarely as the others. The
seconds are those of one machine: they say which tests are long, not how long they are elsewhere.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TIMED = Path(__file__).parent / "seconds.json"
SHARE = 0.1  # seconds


@cache
def timed(file: Path = TIMED) -> dict[str, float]:
    """Mean seconds of the tests of a function, of functions whose tests take more than `SHARE`."""
    seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return seconds


def function_of(nodeid: str) -> str:
    """A test's function, without its parameters.

    >>> function_of("tests/test_one.py::test_two[of-these]")
    'tests/test_one.py::test_two'
    """
    return nodeid.split("[")[0]


def drawn_once_in(nodeid: str) -> float:
    """In how many samples a test is once, by its seconds; 1.0: in each."""
    return max(1.0, timed().get(function_of(nodeid), 0.0) / SHARE)


class SecondsNoted:
    """A plugin that writes the seconds of the tests of a session next to those of earlier ones.

    Args:
        file: where they stand. A function of which tests ran has their mean; others keep theirs as
            long as their file is there.
        root: the folder that node ids are relative to.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self.file = file
        self.root = root
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Of set-up, call and tear-down.
        self.seconds[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = timed.__wrapped__(self.file)
        kept = {test: s for test, s in before.items() if (self.root / test.split("::")[0]).exists()}
        means = {each: sum(s.values()) / len(s) for each, s in self.seconds.items()}
        merged = kept | {each: round(mean, 2) for each, mean in means.items()}
        longest = {each: merged[each] for each in sorted(merged) if merged[each] > SHARE}
        self.file.write_text(json.dumps(longest, indent=0, ensure_ascii=False) + "\n")
