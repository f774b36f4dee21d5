"""C4's table: who is named of seeded faults in real ranks, when, and at what cost.

Four ranks sleep in place of computing (`modicum.proofs.comm.fault_bench` and `fatal_bench`, as in
C4's proof). One of them computes longer by 10 to 100 %, is paused in compute or in a collective, or
is killed; and there are runs without a fault, in which any sentence is a false alarm. Four hosts
with shaped ports send to one another round a ring (`port_bench`): a port comes to a quarter of its
rate in one direction, or is down, a rank computes longer, or nothing happens.

`--trials 20` is the specified experiment: 20 of each fault, twice as many slow ranks, and `--calm
1800` seconds at rest, a third as many in a ring. It waits in real time for some three hours, so
each trial that has ended is a line of `--progress`, and the same command continues. One part alone
(`--parts ports`: ports; `slow`: slow ranks; `fatal`: paused and killed ones; `rest`: no fault, and
the cost) leaves the others as the result has them; each says when it was measured, and where.
`--quick` makes one of each and writes nothing. With `--null` faults are injected into another rank
than the one that is asked for, and nothing is written. It ends with 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, alone, quiet, say, spread, write_result

import modicum
from modicum.core.files import user_cache
from modicum.core.machine import this_machine
from modicum.proofs.comm.fatal_bench import FATAL, fatal_trials
from modicum.proofs.comm.fault_bench import COMPUTE
from modicum.proofs.comm.port_bench import PORTS, on_ports, port_down_trials
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.fault_bench:series"
SLOW = (0.1, 0.2, 0.3, 0.5, 1.0)
SLOW_IN_A_RING = (0.3, 1.0)
RANKS = 4
JUDGES = (
    "comm",
    "core/ranks",
    *(f"proofs/comm/{one}_bench.py" for one in ("fault", "fatal", "port")),
)
RESULT = RESULTS / "diagnosis.json"
DOWN = {"a port is down": False, "a port is down, and another network is there": True}
COST = "step watched over step not watched"
SHARE, SOON, ENDED, ITERATIONS, MOST_COST = 0.95, 5.0, 10.0, 10, 1.01
PROMISED = 20  # trials of a fault
Findings = defaultdict[str, list[dict[str, Any]]]


class Progress:
    """Trials that have ended, a line each; those of other code or settings are made again.

    Args:
        refuses: no trial is made while other programs run here.

    Attributes:
        loads: of the machine, before each trial that was asked for, where that is known.
    """

    def __init__(self, path: Path, settings: dict[str, Any], *, refuses: bool = True) -> None:
        self._path, self._settings = path, json.dumps(settings, sort_keys=True)
        self._refuses, self.loads = refuses, list[float]()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows = [json.loads(line) for line in lines]
        self._known = {row["key"]: row for row in rows if row["by"] == self._settings}

    def of(self, key: str, make: Callable[[], Any]) -> Any:
        """What a trial found, made where it is not known."""
        if key not in self._known:
            say(key)
            row = {"key": key, "by": self._settings, "load": quiet(refuses=self._refuses)}
            row["found"] = make()
            self._known[key] = row
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        self.loads += [load] if (load := self._known[key].get("load")) is not None else []
        return self._known[key]["found"]


Part = Callable[[Progress, Findings, argparse.Namespace], dict[str, Any]]


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


def in_a_ring(seed: int, shift: int) -> list[list[dict[str, Any]]]:
    """One slow port for each direction, and two slow ranks, in the same processes."""
    draws = random.Random(f"ports {seed}")
    ports = [{"rank": draws.randrange(RANKS), "port": port} for port in PORTS]
    ranks = [{"rank": draws.randrange(RANKS), "part": part} for part in SLOW_IN_A_RING]
    return on_ports(
        [
            ("slow_port_trials", {"trials": ports, "shift": shift}),
            ("slow_rank_trials", {"trials": ranks, "shift": shift}),
        ],
        RANKS,
    )


def row(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Trials of a fault in one row."""
    made: dict[str, Any] = {"trials": len(trials), "right": sum(one["right"] for one in trials)}
    for figure in ("iterations", "seconds", "ended", "rate", "usual_rate"):
        values = [one[figure] for one in trials if one["right"] and one.get(figure) is not None]
        made |= {figure: spread(values)} if values else {}
    if trials and "ended" in trials[0]:
        made["did not end"] = sum(one.get("ended") is None for one in trials)
    if trials and "code_4" in trials[0]:
        who = "all others" if trials[0].get("kind") in FATAL else "all"
        made[f"{who} ended with 4"] = sum(one["code_4"] for one in trials)
    return made


def bars(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its figure, and whether it holds."""
    rows: list[dict[str, Any]] = []

    def bar(
        what: str, figure: float, *, least: float | None = None, most: float | None = None
    ) -> None:
        holds = (least is None or figure >= least) and (most is None or figure <= most)
        limit = {"at_least": least} if most is None else {"at_most": most}
        rows.append({"what": what, "figure": figure, **limit, "holds": holds})

    for fault, made in table["faults"].items():
        bar(f"{fault}: right", made["right"] / made["trials"], least=SHARE)
        if "iterations" in made:
            bar(f"{fault}: iterations", made["iterations"]["median"], most=ITERATIONS)
        elif fault in DOWN:
            bar(
                f"{fault}: all ended with 4", made["all ended with 4"] / made["trials"], least=SHARE
            )
            bar(f"{fault}: seconds to the end", _most(made, "ended"), most=ENDED)
            bar(f"{fault}: did not end", made.get("did not end", 0), most=0)
        else:
            bar(f"{fault}: seconds", _most(made, "seconds"), most=SOON)
    for calm in ("nothing", "nothing, in a ring"):
        if calm in table:
            bar(f"{calm}: alarms", table[calm]["alarms"], most=0)
    for name in (COST, f"{COST}, in a ring"):
        if name in table:
            bar(name, table[name]["median"], most=MOST_COST)
    bar("alarms before faults", table["alarms before faults"], most=0)
    return rows


def _most(made: dict[str, Any], figure: str) -> float:
    return float(made[figure]["greatest"]) if figure in made else math.inf


def of_slow(progress: Progress, found: Findings, given: argparse.Namespace) -> dict[str, Any]:
    """Ranks that compute longer into `found`."""
    for seed in range(given.trials if given.quick else 2 * given.trials):
        for one in progress.of(f"slow ranks, {seed}", partial(slow, seed, int(given.null))):
            found[f"compute + {one['part']:.0%}"].append(one)
    return {}


def of_fatal(progress: Progress, found: Findings, given: argparse.Namespace) -> dict[str, Any]:
    """Ranks that are paused or killed into `found`."""
    for seed, kind in itertools.product(range(given.trials), FATAL):
        asked = random.Random(f"{kind} {seed}").randrange(RANKS)
        trials = partial(fatal_trials, [{"kind": kind, "rank": asked}], RANKS, int(given.null))
        found[kind] += progress.of(f"{kind}, {seed}", trials)
    return {}


def of_rest(progress: Progress, _: Findings, given: argparse.Namespace) -> dict[str, Any]:
    """What is said where nothing happens, and what it costs to be watched."""
    held = min(120.0, given.calm / 4) if given.held is None else given.held
    arguments: dict[str, Any] = {"seconds": given.calm, "held": held}
    calm = progress.of(f"nothing, {arguments}", lambda: series("calm_trial", arguments))
    cost = {"pairs": 3 if given.quick else 12, "steps": 40}
    ratios = progress.of(f"cost, {cost}", lambda: series("cost_trial", cost, 2))
    return {"nothing": at_rest(calm, given.calm, held_seconds=held), COST: spread(ratios)}


def of_ports(progress: Progress, found: Findings, given: argparse.Namespace) -> dict[str, Any]:
    """Slow ports and such that are down into `found`; what comes of none, and of the cost."""
    shift = int(given.null)
    for seed in range(given.trials):
        ports, ranks = progress.of(f"in a ring, {seed}", partial(in_a_ring, seed, shift))
        for one in ports:
            found[f"a port at a quarter of its rate, {one['port']}"].append(one)
        for one in ranks:
            found[f"compute + {one['part']:.0%}, in a ring"].append(one)
        draws = random.Random(f"down {seed}")
        for fault, apart in DOWN.items():
            trial = {"rank": draws.randrange(RANKS), "apart": apart}
            make = partial(port_down_trials, [trial], RANKS, shift)
            found[fault] += progress.of(f"{fault}, {seed}", make)
    seconds = given.calm / 3
    cost = {"pairs": 3 if given.quick else 12, "steps": 40}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("calm_ring", {"seconds": seconds}),
        ("cost_of_a_ring", cost),
    ]
    calm, ratios = progress.of(f"a ring, {calls}", partial(on_ports, calls, RANKS))
    ring = "nothing, in a ring"
    return {ring: at_rest(calm, seconds), f"{COST}, in a ring": spread(ratios)}


def at_rest(calm: dict[str, Any], seconds: float, **more: float) -> dict[str, Any]:
    """A run without a fault in one row."""
    said = {"iterations": calm["iterations"], "alarms": len(calm["said"]), "said": calm["said"]}
    return {"seconds": seconds, **more, **said}


def of_part(make: Part, progress: Progress, given: argparse.Namespace) -> dict[str, Any]:
    """The table of one part: its faults in rows, runs without any, and what went wrong."""
    found, before = Findings(list), len(progress.loads)
    rows = make(progress, found, given)
    loads = progress.loads[before:]
    every = [one for trials in found.values() for one in trials]
    return {
        "faults": {fault: row(trials) for fault, trials in found.items()},
        **rows,
        **({"load before a trial": spread(loads)} if loads else {}),
        "alarms before faults": sum(one.get("false", 0) for one in every),
        "wrong": [one for one in every if not one["right"]],
    }


def whole(parts: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What the parts give together, next to them: the bars, the least share, the greatest cost."""
    table: dict[str, Any] = {}
    for part in parts.values():
        table |= part
    table["faults"] = {
        name: made for part in parts.values() for name, made in part["faults"].items()
    }
    table["alarms before faults"] = sum(part["alarms before faults"] for part in parts.values())
    costs = [table[name]["median"] for name in (COST, f"{COST}, in a ring") if name in table]
    return {
        "parts": dict(parts),
        "complete": set(parts) == set(PARTS) and _are_many(table["faults"].values()),
        "least_share": min(
            (made["right"] / made["trials"] for made in table["faults"].values()), default=None
        ),
        "greatest_cost": max(costs) - 1 if costs else None,
        "bars": bars(table),
    }


def _are_many(faults: Iterable[dict[str, Any]]) -> bool:
    """Whether there are as many trials as the promise says."""
    return all(made["trials"] >= PROMISED for made in faults)


def main() -> None:
    """Run the trials that are left, and write what came of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2, help="of each fault; twice of slow ranks")
    parser.add_argument("--calm", type=float, default=60.0, help="seconds without a fault")
    parser.add_argument("--held", type=float, help="of these, in a call that holds the lock")
    parser.add_argument("--progress", type=Path, default=user_cache("diagnosis") / "trials.jsonl")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="these alone"
    )
    parser.add_argument("--quick", action="store_true", help="one of each; writes no result")
    parser.add_argument("--null", action="store_true", help="inject into another rank")
    given = parser.parse_args()
    if given.quick:
        given.trials, given.calm = 1, 15.0
    by = {"sources": sources(), "shift": int(given.null), "ranks": RANKS}
    progress, parts = Progress(given.progress, by, refuses=not given.quick), {}
    writes = not given.null and not given.quick
    with alone():
        # Once another one that waited for has ended, and has written its own parts.
        if writes and set(given.parts) != set(PARTS) and RESULT.exists():
            parts = json.loads(RESULT.read_text(encoding="utf-8"))["parts"]
        for name in given.parts:
            measured = of_part(PARTS[name], progress, given)
            when = datetime.now(UTC).isoformat(timespec="seconds")
            asked = {"trials": given.trials, "calm": given.calm, "sources": by["sources"]}
            machine = this_machine(torch.device("cpu")).as_json()
            parts[name] = measured | asked | {"when": when, "machine": machine}
            if writes:  # what has ended stays, should a later part fail
                settings = {"ranks": RANKS, "compute_seconds": COMPUTE}
                write_result("diagnosis", whole(parts), settings)
    table = whole(parts)
    print(json.dumps(table, indent=2))
    for each in table["bars"]:
        say(f"{'holds' if each['holds'] else 'FALLS'}  {each['what']}: {each['figure']:.3f}")
    raise SystemExit(not all(each["holds"] for each in table["bars"]))


PARTS: dict[str, Part] = {"slow": of_slow, "fatal": of_fatal, "rest": of_rest, "ports": of_ports}

if __name__ == "__main__":
    main()
