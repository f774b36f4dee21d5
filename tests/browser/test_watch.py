"""The live page: it follows the files, gives detail where one looks, and stays small."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import metrics, run_folder

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("starlette")

from modicum.report.watch.followed import FollowedRuns  # noqa: E402
from modicum.report.watch.server import application  # noqa: E402

pytestmark = pytest.mark.slow
OpenTab = Callable[..., Any]
COUNT = "drawnCharts[0].lines[0].y.length"


@contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address of a server in a thread."""
    config = uvicorn.Config(
        application(FollowedRuns(folders)), port=0, log_level="warning", lifespan="off",
        timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()


def append(folder: Path, rows: list[dict[str, Any]]) -> None:
    with open(folder / "metrics.jsonl", "a") as handle:
        handle.writelines(json.dumps(row) + "\n" for row in rows)


def test_the_page_follows_the_run(tab: OpenTab, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", steps=20, status="running")
    with served(folder) as address:
        page = tab(address)
        assert page.value(COUNT) == 20
        page.value("state.smoothing = 0; redraw()")
        append(folder, metrics(35)[20:])
        page.wait(f"{COUNT} === 35")
        assert page.value("state.smoothing") == 0  # what the reader chose stays
        last = page.value("drawnCharts[0].lines[0].y.at(-1)")
        assert last == pytest.approx(metrics(35)[-1]["loss"])
        record = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(record | {"status": "finished"}))
        page.wait("document.querySelector('.pill').textContent === 'finished'")
        # A run that resumes forgets the steps after its checkpoint, in a new file.
        (folder / "new").write_text("".join(json.dumps(row) + "\n" for row in metrics(30)))
        (folder / "new").rename(folder / "metrics.jsonl")
        page.wait(f"{COUNT} === 30")


def test_a_long_run_is_few_points_and_every_step_is_there_when_looked_at(
    tab: OpenTab, tmp_path: Path
) -> None:
    folder = run_folder(tmp_path / "run", steps=0)
    rows = [{"step": s, "loss": 5.0 if s == 12_345 else 1.0, "tokens": 1, "seconds": 1}
            for s in range(1, 20_001)]  # fmt: skip
    append(folder, rows)
    with served(folder) as address:
        page = tab(address)
        assert page.value(COUNT) <= 2002
        assert page.value("Math.max(...drawnCharts[0].lines[0].y)") == 5.0
        page.value("look([12300, 12400])")
        page.wait(f"{COUNT} === 103")
        assert page.value("drawnCharts[0].lines[0].x.includes(12345)")
        page.value("look([3000, 3100])")  # elsewhere, of which the page has no points by then
        page.wait("drawnCharts[0].lines[0].x.includes(3050)")
        page.value("zoom(2)")
        page.wait("drawnCharts[0].lines[0].x.includes(2960)")
        page.value("document.querySelector('input[value=seconds]').click()")
        page.value("look([15000, 15100])")
        page.wait("drawnCharts[0].lines[0].x.includes(15050)")
        page.value("look(null)")
        page.wait(f"{COUNT} > 1000")
