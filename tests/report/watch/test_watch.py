"""The server behind `modicum watch`: what it answers, whom it refuses, that it only reads."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import metrics

from modicum.core.errors import InputError
from modicum.report.watch import FollowedRuns, watch
from modicum.report.watch.server import application

MakeRun = Callable[..., Path]


@pytest.fixture
def folder(make_run: MakeRun) -> Path:
    return make_run(steps=5, status="running")


@pytest.fixture
def ask(folder: Path) -> Iterator[Callable[..., http.client.HTTPResponse]]:
    """Asks a running server for a path, by a host's name."""
    uvicorn = pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    config = uvicorn.Config(
        application(FollowedRuns([folder])), port=0, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    def answer(path: str, host: str | None = None, method: str = "GET") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request(method, path, headers={"Host": host or f"localhost:{port}"})
        response = connection.getresponse()
        response.text = response.read().decode()  # type: ignore[attr-defined]
        connection.close()
        return response

    yield answer
    server.should_exit = True
    thread.join()


def state(folder: Path) -> dict[str, Any]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_it_answers_by_page_and_curves_and_writes_nothing(ask: Any, folder: Path) -> None:
    before = state(folder)
    page = ask("/")
    assert page.status == 200
    assert "connect-src &#39;self&#39;" in page.text
    assert page.getheader("cache-control") == "no-store"
    first = json.loads(ask("/curves").text)
    assert first["runs"][0]["metrics"]["loss"]["step"] == [1, 2, 3, 4, 5]
    assert ask(f"/curves?version={http_quoted(first['version'])}").status == 204
    some = json.loads(ask("/curves?low=3&high=3").text)
    assert some["runs"][0]["metrics"]["loss"]["step"] == [2, 3, 4]
    strange = json.loads(ask("/curves?low=x&high=nan").text)
    assert strange["runs"] == first["runs"]
    assert state(folder) == before


def http_quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text)


def test_other_names_methods_and_paths_are_refused(ask: Any) -> None:
    assert ask("/", host="evil.example").status == 421
    assert "demo" not in ask("/", host="evil.example:80").text
    assert ask("/", host="[").status == 421
    assert ask("/", method="POST").status == 405
    assert ask("/run.json").status == 404
    assert ask("/../run.json").status == 404


def test_it_follows_rows_and_a_run_that_resumes(folder: Path) -> None:
    runs = FollowedRuns([folder])

    def steps() -> list[int]:
        deadline = time.monotonic() + 20
        while (found := runs.curves())[0] != runs.version():
            assert time.monotonic() < deadline
        return list(json.loads(found[1])["runs"][0]["metrics"]["loss"]["step"])

    assert steps() == [1, 2, 3, 4, 5]
    with open(folder / "metrics.jsonl", "a") as handle:
        handle.write(json.dumps(metrics(6)[5]) + '\n{"step": 7')
    assert steps() == [1, 2, 3, 4, 5, 6]
    (folder / "new").write_text("".join(json.dumps(row) + "\n" for row in metrics(3)))
    (folder / "new").rename(folder / "metrics.jsonl")
    assert steps() == [1, 2, 3]


def test_new_rows_of_a_long_run_do_not_wait_for_the_old_ones(make_run: MakeRun) -> None:
    folder = make_run(steps=200_000)
    runs = FollowedRuns([folder])
    began = time.perf_counter()
    runs.version()
    read = time.perf_counter() - began  # all rows, once
    made = []
    for step in range(200_001, 200_005):
        with open(folder / "metrics.jsonl", "a") as handle:
            handle.write(json.dumps(metrics(1)[0] | {"step": step}) + "\n")
        began = time.perf_counter()
        found = runs.curves(high=step)  # another stretch, of which no answer is kept
        made.append(time.perf_counter() - began)
        assert json.loads(found[1])["runs"][0]["metrics"]["loss"]["step"][-1] == step
    assert min(made) < read / 10


def test_what_cannot_be_listened_at_or_watched_is_said(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("starlette")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port} of 127.0.0.1 is taken"):
            watch([folder], port=port)
    with pytest.raises(InputError, match="holds no run"):
        watch([tmp_path])
