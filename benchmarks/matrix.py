"""Does modicum work on machines that it was not made on? As far as one machine can tell.

Each row does the same work with one thing changed: another Python or PyTorch, fewer instructions,
fewer cores, another user, another place. A row is done again when what it runs has changed, or when
it failed; so a matrix that was killed resumes where it was.

    python benchmarks/matrix.py [--list] [--again] [--only ROW ...] [--cache FOLDER]
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common import HERE, RESULTS, alone, say, write_result
from matrix_environments import Environment, NotMade
from matrix_host import Host, this_host
from matrix_results import (
    BEGIN,
    END,
    HEADERS,
    Outcome,
    cells,
    digest_of,
    figures,
    machines,
    read_outcomes,
    remark,
    sources,
)
from matrix_rows import Row, rows
from matrix_work import DEMO_SHARE, LIMIT_SECONDS, TESTS, work

from modicum.cli.readme import between
from modicum.cli.tables import table
from modicum.core.errors import FoundWanting
from modicum.core.files import write_text
from modicum.core.units import format_duration

CHECKOUT = HERE.parent
CACHE = Path.home() / ".cache" / "modicum" / "matrix"


def main() -> None:
    """Run the rows, keep each outcome at once, print the table."""
    arguments = _arguments()
    # Asked to end, it ends like after Ctrl-C: the row's processes with it.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    host = this_host(arguments.cache)
    every = rows(host)
    if arguments.list:
        table(
            ("Row", "Changes", "Not run here"), [(r.name, r.claim, r.why_not(host)) for r in every]
        )
        return
    unknown = set(arguments.only) - {row.name for row in every}
    if unknown:
        raise SystemExit(f"no such row: {', '.join(sorted(unknown))}; see --list")
    code, machine = sources(CHECKOUT), host.identity
    environments = {row.name: _environment(row, host, arguments.cache) for row in every}
    digests = {
        row.name: digest_of(row, environments[row.name].folder.name, code, machine) for row in every
    }

    def do(row: Row) -> dict[str, Any]:
        return _done(row, host, environments[row.name], arguments.cache / "logs")

    with alone():
        start = time.monotonic()
        known = read_outcomes(RESULTS / "matrix.json")
        chosen = arguments.only or [row.name for row in every]
        again = chosen if arguments.again else []
        todo = [row for row in every if row.name in chosen]
        outcomes = run(every, todo, host, digests, known, again, do, lambda o: keep(o, host))
        say(f"all rows: {format_duration(time.monotonic() - start)}")
    table(HEADERS, [cells(outcome) for outcome in outcomes])
    if not all(outcome.get("ok", True) for outcome in outcomes):
        raise SystemExit(FoundWanting.exit_code)


def run(
    every: Sequence[Row],
    todo: Sequence[Row],
    host: Host,
    digests: dict[str, str],
    known: dict[str, Outcome],
    again: Sequence[str],
    do: Callable[[Row], dict[str, Any]],
    kept: Callable[[list[Outcome]], None],
) -> list[Outcome]:
    """Outcomes in the rows' order: those that hold still, and those of `todo`, kept one by one."""
    outcomes = {
        name: outcome
        for name, outcome in known.items()
        if name in digests and outcome.get("digest") == digests[name]
    }
    for number, row in enumerate(every, start=1):
        reason = row.why_not(host)
        about = {"name": row.name, "claim": row.claim}
        if reason is not None:
            outcomes[row.name] = {**about, "not_run": reason}
            continue
        earlier = outcomes.get(row.name, {})
        if row not in todo or (earlier.get("ok") and row.name not in again):
            continue
        say(f"row {number} of {len(every)}: {row.name} ({row.claim})")
        start = time.monotonic()
        done = do(row)
        when = datetime.now(UTC).isoformat(timespec="seconds")
        seconds = time.monotonic() - start
        outcome = {**about, **done, "seconds": seconds, "when": when, "digest": digests[row.name]}
        outcomes[row.name] = outcome
        verdict = (
            "not run here" if "not_run" in outcome else "passed" if outcome["ok"] else "FAILED"
        )
        problem = remark(outcome)
        say(f"  {row.name}: {verdict}, {seconds:.0f} s{f' ({problem})' if problem else ''}")
        kept([outcomes[one.name] for one in every if one.name in outcomes])
    ordered = [outcomes[row.name] for row in every if row.name in outcomes]
    kept(ordered)
    return ordered


def keep(outcomes: list[Outcome], host: Host) -> None:
    """Write benchmarks/results/matrix.json, and README's sentence from it."""
    settings = {"tests": TESTS, "demo_share": DEMO_SHARE, "limit_seconds": LIMIT_SECONDS}
    where = {"system": host.described, "cores": len(host.cores)}
    path = write_result("matrix", {**where, **figures(outcomes)}, settings)
    readme = CHECKOUT / "README.md"
    text = readme.read_text(encoding="utf-8")
    renewed = between(text, BEGIN, END, machines(json.loads(path.read_text(encoding="utf-8"))))
    if renewed != text:
        write_text(readme, renewed)


def _done(row: Row, host: Host, environment: Environment, logs: Path) -> dict[str, Any]:
    """What comes of a row; one whose environment fails has failed, if its wheel is published."""
    try:
        environment.make()
        return work(row, host, environment, logs)
    except NotMade as error:
        if error.missing:
            return {"not_run": f"no such wheel: {error}"}
        return {"ok": False, "problem": f"the environment could not be made: {error}"}
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines() or [str(error)]
        return {"ok": False, "problem": f"the copy could not be installed: {lines[-1]}"}


def _environment(row: Row, host: Host, cache: Path) -> Environment:
    minor = row.minor or host.minor
    python = host.pythons.get(minor, "")
    return Environment(CHECKOUT, cache, python, minor, row.wheel, row.lowest)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the rows, and why some cannot run")
    parser.add_argument("--again", action="store_true", help="also rows that passed already")
    parser.add_argument("--only", nargs="+", default=[], metavar="ROW", help="these rows")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="where environments and logs are kept"
    )
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.expanduser().resolve()
    return arguments


if __name__ == "__main__":
    main()
