"""Runs of two hosts to which something happens: seconds to the sentence, and how they resume.

The cable between the hosts is pulled, a rank is paused or killed, one rank's loss is no number, or
one host has another recipe: at a drawn moment of a short run of `modicum train`, whose exchange
owes what it leaves unsent. Cables are pulled and ranks paused and killed as often at the start,
before ranks watch each other, while data is prepared, a block compiled, the largest batch
rehearsed, weights are updated, or a checkpoint is begun or written, as between two steps. Within
ten seconds every host that is left must say who it was and have ended, and the same command must
then come to the result of a run to which nothing happened, to the bit. (After a loss that is no
number the run continues; it is interrupted, and resumes.)

`--count 100` injects each fault in turn, for half an hour to an hour; a line of `--progress` each,
and the same command continues. `--quick` injects each once and writes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from comm_recipes import write_data
from common import alone, say, write_result
from diagnosis import Progress

import modicum
from modicum.core.files import user_cache
from modicum.core.machine.record import machine_record
from modicum.proofs.comm.fault_moments import COMPILING, MOMENTS
from modicum.proofs.comm.faulty_runs import FAULTS, NAN, NOTHING, OTHER, right, trial

WITHIN = 10.0
TRIES = 8
STEPS = 12
Trial = dict[str, Any]


def recipe_of(data: Path, *, compiled: bool = False) -> dict[str, Any]:
    """A small run with an exchange that keeps state of each rank; compiled, of one layer."""
    return {
        "model": {"layers": 1 if compiled else 2, "width": 64, "heads": 4, "vocabulary_size": 300},
        "data": {"path": str(data), "column": "text", "sequence_length": 32},
        "training": {"steps": STEPS, "batch_size": 8, "device": "cpu",
                     "compile": "blocks" if compiled else "none",
                     "learning_rate": 3e-3},
        "parallel": {"strategy": "ddp", "bucket": "100KB"},
        "comm": {"method": "acp_sgd", "rank": 4},
        "watchdog": {"method": "c4"},
        "evaluation": {"every": 4, "rows": 4},
        "checkpoint": {"every": 3},
        "samples": {"count": 0},
    }  # fmt: skip


def drawn(seed: int, number: int) -> Trial:
    """The fault of a number: each kind in turn, at a drawn rank, and at a step and a part of it.

    Step 0 is when the ranks have met and nothing is planned yet. Of what may come at any time every
    other one comes at one of `MOMENTS` instead, each in turn.
    """
    chance = random.Random(f"{seed} {number}")
    kind = FAULTS[number % len(FAULTS)]
    step = 0 if kind == OTHER else chance.randrange(int(kind == NAN), STEPS - 3)
    found: Trial = {"kind": kind, "rank": chance.randrange(2), "step": step}
    turn, odd = divmod(number // len(FAULTS), 2)
    moment = list(MOMENTS)[turn % len(MOMENTS)] if odd and kind not in (NAN, OTHER) else None
    return {**found, "delay": chance.random() / 2, "moment": moment}


def sources() -> str:
    """A digest of the product's code."""
    root, digest = Path(modicum.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def row(trials: list[Trial]) -> dict[str, Any]:
    """What came of one kind of fault; of one that nobody ever said no time is the greatest."""
    wrong = [each for each in trials if each["wrong"]]
    seconds = [each["seconds"] for each in trials if each["seconds"] is not None]
    ended = [each["ended"] for each in trials if each["ended"] is not None]
    said_all, ended_all = (len(known) == len(trials) for known in (seconds, ended))
    return {
        "injected": len(trials),
        "right": len(trials) - len(wrong),
        "greatest_seconds_to_the_sentence": max(seconds, default=None) if said_all else None,
        "median_seconds_to_the_sentence": median(seconds) if seconds else None,
        "greatest_seconds_to_the_end": max(ended, default=None) if ended_all else None,
        "resumed_to_the_bit": sum(each["resumed_to_the_bit"] for each in trials),
        "wrong": [
            {key: each[key] for key in ("rank", "step", "moment", "wrong", "said")}
            for each in wrong
        ],
    }


def judged(found: Trial, calm: str) -> Trial:
    """A trial with what is wrong with it."""
    wrong = right(found, calm, WITHIN)
    bits = not any("to the bit" in each for each in wrong)
    return {**found, "wrong": wrong, "resumed_to_the_bit": bits}


def in_time(fault: Trial, recipe: dict[str, Any]) -> Trial:
    """A trial whose fault came before the run had ended.

    A cable is pulled earlier in the next try; a moment may not come: a block that is tried compiled
    on the first rank, and is slower there, is compiled on no other.
    """
    kind, delay = fault["kind"], fault["delay"]
    for _ in range(TRIES):
        found = trial(
            kind, fault["rank"], fault["step"], recipe, delay=delay, moment=fault["moment"]
        )
        if kind == NAN or any(found["codes"]):
            break
        delay /= 2
    return found


def main() -> None:
    """Inject faults, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="injections")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one of each; writes no result")
    parser.add_argument("--progress", type=Path, default=user_cache("faults") / "trials.jsonl")
    given = parser.parse_args()
    count = len(FAULTS) if given.quick else given.count
    table = defaultdict[str, list[Trial]](list)
    with alone(), tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "text.jsonl"
        write_data(data)
        # As the ranks will, whose start is limited.
        torch.set_num_threads(1)
        machine_record(parts=["recomputation"])
        progress = Progress(given.progress, {"sources": sources()}, refuses=not given.quick)
        for number in range(count):
            fault = drawn(given.seed, number)
            compiled = fault["moment"] == COMPILING
            recipe = recipe_of(data, compiled=compiled)
            what = "nothing, compiled" if compiled else "nothing"
            calm = progress.of(what, partial(trial, NOTHING, 0, 0, recipe))
            if not calm["outcome"]:
                raise SystemExit(f"a run to which nothing happened did not end: {calm}")
            one = partial(in_time, fault, recipe)
            found = judged(progress.of(f"{given.seed}, {number}: {fault}", one), calm["outcome"])
            say(f"{found['kind']}: {'; '.join(found['wrong']) or 'right'}")
            table[fault["kind"]].append(found)
    figures = {kind: row(trials) for kind, trials in table.items()}
    figures["all"] = {"injected": count, "right": sum(each["right"] for each in figures.values())}
    figures["all"]["greatest_load_before"] = max(progress.loads, default=None)
    print(json.dumps(figures, indent=2))
    if not given.quick:
        write_result("comm_faults", figures, {"count": count, "seed": given.seed, "steps": STEPS})


if __name__ == "__main__":
    main()
