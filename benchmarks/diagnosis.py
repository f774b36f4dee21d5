"""C4's table: who is named of seeded faults in real ranks, when, and at what cost.

Four ranks sleep in place of computing (`modicum.proofs.comm.fault_bench` and `fatal_bench`, as in
C4's proof). One of them computes longer by 10 to 100 %, is paused in compute or in a collective, or
is killed; and there are runs without a fault, in which any sentence is a false alarm. `--trials 20`
is the specified experiment: 20 of each fault, twice as many slow ranks, and `--calm 1800` seconds
at rest. It waits in real time for some two hours, so each trial that has ended is a line of
`--progress`, and the same command continues. With `--null` faults are injected into another rank
than the one that is asked for, and nothing is written.

Not here: links (a port at a quarter of its rate, or down), which C4 does not tell from ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import alone, say, spread, write_result

import modicum
from modicum.core.files import user_cache
from modicum.proofs.comm.fatal_bench import FATAL, fatal_trials
from modicum.proofs.comm.fault_bench import COMPUTE
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.fault_bench:series"
SLOW = (0.1, 0.2, 0.3, 0.5, 1.0)
RANKS = 4
JUDGES = ("comm", "core/ranks", "proofs/comm/fault_bench.py", "proofs/comm/fatal_bench.py")


class Progress:
    """Trials that have ended, a line each; those of other code or settings are made again."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, json.dumps(settings, sort_keys=True)
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self._known = {row["key"]: row["found"] for row in rows if row["by"] == self._settings}

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """What a trial found, made where it is not known."""
        if key not in self._known:
            say(key)
            self._known[key] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            row = {"key": key, "by": self._settings, "found": self._known[key]}
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return self._known[key]


def sources() -> str:
    """A digest of the code that judges, and of what injects faults."""
    root, digest = Path(modicum.__file__).parent, hashlib.sha256()
    for place in JUDGES:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def series(name: str, arguments: dict[str, Any], ranks: int = RANKS) -> Any:
    """What one call of the bench gives at rank 0."""
    return at_ranks(BENCH, ranks, {"calls": [(name, arguments)]}, seconds=7200)[0][0]


def slow(seed: int, shift: int) -> list[dict[str, Any]]:
    """One slow rank for each part, one after the other in the same processes."""
    draws = random.Random(f"slow {seed}")
    trials = [{"rank": draws.randrange(RANKS), "part": part} for part in SLOW]
    found: list[dict[str, Any]] = series("slow_trials", {"trials": trials, "shift": shift})
    return found


def row(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Trials of a fault in one row."""
    made: dict[str, Any] = {"trials": len(trials), "right": sum(one["right"] for one in trials)}
    for figure in ("iterations", "seconds", "ended"):
        values = [one[figure] for one in trials if one["right"] and figure in one]
        made |= {figure: spread(values)} if values else {}
    if trials and "code_4" in trials[0]:
        made["all others ended with 4"] = sum(one["code_4"] for one in trials)
    return made


def main() -> None:
    """Run the trials that are left, and write what came of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2, help="of each fault; twice of slow ranks")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds without a fault")
    parser.add_argument("--held", type=float, help="of these, in a call that holds the lock")
    parser.add_argument("--progress", type=Path, default=user_cache("diagnosis") / "trials.jsonl")
    parser.add_argument("--null", action="store_true", help="inject into another rank")
    given = parser.parse_args()
    shift = int(given.null)
    held = min(120.0, given.calm / 4) if given.held is None else given.held
    by = {"sources": sources(), "shift": shift, "ranks": RANKS}
    progress, found = Progress(given.progress, by), defaultdict[str, list[dict[str, Any]]](list)
    with alone():
        for seed in range(2 * given.trials):
            for one in progress.of(f"slow ranks, {seed}", partial(slow, seed, shift)):
                found[f"compute + {one['part']:.0%}"].append(one)
            for kind in FATAL if seed < given.trials else ():
                asked = random.Random(f"{kind} {seed}").randrange(RANKS)
                trials = partial(fatal_trials, [{"kind": kind, "rank": asked}], RANKS, shift)
                found[kind] += progress.of(f"{kind}, {seed}", trials)
        arguments = {"seconds": given.calm, "held": held}
        calm = progress.of(f"nothing, {arguments}", lambda: series("calm_trial", arguments))
        arguments = {"pairs": 12, "steps": 40}
        ratios = progress.of(f"cost, {arguments}", lambda: series("cost_trial", arguments, 2))
    table: dict[str, Any] = {fault: row(trials) for fault, trials in found.items()}
    latencies = [
        one["iterations"] for fault in found for one in found[fault] if "iterations" in one
    ]
    table["median iterations to a slow rank"] = statistics.median(latencies) if latencies else None
    early = sum(one.get("false", 0) for trials in found.values() for one in trials)
    table["nothing"] = {
        "seconds": given.calm, "held_seconds": held, "iterations": calm["iterations"],
        "alarms": len(calm["said"]), "said": calm["said"], "alarms before faults": early,
    }  # fmt: skip
    table["step watched over step not watched"] = spread(ratios)
    print(json.dumps(table, indent=2))
    if not given.null:
        settings = {"ranks": RANKS, "trials": given.trials, "compute_seconds": COMPUTE}
        write_result("diagnosis", table, settings)


if __name__ == "__main__":
    main()
