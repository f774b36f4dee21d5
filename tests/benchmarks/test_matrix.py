"""The matrix: which rows hold still, and what is made of them. No row is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Ran:
    """A stand-in for a row's work, that remembers which rows it did."""

    def __init__(self, fails: str = "", dies: str = "") -> None:
        self.names: list[str] = []
        self.kept: list[list[dict[str, Any]]] = []
        self.fails, self.dies = fails, dies

    def do(self, row: Any) -> dict[str, Any]:
        if row.name == self.dies:
            raise KeyboardInterrupt
        self.names.append(row.name)
        return {"ok": row.name != self.fails, "parts": {}}

    def matrix(
        self,
        matrix: Any,
        known: dict[str, Any],
        *,
        digest: str = "same",
        only: tuple[str, ...] = (),
        again: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        host = matrix.machine(allocator=None)
        every = matrix.rows.rows(host)
        todo = [row for row in every if not only or row.name in only]
        digests = {row.name: digest for row in every}
        outcomes = matrix.main.run(
            every, todo, host, digests, known, again, self.do, self.kept.append
        )
        return {outcome["name"]: outcome for outcome in outcomes}


def test_rows_are_done_again_when_they_failed_or_changed_or_are_asked_for(matrix: Any) -> None:
    first = Ran(fails="avx2")
    known = first.matrix(matrix, {})
    assert len(first.names) == 19
    assert "allocator" not in first.names
    assert known["allocator"]["not_run"] == "neither jemalloc nor tcmalloc is installed"
    second = Ran()
    known = second.matrix(matrix, known)
    assert second.names == ["avx2"]
    third = Ran()
    third.matrix(matrix, known, only=("busy", "path"), again=("busy",))
    assert third.names == ["busy"]
    fourth = Ran()
    assert set(fourth.matrix(matrix, known, digest="another", only=("path",))) == {
        "path",
        "allocator",
    }
    assert fourth.names == ["path"]


def test_a_matrix_that_was_killed_resumes_at_the_next_row(matrix: Any) -> None:
    killed = Ran(dies="avx512")
    with pytest.raises(KeyboardInterrupt):
        killed.matrix(matrix, {})
    known = {outcome["name"]: outcome for outcome in killed.kept[-1]}
    assert {name for name, outcome in known.items() if outcome.get("ok")} == set(killed.names)
    resumed = Ran()
    assert len(resumed.matrix(matrix, known)) == 20
    assert not set(resumed.names) & set(killed.names)
    assert resumed.names[0] == "avx512"


def test_a_row_s_digest_follows_its_sources_and_its_definition(matrix: Any, tmp_path: Path) -> None:
    def sources() -> str:
        digest: str = matrix.results.sources(tmp_path)
        return digest

    files = {
        "pyproject.toml": "[project]\nname = 'x'\n[tool.pytest]\n[tool.ruff]\n",
        "constraints.txt": "torch==2\n",
        "src/x.py": "1\n",
        "src/modicum/proofs/optim/x.py": "1\n",
        "src/modicum/proofs/contracts/x.py": "1\n",
        "tests/pool.py": "2\n",
        "tests/planner/test_plan.py": "3\n",
        "tests/report/test_report.py": "4\n",
        "README.md": "5\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "--all"], check=True)
    (tmp_path / "src/untracked.py").write_text("6\n")
    before = sources()
    for name in files:
        kept = (tmp_path / name).read_text()
        (tmp_path / name).write_text(kept + "# more\n")
        not_run = ("README.md", "tests/report", "pyproject.toml", "src/modicum/proofs/optim")
        counts = not name.startswith(not_run)
        assert (sources() != before) == counts, name
        (tmp_path / name).write_text(kept)
    assert sources() == before
    copy = tmp_path / "copy"
    matrix.work.copy_tracked(tmp_path, copy)
    assert sorted(str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()) == sorted(files)
    host = matrix.machine()
    digests = {matrix.results.digest_of(row, before) for row in matrix.rows.rows(host)}
    assert len(digests) == 20


def place(matrix: Any, folder: Path, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    return matrix.work.Place(folder, folder, Path(sys.executable), dict(os.environ), [], deadline)


def test_a_part_that_hangs_is_killed_with_all_that_it_started(matrix: Any, tmp_path: Path) -> None:
    started = tmp_path / "started"
    # The child leaves the group, not the session.
    script = f"sleep 600 & echo $! > {started}; set -m; sleep 600 & echo $! >> {started}; wait"
    done = place(matrix, tmp_path, 2.0).run("part", "bash", "-c", script)
    assert not done["ok"]
    assert done["exit_code"] is None
    assert "killed" in done["problem"][0]
    pids = started.read_text().split()
    assert len(pids) == 2
    end = time.monotonic() + 20
    while any(_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.02)
    assert not any(_alive(pid) for pid in pids)


def _alive(pid: str) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_part_that_fails_is_told_by_its_last_lines(matrix: Any, tmp_path: Path) -> None:
    done = place(matrix, tmp_path, 60.0).run("part", "sh", "-c", "echo why; exit 3")
    assert (done["ok"], done["exit_code"], done["problem"]) == (False, 3, ["why"])


def test_pytest_s_report_is_counted(matrix: Any, tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/>'
        '<testcase classname="a" name="c"><failure/></testcase>'
        '<testcase classname="a" name="d"><error/></testcase>'
        '<testcase classname="a" name="e"><skipped/></testcase></testsuite></testsuites>'
    )
    assert matrix.work.counts(report) == {
        "passed": 1,
        "failed": 2,
        "skipped": 1,
        "failures": ["a::c", "a::d"],
    }


def test_the_demo_of_most_rows_is_a_third(matrix: Any, tmp_path: Path) -> None:
    for name in matrix.work.PARTS:
        text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    matrix.work.shorten(tmp_path)
    assert "\n  steps: 110\n" in (tmp_path / "demo-pretrain.yaml").read_text(encoding="utf-8")
    assert "\n  steps: 50\n" in (tmp_path / "demo-adapt.yaml").read_text(encoding="utf-8")


def outcome(name: str, ok: bool, error: float) -> dict[str, Any]:
    peak = {"predicted": 10**8, "measured": 9 * 10**7, "process_predicted": 2, "process": 1}
    return {
        "name": name,
        "claim": f"the claim of {name}",
        "ok": ok,
        "seconds": 100.0,
        "parts": {
            "demo": {
                "ok": True,
                "exit_code": 0,
                "seconds": 60.0,
                "parts": {"a": {"peak_bytes": peak}},
            },
            "prediction": {"ok": True, "largest_error": {"tensors": error, "process": 2 * error}},
            "tests": {"ok": ok, "passed": 7, "failed": 0 if ok else 1, "failures": ["t::one"]},
        },
    }


def test_figures_table_and_readme_claim_what_ran_and_passed(matrix: Any) -> None:
    not_run = {"name": "c", "claim": "the claim of c", "not_run": "not here"}
    outcomes = [outcome("default", True, 0.01), outcome("b", False, 0.04), not_run]
    figures = matrix.results.figures(outcomes)
    assert (figures["rows_run"], figures["rows_passed"], figures["share_passed"]) == (2, 1, 0.5)
    assert figures["largest_error"] == {"tensors": 0.04, "process": 0.08}
    assert figures["default_wheel"] == {"demo_ok": True, "seconds": 60.0, "exit_code": 0}
    lines = [matrix.results.cells(one) for one in outcomes]
    assert {len(line) for line in lines} == {len(matrix.results.HEADERS)}
    assert lines[0][1] == "passed"
    assert lines[1][1] == "FAILED"
    assert lines[1][-1] == "tests: t::one"
    assert lines[2][1] == "not run here"
    result = figures | {
        "system": "Linux x86-64",
        "cores": 2,
        "when": "2030-01-02T03:04:05",
        "machine": {"processor": "P"},
    }
    assert matrix.results.machines(result) == (
        "Tested on Linux x86-64 (P, 2 cores), 2030-01-02: the demo and a part of the tests pass"
        " in 1 of 2 settings. `make matrix` runs this on your machine.\n\n"
        "<details><summary>The settings</summary>\n\n"
        "- passes: the claim of default\n"
        "- fails: the claim of b\n"
        "- not run: the claim of c (not here)\n"
        "\n</details>\n"
    )
    unfit = {"demo": {"ok": False, "problem": ["modicum: too large", "modicum: exit code 3"]}}
    assert matrix.results.remark({"parts": unfit}) == "demo: modicum: too large"
    nothing = matrix.results.figures([not_run])
    assert nothing["share_passed"] == 0.0
    assert matrix.results.machines(nothing) == ""


def test_readme_says_what_the_last_matrix_found(matrix: Any) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    begin, end = matrix.results.BEGIN, matrix.results.END
    assert begin in text
    path = ROOT / "benchmarks" / "results" / "matrix.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    renewed = matrix.main.between(text, begin, end, matrix.results.machines(found))
    assert renewed == text, "run `make matrix`"
