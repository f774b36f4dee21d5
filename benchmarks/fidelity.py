"""modicum's adapters against peft's on every architecture that transformers can make small here.

Each is made with random weights, gets the same LoRA from both, is trained three steps by both,
merged, saved and loaded by both. It is equal, refused with one sentence that leaves the model as it
was, not made (and why), or differs. Each runs in a process of its own, at idle priority. What is
done is kept in `--progress`, so the same command resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from common import say, write_result
from fidelity_check import CLOSE, STEPS, check
from fidelity_models import LARGEST, model_types

Case = dict[str, Any]
RESULTS = ("equal", "refused", "not made", "differs")


def in_a_process(model_type: str, limit: float) -> Case:
    """One architecture, in a process that begins with this one's imports and ends in time."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(model_type, its))
    process.start()
    its.close()
    try:
        case: Case = mine.recv() if mine.poll(limit) else {"why": f"over {limit:.0f} s"}
    except EOFError:
        case = {"why": "the process died"}
    if process.is_alive():
        process.kill()
    process.join()
    return {"result": "not made"} | case


def _child(model_type: str, to: Connection) -> None:
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.dup2(silence, sys.stderr.fileno())
    try:
        case = check(model_type)
    except Exception as error:  # a difference too: neither equal nor refused with a sentence
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        why = f"{type(error).__name__} at {where}: {error}".replace("\n", " ")[:400]
        case = {"result": "differs", "why": why}
    to.send(case)
    to.close()


def sweep(
    names: Sequence[str],
    progress: Path,
    limit: float,
    again: Sequence[str],
    minutes: float = float("inf"),
) -> dict[str, Case]:
    """What became of each, from `progress` where it is known already, as far as time allows."""
    end = time.monotonic() + 60 * minutes
    done: dict[str, Case] = {}
    if progress.exists():
        for line in progress.read_text(encoding="utf-8").splitlines():
            name, case = json.loads(line)
            done[name] = case
    done = {name: case for name, case in done.items() if case["result"] not in again}
    for name in names:
        if name in done or time.monotonic() > end:
            continue
        done[name] = in_a_process(name, limit)
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, done[name]]) + "\n")
        say(f"{name}: {done[name]['result']} {done[name].get('why', '')}")
    return {name: done[name] for name in names if name in done}


def summed(cases: dict[str, Case]) -> dict[str, Any]:
    """Counts and lists by result, and the largest difference of each kind among the equal."""
    counts = Counter(case["result"] for case in cases.values())
    equal = [case["apart"] for case in cases.values() if case["result"] == "equal"]
    return {
        "counts": {key.replace(" ", "_"): counts[key] for key in RESULTS},
        "checked": sum(counts[key] for key in RESULTS if key != "not made"),
        "largest_among_equal": {
            key: max((apart[key] for apart in equal if key in apart), default=None) for key in CLOSE
        },
        "equal": {name: _worst(case) for name, case in cases.items() if case["result"] == "equal"},
    } | {
        key.replace(" ", "_"): {
            name: {k: v for k, v in case.items() if k != "result"}
            for name, case in cases.items()
            if case["result"] == key
        }
        for key in RESULTS[1:]
    }


def _worst(case: Case) -> str:
    """The class, and the difference that is nearest to what is allowed."""
    key = max(case["apart"], key=lambda key: case["apart"][key] / CLOSE[key])
    precision = " in float64" if case.get("float64") else ""
    return f"{case['class']}, {case['layers']} layers, {key} {case['apart'][key]}{precision}"


def main() -> None:
    """Check every architecture, or some, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these; prints, writes nothing")
    parser.add_argument("--limit", type=float, default=90, help="seconds for one architecture")
    parser.add_argument("--again", nargs="+", default=[], choices=RESULTS, help="do these anew")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after")
    kept = Path(tempfile.gettempdir()) / "modicum-fidelity.jsonl"
    parser.add_argument("--progress", type=Path, default=kept, help="what is done already")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    options = parser.parse_args()
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.only:
        cases = {name: in_a_process(name, options.limit) for name in options.only}
        print(json.dumps(cases, indent=2))
        return
    if options.fresh:
        options.progress.unlink(missing_ok=True)
    names = model_types()
    cases = sweep(names, options.progress, options.limit, options.again, options.minutes)
    settings = {"steps": STEPS, "limit_s": options.limit, "most_parameters": LARGEST}
    settings["largest_difference_allowed"] = CLOSE
    figures = {"architectures": len(names), "left": len(names) - len(cases)} | summed(cases)
    write_result("fidelity", figures, settings)


if __name__ == "__main__":
    main()
