"""How long tests took, where they were timed: what the sample is drawn by.

A test is drawn so often that it costs a sample `SHARE` seconds on average. So the time of
`make test` grows with the number of tests and not with the longest ones. The seconds are those of
one machine: they say which tests are long, not how long they are elsewhere.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TIMED = Path(__file__).parent / "seconds.json"
SHARE = 0.4  # seconds


@cache
def timed(file: Path = TIMED) -> dict[str, float]:
    """Seconds of the tests that take more than `SHARE`, by their node ids."""
    seconds: dict[str, float] = json.loads(file.read_text()) if file.exists() else {}
    return seconds


def drawn_once_in(nodeid: str) -> float:
    """In how many samples a test is once, by its seconds; 1.0: in each."""
    return max(1.0, timed().get(nodeid, 0.0) / SHARE)


class SecondsNoted:
    """A plugin that writes the seconds of the tests of a session next to those of earlier ones.

    Args:
        file: where they stand. A test that ran has its new seconds; others keep theirs as long as
            their file is there.
        root: the folder that node ids are relative to.
    """

    def __init__(self, file: Path, root: Path) -> None:
        self.file = file
        self.root = root
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration  # of set-up, call and tear-down

    def pytest_sessionfinish(self) -> None:
        before = timed.__wrapped__(self.file)
        kept = {test: s for test, s in before.items() if (self.root / test.split("::")[0]).exists()}
        merged = kept | {test: round(s, 1) for test, s in self.seconds.items()}
        longest = {test: merged[test] for test in sorted(merged) if merged[test] > SHARE}
        self.file.write_text(json.dumps(longest, indent=0, ensure_ascii=False) + "\n")
