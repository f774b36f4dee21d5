"""What comes of the matrix's rows: which of them still hold, the figures, the table, the README."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matrix_rows import Row
from matrix_work import TESTS, tracked

from modicum.core.units import format_bytes, format_duration

BEGIN, END = "<!-- machines:begin -->", "<!-- machines:end -->"
HEADERS = ("Row", "Result", "Time", "Demo", "Tensors", "Process", "Forecasts", "Tests", "Remark")
_FOLDERS = ("src/", "recipes/", "benchmarks/matrix_work.py", "benchmarks/prediction")
_FILES = ("benchmarks/demo.py", "benchmarks/common.py", "constraints.txt")
# Of proofs a row's tests use the contracts' subjects alone.
_NOT_RUN, _SUBJECTS = "src/modicum/proofs/", "src/modicum/proofs/contracts/"
_TESTS = tuple(path for paths in TESTS.values() for path in paths)
Outcome = dict[str, Any]


def sources(checkout: Path) -> str:
    """A digest of all that a row runs: code, recipes, its tests and what those stand on."""
    digest = hashlib.sha256()
    for name in tracked(checkout):
        if name.startswith(_NOT_RUN) and not name.startswith(_SUBJECTS):
            continue
        stands_under = name.startswith("tests/") and (
            name.count("/") == 1 or name.endswith("/conftest.py")
        )
        if name.startswith(_FOLDERS + _TESTS) or name in _FILES or stands_under:
            digest.update(f"{name}\0".encode() + (checkout / name).read_bytes() + b"\0")
    with open(checkout / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)
    used = [project["project"], project["tool"]["pytest"]]
    digest.update(json.dumps(used, sort_keys=True).encode())
    return digest.hexdigest()


def digest_of(row: Row, *others: str) -> str:
    """What a row's outcome depends on: itself, its environment, the sources, the machine."""
    return hashlib.sha256("\0".join([repr(row), *others]).encode()).hexdigest()[:16]


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """The rows of an earlier matrix.json by name; none where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {outcome["name"]: outcome for outcome in content["rows"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures of all rows together, and the rows."""
    run = [outcome for outcome in outcomes if "ok" in outcome]
    passed = sum(outcome["ok"] for outcome in run)
    default = next((_part(outcome, "demo") for outcome in run if outcome["name"] == "default"), {})
    return {
        "rows_run": len(run),
        "rows_passed": passed,
        "share_passed": passed / len(run) if run else 0.0,
        "largest_error": {kind: _largest_error(run, kind) for kind in ("tensors", "process")},
        "default_wheel": {
            "demo_ok": bool(default.get("ok")),
            "seconds": default.get("seconds"),
            "exit_code": default.get("exit_code"),
        },
        "rows": list(outcomes),
    }


def _largest_error(run: Iterable[Outcome], kind: str) -> float | None:
    errors = [
        (_part(outcome, "prediction").get("largest_error") or {}).get(kind) for outcome in run
    ]
    return max((error for error in errors if error is not None), default=None)


def _part(outcome: Outcome, name: str) -> dict[str, Any]:
    part: dict[str, Any] = outcome.get("parts", {}).get(name, {})
    return part


def cells(outcome: Outcome) -> tuple[str, ...]:
    """An outcome as a row under `HEADERS`; memory is the demo's: predicted, then measured."""
    if "not_run" in outcome:
        return (outcome["name"], "not run here", *[""] * 6, outcome["not_run"])
    demo, tests = _part(outcome, "demo"), _part(outcome, "tests")
    parts = list(demo.get("parts", {}).values())

    def pairs(predicted: str, measured: str) -> str:
        sizes = [(part["peak_bytes"][predicted], part["peak_bytes"][measured]) for part in parts]
        return "; ".join(" / ".join(map(format_bytes, pair)) for pair in sizes)

    prediction = _part(outcome, "prediction")
    error = prediction.get("largest_error") or {}
    counted = [f"{tests[key]} {key}" for key in ("passed", "failed", "skipped") if tests.get(key)]
    return (
        outcome["name"],
        "passed" if outcome["ok"] else "FAILED",
        format_duration(outcome["seconds"]),
        format_duration(demo["seconds"]) if demo else "",
        pairs("predicted", "measured"),
        pairs("process_predicted", "process"),
        ", ".join(f"{kind} {value:.1%}" for kind, value in error.items())
        or ("missing" if "missing" in prediction else ""),
        ", ".join(counted),
        remark(outcome),
    )


def remark(outcome: Outcome) -> str:
    """What went wrong in a row, in a line; nothing where nothing did."""
    told = [outcome["problem"]] if "problem" in outcome else []
    for name, part in outcome.get("parts", {}).items():
        if not part.get("ok", True):
            problem = part.get("failures") or part.get("problem") or "failed"
            told.append(f"{name}: {_gist(problem)}")
    return "; ".join(told)


def _gist(problem: str | Mapping[str, str] | Sequence[str]) -> str:
    """A line for a problem: modicum's own words where it said some, else the last."""
    if isinstance(problem, str):
        return problem
    if isinstance(problem, Mapping):
        return ", ".join(f"{name} is {found}" for name, found in problem.items())
    own = [line for line in problem if line.startswith(("modicum: ", "killed: "))]
    return own[0] if own else problem[-1]


def machines(result: Mapping[str, Any]) -> str:
    """README's lines on machines: what ran and passed, what failed, what was not run."""
    outcomes = result.get("rows", ())
    passed = [outcome["claim"] for outcome in outcomes if outcome.get("ok")]
    if not passed:
        return ""
    failed = [outcome["claim"] for outcome in outcomes if outcome.get("ok") is False]
    not_run = [f"{o['claim']} ({o['not_run']})" for o in outcomes if "not_run" in o]
    machine = result["machine"]
    where = f"{result['system']} ({machine['processor']}, {_cores(result['cores'])})"
    ran = len(passed) + len(failed)
    text = (
        f"Tested on {where}, {result['when'][:10]}: the demo and a part of the tests pass in "
        f"{len(passed)} of {ran} settings. `make matrix` runs this on your machine.\n\n"
        "<details><summary>The settings</summary>\n\n"
    )
    for words, names in (("passes", passed), ("fails", failed), ("not run", not_run)):
        text += "".join(f"- {words}: {name}\n" for name in names)
    return text + "\n</details>\n"


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"
