"""Slow ranks and ranks without a fault, and who is named: for C4's proof and its benchmark.

Ranks sleep in place of computing, so the injected fault is the only reason why one of them is late;
each iteration sums two tensors over all. Trials run one after the other in the same processes, each
with a watch of its own. Faults that end processes are in `fatal_bench`.
"""

from __future__ import annotations

import ctypes
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modicum.comm.c4 import C4
from modicum.comm.watching import Watch
from modicum.core.ranks.ranks import Ranks

COMPUTE = 0.1  # seconds that a rank sleeps in an iteration
CALM, MOST = 30, 40  # iterations before a fault, and in which it must be named
TrialFinding = dict[str, Any]


def slow_trials(ranks: Ranks, trials: list[dict[str, Any]], shift: int = 0) -> list[TrialFinding]:
    """One rank computes longer: who was named, and after how many iterations.

    Args:
        trials: the `rank` that is asked for, and by which `part` it is slower.
        shift: that many ranks further the fault is injected.
    """
    return [_slow_trial(ranks, one["rank"], one["part"], shift) for one in trials]


def _slow_trial(ranks: Ranks, asked: int, part: float, shift: int) -> TrialFinding:
    guilty = ranks.rank == (asked + shift) % ranks.size
    found: TrialFinding = {"rank": asked, "part": part, "right": False, "false": 0}
    with watched_ranks(ranks) as (_, events):
        for step in range(CALM + MOST):
            time.sleep(COMPUTE * (1 + part * (guilty and step >= CALM)))
            heard = events()
            if iteration(1.0 if heard else 0.0)[0]:
                break
        heard = events()
    if heard and step < CALM:
        found["false"] = len(heard)
    elif heard:
        found["iterations"] = step - CALM
        found["right"] = (heard[0]["kind"], heard[0]["rank"]) == ("slow", asked)
    found["said"] = [one["sentence"] for one in heard]
    return found


def calm_trial(ranks: Ranks, seconds: float, held: float) -> TrialFinding:
    """No fault: what was named, which must be nobody.

    Compute varies by a tenth, other ranks have more of it at other times, all evaluate (in calls of
    other sizes, and of unequal durations), rank 0 saves, rank 1 compiles, and the last rank is for
    `held` seconds in a call that holds the interpreter's lock.
    """
    draws, begun = random.Random(f"calm {ranks.rank}"), time.monotonic()
    with watched_ranks(ranks) as (watched, events):
        step = 0
        while True:
            time.sleep(COMPUTE * (1 + draws.gauss(0, 0.05)) * draws.choice([1.0, 1.0, 1.05]))
            if step == 25 and ranks.rank == 1:
                torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(4))
            if step == 40 and ranks.rank == ranks.size - 1:
                ctypes.PyDLL(None).usleep(ctypes.c_uint(int(held * 1e6)))
            if step % 30 == 29:
                with watched.marked():
                    _evaluate(draws.uniform(0.1, 0.4))
            if step % 45 == 44 and ranks.first:
                with watched.marked():
                    time.sleep(0.5)
            over = time.monotonic() - begun > seconds and step > 50
            step += 1
            if iteration(1.0 if over and ranks.first else 0.0)[0]:
                break
        heard = events()
    return {"iterations": step, "said": [one["sentence"] for one in heard]}


def cost_trial(ranks: Ranks, pairs: int, steps: int) -> list[float]:
    """What it costs to be watched, where ranks add up a number after they computed."""
    return watched_over_unwatched(lambda: iteration(0.0), pairs, steps)


def watched_over_unwatched(exchange: Callable[[], object], pairs: int, steps: int) -> list[float]:
    """Of interleaved pairs of blocks, seconds with somebody who watches over seconds without.

    Args:
        exchange: what ranks do together in a step, after they computed.
    """
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for watches in (True, False) if pair % 2 else (False, True):
            watched = C4().watch() if watches else None
            dist.barrier()
            begun = time.monotonic()
            for _ in range(steps):
                time.sleep(COMPUTE)
                exchange()
            dist.barrier()
            seconds[watches] = time.monotonic() - begun
            if watched is not None:
                watched.close()
        ratios.append(seconds[True] / seconds[False])
    return ratios


def series(ranks: Ranks, calls: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Several of these one after the other: the name of each, and its arguments."""
    known: dict[str, Callable[..., Any]] = {
        one.__name__: one for one in (slow_trials, calm_trial, cost_trial)
    }
    return [known[name](ranks, **arguments) for name, arguments in calls]


def iteration(told: float) -> list[float]:
    """Two sums over all ranks; what they say together."""
    said = torch.tensor([told, 0.0])
    dist.all_reduce(torch.ones(4096))
    dist.all_reduce(said)
    return said.tolist()


def _evaluate(seconds: float) -> None:
    for size in range(3, 9):
        time.sleep(seconds / 6)
        dist.all_reduce(torch.ones(size))


@contextmanager
def watched_ranks(ranks: Ranks) -> Iterator[tuple[Watch, Any]]:
    """A watch, and what gives the events so far, on rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"

        def events() -> list[dict[str, Any]]:
            return events_of(record) if ranks.first else []

        with C4().watch(record=record if ranks.first else None) as watched:
            yield watched, events


def events_of(record: Path) -> list[dict[str, Any]]:
    """What was found so far, of a record's complete lines."""
    if not record.exists():
        return []
    lines = record.read_text(encoding="utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in lines.splitlines()]
