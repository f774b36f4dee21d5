"""Tokens per second of modicum's trainer, a bare PyTorch loop and `transformers.Trainer`.

The same Llama, tokens, optimizer and clipping, in fp32; full training, and LoRA on all linears.
The three take turns in short segments, each in a process of its own, and ratios are of segments
in the same round. modicum's first two steps, which it meters, and everybody's start lie in the
warm-up. Where a process's heap happens to lie makes some per cent of its speed, so all are started
afresh now and then. That all compute the same is checked: their losses must agree.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import alone, interleaved, paired_ratio, say, spread, write_result
from trainer_contenders import CONTENDERS, Job, serve

INCLUDE = ("email/**", "json/**", "logging/**", "xml/**", "http/**", "importlib/**")
SIZES = {
    "full-size": {"layers": 8, "width": 512, "heads": 8, "vocabulary_size": 8192},
    "quick": {"layers": 2, "width": 64, "heads": 2, "vocabulary_size": 1024},
}
KINDS = ("full", "lora")
WARM_UP_STEPS = 6


@dataclass
class Runner:
    """A contender's process, seen from here."""

    name: str
    job: Job
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    def __post_init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(self.name, self.job, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def segment(self, steps: int) -> float:
        """Let it do so many steps; its trained tokens per second."""
        connection: Connection = self.connection
        connection.send(steps)
        try:
            seconds, losses, self.peak_bytes = connection.recv()
        except EOFError:
            raise SystemExit(f"{self.name} ended early; its message is above") from None
        self.losses += losses
        return steps * self.job.batch_size * self.job.sequence_length / seconds

    def end(self) -> None:
        """Send it home."""
        self.connection.send(None)
        self.process.join()


def prepare(folder: Path, size: dict[str, int], job: Job) -> int:
    """Make the model, its tokenizer, an adapter and the batches; the number of parameters."""
    import torch
    from safetensors.torch import save_file

    from modicum import Recipe, plan, train
    from modicum.adapters import LoRA
    from modicum.core.ranks.ranks import Ranks
    from modicum.models import huggingface

    data = {
        "include": INCLUDE,
        "sequence_length": job.sequence_length,
        "boundaries": False,
        "validation_fraction": 0.0,
    }
    once = {"steps": 1, "batch_size": 1, "device": "cpu"}
    train(plan(Recipe(model=size, data=data, training=once, samples={"count": 0})), folder / "base")
    model = huggingface.load(job.base, torch.float32, "cpu")
    count = sum(p.numel() for p in model.parameters())
    LoRA(rank=job.rank).attach(model).save(folder / "adapter")
    recipe = Recipe(
        model={"path": str(job.base.parent)}, data=data, training={"batch_size": job.batch_size}
    )
    planned = plan(recipe)
    tokens = planned.task.prepare(
        recipe, planned.inputs, folder / "prepared", lambda *_: None, Ranks()
    )
    batches = [tokens.train.batch(tokens.sampler.indices(step)) for step in range(job.steps)]
    save_file(
        {
            "input_ids": torch.cat([batch.input_ids for batch in batches]),
            "labels": torch.cat([batch.labels for batch in batches]),
        },
        folder / "batches.safetensors",
    )
    return count


def race(
    job: Job, *, rounds: int, segment: int
) -> tuple[dict[str, Runner], dict[str, list[float]]]:
    """Start all three, let them take turns, and end them; tokens per second of every segment."""
    runners = {name: Runner(name, job) for name in CONTENDERS}
    for name, runner in runners.items():
        rate = runner.segment(WARM_UP_STEPS)
        say(f"  {name} has started ({rate:,.0f} tokens/s with all that a start takes)")
    rates = interleaved(
        {name: partial(runner.segment, segment) for name, runner in runners.items()},
        rounds=rounds,
        warm_up=1,
    )
    for runner in runners.values():
        runner.end()
    return runners, rates


def compare(job: Job, *, starts: int, rounds: int, segment: int) -> dict[str, Any]:
    """Tokens per second of all three, and modicum's ratio to each peer."""
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peaks = dict.fromkeys(CONTENDERS, 0)
    losses: dict[str, list[float]] = {}
    for _ in range(starts):
        runners, found = race(job, rounds=rounds, segment=segment)
        for name, runner in runners.items():
            rates[name] += found[name]
            peaks[name] = max(peaks[name], runner.peak_bytes)
            losses[name] = runner.losses
    apart = max((max(row) - min(row)) / min(row) for row in zip(*losses.values(), strict=True))
    if apart > 1e-2:
        raise SystemExit(f"the losses differ by {apart:.1%}: this compares different trainings")
    return {
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "ratio": {
            peer: paired_ratio(rates["modicum"], rates[peer]) for peer in rates if peer != "modicum"
        },
        "peak_resident_bytes": peaks,
        "losses": losses,
        "largest_relative_difference_of_losses": apart,
    }


def main() -> None:
    """Prepare, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; keeps no result")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="in each start")
    parser.add_argument("--segment", type=int, default=2, help="steps between two changes")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    arguments = parser.parse_args()
    steps = WARM_UP_STEPS + (arguments.rounds + 1) * arguments.segment
    figures: dict[str, Any] = {}
    with alone(), tempfile.TemporaryDirectory() as folder:
        for kind in arguments.kinds:
            job = Job(
                Path(folder),
                kind,
                arguments.rank,
                arguments.batch_size,
                arguments.sequence_length,
                INCLUDE,
                steps + 1,  # so that nobody comes to an end
            )
            if kind == arguments.kinds[0]:
                size = SIZES["quick" if arguments.quick else "full-size"]
                parameters = prepare(Path(folder), size, job)
                say(f"{parameters:,} parameters")
            say(kind)
            figures[kind] = compare(
                job,
                starts=arguments.starts,
                rounds=arguments.rounds,
                segment=arguments.segment,
            )
            for peer, ratio in figures[kind]["ratio"].items():
                quartiles = f"{ratio['lower_quartile']:.3f} to {ratio['upper_quartile']:.3f}"
                say(f"  modicum / {peer}: {ratio['median']:.3f} ({quartiles})")
        settings = vars(arguments) | size | {"parameters": parameters, "dtype": "float32"}
        if arguments.quick:
            print(json.dumps(figures, indent=2))
        else:
            write_result("trainer", figures, settings)


if __name__ == "__main__":
    main()
