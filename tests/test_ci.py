"""`.ci/run`, with a `make` that does nothing but speak."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SUM = {
    "test": "=== 20 passed, 2 skipped, 7 deselected in 3.21s ===",
    "test-more": "=== 5 passed in 12.00s (0:00:12) ===",
    "test-avx2": "=== 300 passed in 1.00s ===",
}
pytestmark = pytest.mark.skipif(shutil.which("timeout") is None, reason="no timeout(1) here")


def ci(folder: Path, limit: str | None = "1", **acts: str) -> tuple[int, list[str]]:
    """Exit status and lines of a run in which each stage does what `acts` says, in shell.

    Args:
        limit: the demo's, in seconds; None: the default.
    """
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    cases = {name: f'echo "{line}"' for name, line in SUM.items()}
    cases |= {name.replace("_", "-"): act for name, act in acts.items()}
    make = folder / "bin/make"
    make.parent.mkdir(exist_ok=True)
    arms = "\n".join(f"{name}) {act};;" for name, act in cases.items())
    make.write_text(f'#!/bin/bash\ncase "$1" in\n{arms}\nesac\n')
    make.chmod(0o755)
    path = f"{make.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    environment.pop("DEMO_LIMIT", None)
    if limit is not None:
        environment["DEMO_LIMIT"] = limit
    done = subprocess.run(
        ["bash", ".ci/run"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def test_every_stage_is_in_the_makefile_and_the_last_line_is_the_sum(tmp_path: Path) -> None:
    status, lines = ci(tmp_path)
    assert status == 0
    assert lines[-1] == "25 passed, 2 skipped"
    stages = [line.removeprefix("== make ") for line in lines if line.startswith("== make ")]
    assert {"demo", "test", "test-avx2", "test-more"} < set(stages)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{stage}: " in makefile for stage in stages)


def test_making_the_documentation_runs_every_test_that_needs_its_tools() -> None:
    asking = re.compile(
        r"^def (test_\w+)(?:(?!^def ).)*?importorskip\(.mkdocs", re.DOTALL | re.MULTILINE
    )
    files = (ROOT / "tests").rglob("test_*.py")
    texts = {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in files}
    found = {
        f"{file.as_posix()}::{name}"
        for file, text in texts.items()
        if "mkdocs" in text
        for name in asking.findall(text)
    }
    [named] = re.findall(
        r"^PAGE_TESTS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert set(named.replace("\\", "").split()) == found


def test_a_stage_that_fails_ends_it_with_its_status(tmp_path: Path) -> None:
    line = "=== 1 failed, 19 passed in 3.21s ==="
    status, lines = ci(tmp_path, test=f'echo "{line}"; exit 2')
    assert status == 2
    assert lines[-2:] == ["make test failed with status 2", line]
    assert "== make test-more" not in lines


def test_a_demo_that_takes_too_long_is_stopped_and_that_is_said(tmp_path: Path) -> None:
    status, lines = ci(tmp_path, demo="sleep 60")
    assert status == 124
    assert "make demo was stopped after 1 s; DEMO_LIMIT=SECONDS allows more" in lines
    assert lines[-1] == "0 passed, 1 failed"


def test_by_default_a_demo_on_a_machine_twice_slower_is_not_stopped(tmp_path: Path) -> None:
    timeout = tmp_path / "bin/timeout"
    timeout.parent.mkdir()
    timeout.write_text('#!/bin/bash\necho "limit $2"\nexec "${@:3}"\n')
    timeout.chmod(0o755)
    status, lines = ci(tmp_path, limit=None)
    assert status == 0
    assert [line for line in lines if line.startswith("limit ")] == ["limit 600"]


@pytest.mark.parametrize(("test", "seconds", "drawn"), [("true", 3600, 2), ("sleep 2", 1, 32)])
def test_what_is_drawn_of_the_rest_is_less_on_a_slower_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: str, seconds: int, drawn: int
) -> None:
    monkeypatch.setenv("ALL_SECONDS", str(seconds))
    line = SUM["test"]
    more = f'echo "ONE_IN is $ONE_IN"; echo "{SUM["test-more"]}"'
    status, lines = ci(tmp_path, test=f'{test}; echo "{line}"', test_more=more)
    assert status == 0
    assert f"ONE_IN is {drawn}" in lines


def test_without_chromium_one_line_says_what_is_not_run(tmp_path: Path) -> None:
    for name in ("bash", "id"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    done = subprocess.run(
        [str(tmp_path / "bash"), str(ROOT / "scripts/find_chromium.sh")],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (1, "", 1)
    assert done.stdout.startswith("test-browser: not run, as Chromium is not installed")
