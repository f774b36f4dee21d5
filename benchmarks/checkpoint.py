"""What a checkpoint costs training: this project's store next to `torch.distributed.checkpoint`.

One process trains a decoder of 34 million parameters with AdamW, some 400 MB of state, and saves it
in turn with `CheckpointStore(asynchronous=True)`, with `dcp.async_save`, and not at all. What a
save costs is the time in the call (stall), and how much longer the steps that follow take until the
checkpoint is on the disk, against steps that nothing disturbs (slowdown).

`dcp.async_save` is measured as its documentation calls it (`dcp`), and with what helps it here
(`dcp_tuned`): one stager for all saves, which keeps its memory, and a cached plan.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# As the `modicum` command sets it, for all arms: threads that wait do not spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import alone, interleaved, say, spread, write_result
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.nn import functional as F

from modicum.checkpoint import CheckpointStore
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.state import StateRegistry, model_view, optimizer_view
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama

SIZES: dict[str, dict[str, Any]] = {
    "full-size": {"layers": 8, "width": 512, "heads": 8, "vocabulary_size": 8192},
    "quick": {"layers": 2, "width": 128, "heads": 2, "vocabulary_size": 1024},
}
Done = Callable[[], bool]


class Training:
    """A model in training; its state is as large as it will be after one step."""

    def __init__(self, size: dict[str, Any], sequences: int, length: int) -> None:
        torch.manual_seed(0)
        config = ModelConfig(**size)
        self.model = Llama(config)
        groups = optimizer_groups(self.model, learning_rate=1e-4, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups, fused=True)
        self.tokens = torch.randint(config.vocabulary_size, (sequences, length + 1))
        self.registry = StateRegistry()
        self.registry.add_view(model_view(self.model))
        self.registry.add_view(optimizer_view(self.optimizer))

    def step(self) -> float:
        """One update; its seconds."""
        start = time.perf_counter()
        logits = self.model(self.tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start

    def nested(self) -> dict[str, dict[str, Any]]:
        """The state as `torch.distributed.checkpoint` takes it."""
        return {name: dict(view) for name, view in self.registry.read().items()}


class Ours:
    """`CheckpointStore`."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.number = training, 0
        self.store = CheckpointStore(folder, keep=1, asynchronous=True)

    def save(self) -> Done:
        """Begin a save; what tells whether it is done."""
        self.number += 1
        self.store.save(self.number, self.training.registry)
        return lambda: bool(self.store.poll())


class Theirs:
    """`dcp.async_save`, as it comes or tuned."""

    def __init__(self, training: Training, folder: Path, tuned: bool) -> None:
        self.training, self.folder, self.tuned, self.number = training, folder, tuned, 0
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def save(self) -> Done:
        """Begin a save; what tells whether it is done."""
        self.number += 1
        before, target = (self.folder / str(n) for n in (self.number - 1, self.number))
        if self.tuned:
            response = dcp.async_save(
                self.training.nested(),
                storage_writer=dcp.FileSystemWriter(target),
                planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
                async_stager=self.stager,
            )
        else:
            response = dcp.async_save(self.training.nested(), checkpoint_id=target)
        future: Future[Any] = (
            response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        )

        def done() -> bool:
            if future.done():
                future.result()
                shutil.rmtree(before, ignore_errors=True)  # as one who keeps the newest does
            return future.done()

        return done


def measured(
    training: Training, save: Callable[[], Done], calm: int, least: int
) -> dict[str, float]:
    """Stall and slowdown of one save.

    `calm` steps before it and as many after the write is done tell what a step takes when nothing
    disturbs it, so that a machine that becomes slower or faster meanwhile does little harm. At
    least `least` steps after the save count as those that it may have slowed.
    """
    before = [training.step() for _ in range(calm)]
    start = time.perf_counter()
    done = save()
    stall = time.perf_counter() - start
    steps = [training.step()]
    written = 1 if done() else 0
    while len(steps) < least or not written:
        steps.append(training.step())
        if not written and done():
            written = len(steps)
    after = [training.step() for _ in range(calm)]
    undisturbed = (median(before) + median(after)) / 2
    slowdown = sum(steps) - len(steps) * undisturbed
    return {
        "stall": stall,
        "slowdown": slowdown,
        "total": stall + slowdown,
        "steps_until_written": float(written),
        "undisturbed_step": undisturbed,
    }


def main() -> None:
    """Measure in turn, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--size", choices=SIZES, default="full-size")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--calm", type=int, default=4, help="steps before each save and after it")
    parser.add_argument("--least", type=int, default=2, help="steps measured after each save")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    with alone(), tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        # dcp.async_save wants a group, if only of one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        training = Training(SIZES[arguments.size], arguments.sequences, arguments.length)
        training.step()
        size = sum(
            value.nbytes
            for view in training.nested().values()
            for value in view.values()
            if isinstance(value, torch.Tensor)
        )
        say(f"{size / 1e6:.0f} MB of state")
        ours = Ours(training, Path(name) / "ours")
        savers: dict[str, Callable[[], Done]] = {
            "none": lambda: lambda: True,
            "ours": ours.save,
        }
        for arm, tuned in (("dcp", False), ("dcp_tuned", True)):
            savers[arm] = Theirs(training, Path(name) / arm, tuned).save
        kept: dict[str, list[dict[str, float]]] = {name: [] for name in savers}

        def contender(name: str) -> float:
            found = measured(training, savers[name], arguments.calm, arguments.least)
            kept[name].append(found)
            say(f"{name:12}" + "".join(f" {key} {value:.3f}" for key, value in found.items()))
            return found["total"]

        totals = interleaved(
            {name: partial(contender, name) for name in savers},
            rounds=arguments.rounds,
        )
        dist.destroy_process_group()
    figures: dict[str, Any] = {"state_bytes": size}
    for name, found in kept.items():
        figures[name] = {key: spread([f[key] for f in found[1:]]) for key in found[0]}
    ours_total = figures["ours"]["total"]["median"]
    figures["ratio"] = {arm: ours_total / median(totals[arm]) for arm in ("dcp", "dcp_tuned")}
    say(f"ours {ours_total:.3f} s; over dcp as it comes and tuned: {figures['ratio']}")
    folder = None if arguments.folder is None else str(arguments.folder)
    write_result("checkpoint", figures, vars(arguments) | {"folder": folder})


if __name__ == "__main__":
    main()
