"""The work of one row of the matrix: the same three parts in a fresh copy, under the row's change.

The demo, with its times and its memory; the forecasts of a grid of recipes; and tests of forecasts,
memory, numerics, ranks and compilation. A process in front of them tells what it finds, so that a
change without effect is a failure and not a pass.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import say
from demo import PARTS, figures_of
from matrix_environments import Environment, overlay
from matrix_host import Host
from matrix_rows import Row

TESTS = {
    "forecasts": (
        "tests/planner",
        "tests/models/test_ledger.py",
        "tests/models/test_convnet_ledger.py",
    ),
    "memory": (
        "tests/core/machine/test_memory.py",
        "tests/trainer/test_out_of_memory.py",
        "tests/trainer/test_memory.py",
    ),
    "numerics": (
        "tests/models/test_llama.py",
        "tests/linears",
        "tests/core/codecs/test_elements.py",
        "tests/adapters/test_fused.py",
        "tests/optim/test_quantized.py",
    ),
    "ranks": ("tests/core/ranks/test_ranks.py", "tests/parallel/test_launch.py"),
    "compile": ("tests/trainer/test_compile_trial.py",),
}
LIMIT_SECONDS = 1200.0  # a row that takes longer hangs
# Rows without `full_demo` do a third of its steps: its memory is that of a step.
DEMO_SHARE = 3
PROBE = """\
import json, locale, os, sys, torch
maps = open("/proc/self/maps").read() if sys.platform == "linux" else ""
print(json.dumps({
    "python": sys.version.split()[0],
    "minor": sys.version_info.minor,
    "torch": torch.__version__,
    "cuda_built": torch.backends.cuda.is_built(),
    "capability": torch.backends.cpu.get_cpu_capability(),
    "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
    "threads": torch.get_num_threads(),
    "uid": os.getuid(),
    "encoding": {"ansi_x3.4-1968": "ascii", "us-ascii": "ascii"}.get(
        locale.getpreferredencoding(False).lower(), locale.getpreferredencoding(False).lower()),
    "preloaded": "jemalloc" in maps or "tcmalloc" in maps,
}))
"""
# Ends with the matrix, however that ends.
_BUSY = "import os; p = os.getppid()\nwhile os.getppid() == p: sum(range(100_000))"


@dataclass
class Place:
    """Where a row is at work: its copy, its Python, and what stands before its commands."""

    root: Path
    copy: Path
    python: Path
    variables: Mapping[str, str]
    wrapper: list[str] = field(default_factory=list)
    deadline: float = 0.0

    def run(self, name: str, *command: str) -> dict[str, Any]:
        """Run a part; what it prints goes to a file, whose end is kept where it fails."""
        say(f"  {name}")
        start = time.monotonic()
        log = self.root / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [*self.wrapper, *command],
                cwd=self.copy,
                env=dict(self.variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = process.wait(max(0.0, self.deadline - start))
            except subprocess.TimeoutExpired:
                pass
            finally:
                _end(process)
        seconds = time.monotonic() - start
        say(f"  {name}: {'killed' if code is None else f'exit code {code}'}, {seconds:.0f} s")
        done: dict[str, Any] = {"ok": code == 0, "exit_code": code, "seconds": seconds}
        if code != 0:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
            why = (
                [f"killed: the row took longer than {LIMIT_SECONDS:.0f} s"] if code is None else []
            )
            done["problem"] = [*why, *lines[-12:]]
        return done


def work(row: Row, host: Host, environment: Environment, logs: Path) -> dict[str, Any]:
    """Do a row's work in a fresh copy; the parts, what was found, and whether all is well."""
    with _place(row, host, environment) as place:
        try:
            return _parts(row, host, place)
        finally:
            kept = logs / row.name
            shutil.rmtree(kept, ignore_errors=True)
            kept.mkdir(parents=True)
            for log in place.root.glob("*.log"):
                shutil.copy(log, kept)


def _parts(row: Row, host: Host, place: Place) -> dict[str, Any]:
    python, out = str(place.python), place.root / "out"
    with _busy(len(host.cores) if row.busy else 0):
        parts = {"found": _found(place, row, host)}
        parts["demo"] = _demo(place, out / "runs", row.full_demo)
        parts["prediction"] = _prediction(place, out / "prediction.json")
        report = out / "tests.xml"
        options = [
            "-q",
            "-n",
            "2",
            "--dist=worksteal",
            "--sample=matrix",
            "--in-process",  # what few commands need of the machine, they measure
            "-p",
            "no:cacheprovider",
        ]
        files = [path for paths in TESTS.values() for path in paths]
        command = [python, "-m", "pytest", *options, f"--junitxml={report}", *files]
        parts["tests"] = place.run("tests", *command)
        parts["tests"] |= counts(report) if report.exists() else {}
    return {"ok": all(part.get("ok", True) for part in parts.values()), "parts": parts}


def _found(place: Place, row: Row, host: Host) -> dict[str, Any]:
    done = place.run("found", str(place.python), "-W", "ignore", "-c", PROBE)
    if not done["ok"]:
        return done
    found = json.loads((place.root / "found.log").read_text(encoding="utf-8").splitlines()[-1])
    other = {
        key: f"{found[key]}, not {value}"
        for key, value in row.expected(host).items()
        if found[key] != value
    }
    return {**found, "ok": not other} | ({"problem": other} if other else {})


def _demo(place: Place, runs: Path, full: bool) -> dict[str, Any]:
    modicum = str(place.python.with_name("modicum"))
    done = place.run("demo", modicum, "demo", "--runs", str(runs), "--progress", "lines")
    ended = [name for name in PARTS if _finished(runs / name / "run.json")]
    done["parts"] = {name: figures_of(runs / name) for name in ended}
    done["share"] = 1.0 if full else 1 / DEMO_SHARE
    done["ok"] = done["ok"] and len(ended) == len(PARTS)
    return done


def _finished(record: Path) -> bool:
    if not record.exists():
        return False
    status = json.loads(record.read_text(encoding="utf-8"))["status"]
    return bool(status == "finished")


def _prediction(place: Place, output: Path) -> dict[str, Any]:
    script = place.copy / "benchmarks" / "prediction.py"
    if '"--quick"' not in script.read_text(encoding="utf-8"):
        return {"missing": "benchmarks/prediction.py has no --quick"}
    words = ["benchmarks/prediction.py", "--quick", "--output", str(output)]
    done = place.run("prediction", str(place.python), *words)
    if output.exists():
        result = json.loads(output.read_text(encoding="utf-8"))
        done["largest_error"] = result.get("largest_error")
        done["recipes"] = len(result.get("rows", ()))
    return done


def counts(report: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and which failed, by pytest's XML."""
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "failures": []}
    for case in ElementTree.parse(report).iter("testcase"):
        told = {child.tag for child in case}
        if told & {"failure", "error"}:
            found["failed"] += 1
            found["failures"].append(f"{case.get('classname')}::{case.get('name')}")
        else:
            found["skipped" if "skipped" in told else "passed"] += 1
    return found


@contextmanager
def _place(row: Row, host: Host, environment: Environment) -> Iterator[Place]:
    """The row's copy with its environment, home and folder for temporary files; all is removed.

    A short path, as sockets in it are limited to a hundred bytes.
    """
    with tempfile.TemporaryDirectory(prefix="modicum-matrix-") as temporary:
        root = Path(temporary)
        for name in ("home", "tmp", "out"):
            (root / name).mkdir()
        copy = root / row.folder
        copy_tracked(environment.checkout, copy)
        if not row.bare:
            subprocess.run(["git", "init", "--quiet", str(copy)], check=True)
            subprocess.run(["git", "-C", str(copy), "add", "--all"], check=True)
        if not row.full_demo:
            shorten(copy / "recipes")
        python = overlay(environment, copy, root / "venv")
        own_home = row.bare or row.user is not None
        variables = {
            "HOME": str(root / "home") if own_home else str(Path.home()),
            "LANG": "C.UTF-8",
            "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(root / "tmp"),
        } | row.set_variables(host)
        if row.user is not None:
            _give(root, row.user)
        wrapper, deadline = row.wrapper(host), time.monotonic() + LIMIT_SECONDS
        yield Place(root, copy, python, variables, wrapper, deadline)


def copy_tracked(checkout: Path, target: Path) -> None:
    """Copy the files that git tracks as they are now, without what was removed."""
    for name in tracked(checkout):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, target / name)


def tracked(checkout: Path) -> list[str]:
    """The files that git tracks and that are there, sorted."""
    command = ["git", "-C", str(checkout), "ls-files", "-z"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(name for name in done.stdout.split("\0") if (checkout / name).is_file())


def shorten(recipes: Path) -> None:
    """Leave the demo's recipes a share of their steps."""
    for name in PARTS:
        path = recipes / f"{name}.yaml"
        text = path.read_text(encoding="utf-8")
        fewer = re.sub(
            r"(?m)^(  steps: )(\d+)$", lambda m: f"{m[1]}{int(m[2]) // DEMO_SHARE}", text
        )
        path.write_text(fewer, encoding="utf-8")


def _give(root: Path, user: int) -> None:
    for path in (root, *root.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but compute, while the block runs."""
    processes = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command: its process group, and whoever else is of its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # After the name, which may hold anything: state, parent, group, session.
            session = status.read_text(errors="replace").rpartition(")")[2].split()[3]
            if int(session) == process.pid:
                os.kill(int(status.parent.name), signal.SIGKILL)
