"""The report's page in Chromium: which checks of tests/browser pass, and a million steps on it.

Of a run of a million steps, watched live, the figures are: seconds until the page is drawn, its
points, and the longest that it keeps the browser busy while it is read with the pointer, zoomed,
and followed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

from common import say, write_result

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.browser.chromium import Chromium, Tab
from tests.report.conftest import metrics, run_folder

CHECKS = Path(__file__).resolve().parents[1] / "tests" / "browser"
STEPS, BLOCK = 1_000_000, 1000
# Every task of the page that takes longer than 50 ms is noted, which is what browsers call long.
_NOTE = """window.long = [];
new PerformanceObserver(list => list.getEntries().forEach(entry => long.push(entry.duration)))
    .observe({entryTypes: ["longtask"]}); true"""


def checks() -> tuple[list[str], list[str]]:
    """Names of the checks that pass, and of the others."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n0", f"--junitxml={report}", str(CHECKS)]
        subprocess.run(command, stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter("testcase"))
    if not cases:
        sys.exit("no check ran")
    passed = [str(case.get("name")) for case in cases if len(case) == 0]
    return passed, [str(case.get("name")) for case in cases if len(case) > 0]


def long_run(folder: Path) -> Path:
    """A run of a million steps that is training."""
    run_folder(folder, steps=0, status="running")
    rows = metrics(BLOCK)
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as handle:
        for first in range(0, STEPS, BLOCK):
            block = (json.dumps(row | {"step": first + row["step"]}) for row in rows)
            handle.writelines(line + "\n" for line in block)
    return folder


@contextmanager
def watched(folder: Path) -> Iterator[str]:
    """The address of `modicum watch` in a process of its own."""
    command = [sys.executable, "-m", "modicum", "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield next(word for word in process.stdout.readline().split() if "://" in word)
        finally:
            process.terminate()


def longest(page: Tab) -> float:
    """The longest task since it was last asked, in seconds; none is longer than 50 ms: 0."""
    page.frame()
    found = page.value("(() => { const all = long; long = []; return all; })()")
    return max(found, default=0.0) / 1000


def million(place: Path) -> dict[str, Any]:
    """Figures of a run of a million steps."""
    folder = long_run(place / "million")
    megabytes = (folder / "metrics.jsonl").stat().st_size / 1e6
    found: dict[str, Any] = {"steps": STEPS, "megabytes": round(megabytes)}
    with watched(folder) as address, Chromium.started(place / "profile") as browser:
        begun = time.perf_counter()
        page = Tab(browser, address)
        found["seconds_until_drawn"] = time.perf_counter() - begun
        found["points_of_loss"] = page.value("drawnCharts[0].lines[0].y.length")
        page.value(_NOTE)
        box = page.value("""(() => {
            const box = drawnCharts[0].plot.over.getBoundingClientRect();
            return [box.left, box.top + box.height / 2, box.width];
        })()""")
        frames = []
        for part in range(1, 60):
            begun = time.perf_counter()
            page.pointer("mouseMoved", box[0] + box[2] * part / 60, box[1])
            page.frame()
            frames.append(time.perf_counter() - begun)
        found["pointer"] = {"longest": longest(page), "median_frame": median(frames)}
        answers = []
        for part in range(1, 11):
            begun = time.perf_counter()
            low = 90_000 * part
            page.value(f"look([{low}, {low + 1500}])")
            page.wait(f"drawnCharts[0].lines[0].x.includes({low + 777})")
            answers.append(time.perf_counter() - begun)
        found["zoom"] = {"longest": longest(page), "median_until_every_step": median(answers)}
        page.value("look(null)")
        followed = []
        for number in range(5):
            row = metrics(1)[0] | {"step": STEPS + 1 + number}
            begun = time.perf_counter()
            with open(folder / "metrics.jsonl", "a", encoding="utf-8") as handle:
                handle.write(json.dumps(row) + "\n")
            page.wait(f"payload.runs[0].end.step === {row['step']}")
            followed.append(time.perf_counter() - begun)
        found["follow"] = {"longest": longest(page), "median_until_shown": median(followed)}
        assert page.complaints() == []
    found["longest"] = max(found[name]["longest"] for name in ("pointer", "zoom", "follow"))
    say(json.dumps(found))
    return found


def main() -> None:
    """Run the checks and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    passed, others = checks()
    say(f"{len(passed)} passed, {len(others)} did not")
    figures: dict[str, Any] = {"passed": len(passed), "not_passed": len(others)}
    # The browser's helpers may still write into its profile when it has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        figures["million"] = million(Path(name))
    write_result("browser", figures | {"checks": [*passed, *others]}, {})


if __name__ == "__main__":
    main()
