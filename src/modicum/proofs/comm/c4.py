"""The proof of C4's diagnosis: who is slow, stopped or dead is named, and nobody else.

Four ranks sleep in place of computing, 0.1 s an iteration, and faults are injected into one of
them, drawn by a seed: compute that takes longer by a part, a paused process, a killed one. The
baseline is PyTorch alone, and whether anything that it prints names the rank. What the paper's
headline counts, hours of a production job, cannot be shown here; what it rests on can: the right
component, soon, without false alarms, at no cost. The null injects each fault into another rank
than the one that is asked for.

Quick: one fault of each kind, in about a minute. Full: eight slow ranks at each of five parts, five
of each other fault, five minutes without any. Then four hosts whose ports are shaped, which needs
network namespaces, send messages round a ring: five ports at a quarter of their rate in each
direction, six that are down (half of them with another network for those who watch), and two
minutes without a fault. The specified counts, 40 slow ranks at each part, 20 of each other fault
and 30 minutes without any, wait in real time for some two hours: `python benchmarks/diagnosis.py
--trials 20 --calm 1800` makes them, trial by trial.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

from modicum.proofs.base import ProofRun
from modicum.proofs.comm.fatal_bench import FATAL, fatal_trials
from modicum.proofs.comm.fault_bench import TrialFinding
from modicum.proofs.comm.port_bench import PORTS, on_ports, port_down_trials
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.fault_bench:series"
RANKS = 4
SOON = 5.0  # seconds from a fault that ends a run until it is named
ENDED = 10.0  # seconds from when a port is down until all processes have ended
CLAIM = "error-induced downtime from 31.19% to 1.16%"
NULL = "the fault injected into another rank than the one that is asked for"


def prove(run: ProofRun) -> None:
    """Inject faults and ask who; inject none, and ask again; measure the cost."""
    shift = run.contender(0, null=1, null_is=NULL)
    draws = random.Random("c4")
    parts, each = ((0.1, 0.2, 0.3, 0.5, 1.0), 8) if run.full else ((0.3, 0.5, 1.0), 1)
    asked = [{"rank": draws.randrange(RANKS), "part": part} for part in parts for _ in range(each)]
    held, calm = (60.0, 300.0) if run.full else (1.0, 5.0)
    cost: dict[str, Any] = {"pairs": 12, "steps": 40} if run.full else {"pairs": 3, "steps": 8}
    calls = [
        ("slow_trials", {"trials": asked, "shift": shift}),
        ("calm_trial", {"seconds": calm, "held": held}),
        ("cost_trial", cost),
    ]
    run.progress("slow ranks, and none")
    run.quiet()
    slow, nothing, ratios = at_ranks(BENCH, RANKS, {"calls": calls}, seconds=7200)[0]
    _slow(run, slow, parts)
    run.progress("ranks that are killed or paused")
    run.quiet()
    count = 5 if run.full else 1
    trials = [{"kind": k, "rank": draws.randrange(RANKS)} for k in FATAL for _ in range(count)]
    # PyTorch alone waits half an hour for a paused rank: of those only some are waited for.
    kinds = list(FATAL) if run.full else ["killed"]
    bare = [
        {"kind": kind, "rank": draws.randrange(RANKS), "watched": False, "within": SOON}
        for kind in kinds
    ]
    found = fatal_trials([*trials, *bare], RANKS, shift)
    for kind in FATAL:
        _fatal(run, kind, [one for one in found if one["kind"] == kind])
    early = [said for one in slow if one["false"] for said in one["said"]]
    alarms = len(nothing["said"]) + len(early)
    run.at_most("alarms where there was no fault", alarms, 0, part="check")
    took = statistics.median(ratios)
    run.figure("seconds of an iteration, watched and not", method=took, baseline=1.0)
    bar = 1.01 if run.full else 1.05
    run.at_most("seconds of an iteration over one that nobody watches", took, bar, part="check")
    if run.full:
        _ports(run, shift)


def _ports(run: ProofRun, shift: int) -> None:
    """Whose port is slow or down, in a ring of messages; and no alarm there without a fault."""
    run.progress("ports that are slow, and none")
    run.quiet()
    draws = random.Random("c4 ports")
    asked = [{"rank": draws.randrange(RANKS), "port": port} for port in PORTS for _ in range(5)]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("slow_port_trials", {"trials": asked, "shift": shift}),
        ("calm_ring", {"seconds": 120.0}),
        ("cost_of_a_ring", {"pairs": 12, "steps": 40}),
    ]
    slow, nothing, ratios = on_ports(calls, RANKS)
    for port in PORTS:
        right = _share([one["right"] for one in slow if one["port"] == port])
        sentence = f"a port at a quarter of its rate, {port}: its link is named"
        run.at_least(sentence, right, 0.95)
    latencies = [one["iterations"] for one in slow if one["right"]]
    soon = statistics.median(latencies) if latencies else 99.0
    run.at_most("time until a slow link is named, the median in iterations", soon, 10)
    alarms = len(nothing["said"]) + sum(one["false"] for one in slow)
    run.at_most("alarms in a ring where there was no fault", alarms, 0, part="check")
    took = statistics.median(ratios)
    sentence = "seconds of an iteration of a ring over one that nobody watches"
    run.at_most(sentence, took, 1.01, part="check")
    run.progress("ports that are down")
    run.quiet()
    down = port_down_trials(
        [{"rank": draws.randrange(RANKS), "apart": bool(n % 2)} for n in range(6)], RANKS, shift
    )
    right = _share([one["right"] for one in down])
    run.at_least(
        "a port is down: its rank or link is named on all hosts that are left", right, 0.95
    )
    seconds = [one["ended"] for one in down if one["right"]]
    longest = max((99.0 if one is None else one for one in seconds), default=99.0)
    run.at_most("a port is down: longest seconds until all have ended", longest, ENDED)
    ended = _share([one["code_4"] for one in down])
    run.at_least("a port is down: runs that all left with exit code 4", ended, 0.95, part="check")


def _slow(run: ProofRun, found: list[TrialFinding], parts: Sequence[float]) -> None:
    """Who computes longer than the others, by each part."""
    for part in parts:
        right = _share([one["right"] for one in found if one["part"] == part])
        run.at_least(f"a rank that computes {part:.0%} longer is named, and as slow", right, 0.95)
    latencies = [one["iterations"] for one in found if one["right"]]
    soon = statistics.median(latencies) if latencies else 99.0
    run.at_most("time until a slow rank is named, the median in iterations", soon, 10)


def _fatal(run: ProofRun, kind: str, found: list[TrialFinding]) -> None:
    """Who is killed or paused; where it was measured, also by what PyTorch alone prints."""
    watched, bare = ([one for one in found if one["watched"] == it] for it in (True, False))
    right = _share([one["right"] for one in watched])
    if bare:
        by_torch = _share([one["right"] for one in bare])
        name = f"share of runs in which a rank that is {kind} is named"
        run.figure(name, method=right, baseline=by_torch, claimed=CLAIM)
    run.at_least(f"a rank that is {kind} is named, and as {FATAL[kind]}", right, 0.95)
    seconds = [one["seconds"] for one in watched if one["right"]]
    run.at_most(f"{kind}: longest seconds until it is named", max(seconds, default=99.0), SOON)
    ended = _share([one["code_4"] for one in watched])
    run.at_least(f"{kind}: runs that all others left with exit code 4", ended, 0.95, part="check")


def _share(right: Sequence[bool]) -> float:
    return statistics.fmean(right)
