"""What the allocator's settings are worth: steps of the default model with and without them.

Three ways train the same model from the same seed, each run in a process of its own, in turns:
`plain`, glibc as it is; `tuned`, as commands have it; `budget`, as runs that have a budget of
memory have it, with large tensors in huge pages of their own. Figures are of seconds a step and of
the process's bytes for each byte of tensors at the peak.

    python benchmarks/allocator.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from common import alone, interleaved, paired_ratio, say, spread, write_result

from modicum.cli.allocator import HUGE, TUNABLES, tuned

ROUNDS, STEPS, ROWS, TOKENS = 7, 8, 8, 256


def one() -> None:
    """Train, and print seconds a step, tensor bytes and process bytes as a line of JSON."""
    import time
    from statistics import median

    import torch

    from modicum.core.heap import map_for
    from modicum.core.machine.memory import (
        TensorMeter,
        forget_peak,
        peak_resident_bytes,
        resident_bytes,
        tensor_bytes,
    )
    from modicum.models.llama import create
    from modicum.recipe import Recipe
    from modicum.tasks.text import new_config

    map_for(budget=sys.argv[2] == "budget")
    model = create(new_config(Recipe()), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    kept = tensor_bytes(list(model.parameters()))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        logits = model.logits(model.hidden(tokens)).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, tokens.flatten()).backward()
        optimizer.step()
        return time.perf_counter() - start

    before = resident_bytes() - kept
    seconds = [step() for _ in range(STEPS)]
    forget_peak()
    seconds += [step() for _ in range(2)]
    process = peak_resident_bytes() - before
    optimizer.zero_grad()
    with TensorMeter("cpu") as meter:
        step()
    state = [value for each in optimizer.state.values() for value in each.values()]
    tensors = (meter.peak or 0) + kept + tensor_bytes(state)
    print(json.dumps({"seconds": median(seconds[2:]), "process": process, "tensors": tensors}))


def main() -> None:
    """Run all in turns, and write the result."""
    runs: dict[str, list[dict[str, Any]]] = {"plain": [], "tuned": [], "budget": []}

    def contender(name: str, environment: dict[str, str]) -> Callable[[], float]:
        def run() -> float:
            command = [sys.executable, __file__, "--one", name]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
            figures = json.loads(done.stdout)
            runs[name].append(figures)
            say(f"{name}: {figures}")
            return float(figures["seconds"])

        return run

    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    ways = {"plain": plain, "tuned": tuned(plain), "budget": tuned(plain)}
    contenders = {name: contender(name, environment) for name, environment in ways.items()}
    with alone():
        seconds = interleaved(contenders, rounds=ROUNDS)
    result = {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "seconds_ratio": {
            name: paired_ratio(seconds["budget"], seconds[name]) for name in ("plain", "tuned")
        },
        "process_over_tensors": {
            name: spread([run["process"] / run["tensors"] for run in each])
            for name, each in runs.items()
        },
    }
    settings = {"steps": STEPS, "rows": ROWS, "tokens": TOKENS, "tunables": TUNABLES | HUGE}
    write_result("allocator", result, settings)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    one() if sys.argv[1:2] == ["--one"] else main()
