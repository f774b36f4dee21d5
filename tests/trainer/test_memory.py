"""Runs that come to have less memory than they were planned for, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Trains as a rank or alone. Rank `limited` may not take more address space than it has, and
# `spare` bytes, once `step` updates are done; a start after that has all it wants again.
SCRIPT = """
import json, os, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
# What a run loads comes before the limit: how much address space it takes, PyTorch's build decides.
import torch._dynamo
trained = torch.nn.Parameter(torch.ones(64, 64))
torch.nn.functional.linear(trained, trained).sum().backward()
torch.optim.AdamW([trained], fused=True).step()
from modicum.core.errors import ModicumError
from modicum.core.ranks.ranks import joined
from modicum.recipe import Recipe
from modicum.trainer import continued, train

values, folder, limited, step, spare = json.loads(sys.argv[1])
with joined("cpu") as ranks:
    def listener(event):
        if event["event"] == "memory":
            print(event["message"], flush=True)
        if (event["event"], event.get("step"), ranks.rank) == ("step", step, limited):
            used = next(
                int(line.split()[1]) * 1024
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmSize:")
            )
            resource.setrlimit(resource.RLIMIT_AS, (used + spare, resource.RLIM_INFINITY))
    try:
        train(
            continued(Recipe(**values), folder, ranks=ranks), folder, ranks=ranks, listener=listener
        )
    except ModicumError as error:
        print(error, file=sys.stderr)
        code = error.exit_code
    else:
        code = 0
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # as the command's ranks do: a thread of gloo may still want the interpreter
"""
SUPERVISOR = """
import sys
from modicum.parallel.launch import Supervisor
sys.exit(Supervisor([sys.executable, *sys.argv[1:]], 2).run())
"""


# Another one takes address space in advance, and keeps what tensors leave.
pytestmark = pytest.mark.skipif(
    "alloc" in os.environ.get("LD_PRELOAD", ""),
    reason="a limit of address space is no limit of memory with this allocator",
)


@pytest.fixture
def values(dataset: Path) -> dict[str, Any]:
    """Logits of 32 rows take 67 MB: so large a block is the system's, and given back at once."""
    return {
        "data": {"path": str(dataset), "sequence_length": 64, "validation_fraction": 0},
        "model": {"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 8192},
        "training": {"steps": 6, "batch_size": 32, "learning_rate": 1e-2, "compile": "none"},
        "checkpoint": {"every": 2},
        "samples": {"count": 0},
    }


def start(command: list[str], *arguments: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(
        [*command, "-c", SCRIPT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder, "metrics.jsonl")]


def sizes(folder: Path) -> list[int]:
    return [
        choice["value"]
        for row in rows(folder, "plan.jsonl")
        for choice in row["choices"]
        if choice["field"] == "training.micro_batch_size"
    ]


@pytest.mark.expensive
def test_memory_that_runs_out_late_splits_the_micro_batch(values, tmp_path):
    calm, tight = tmp_path / "calm", tmp_path / "tight"
    assert start([sys.executable], values, str(calm), -1, 0, 0).returncode == 0
    done = start([sys.executable], values, str(tight), 0, 3, 120_000_000)
    assert done.returncode == 0, done.stderr
    assert "memory ran out with 32 at a time, before step 4 was done" in done.stdout
    # The same rows in the same updates, added up in another order.
    assert losses(tight) == pytest.approx(losses(calm), rel=1e-5)
    assert [row["tokens"] for row in rows(tight, "metrics.jsonl")] == [
        row["tokens"] for row in rows(calm, "metrics.jsonl")
    ]
    assert sizes(calm)[-1] == 32
    assert sizes(tight)[0] == 32
    assert sizes(tight)[-1] <= 16


@pytest.mark.expensive
@pytest.mark.ranks
def test_memory_that_runs_out_on_a_rank_starts_all_anew_with_less(values, tmp_path):
    values["training"]["batch_size"] = 64
    calm, tight = tmp_path / "calm", tmp_path / "tight"
    assert start([sys.executable], values, str(calm), -1, 0, 0).returncode == 0
    done = start([sys.executable, "-c", SUPERVISOR], values, str(tight), 1, 3, 120_000_000)
    assert done.returncode == 0, done.stderr
    assert losses(tight) == pytest.approx(losses(calm), rel=1e-5)
    assert sizes(tight)[0] == 32
    assert sizes(tight)[-1] <= 16
    assert [row["step"] for row in rows(tight, "metrics.jsonl")] == list(range(1, 7))


@pytest.mark.expensive
def test_a_first_batch_that_does_not_fit_is_found_before_the_first_step(values, tmp_path):
    values["training"]["micro_batch_size"] = 32
    script = SCRIPT.replace(
        '(event["event"], event.get("step"), ranks.rank) == ("step", step, limited)',
        'event.get("name") == "building"',
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            script,
            json.dumps([values, str(tmp_path / "run"), 0, 0, 260_000_000]),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "before step 1 was done" in done.stdout
    assert sizes(tmp_path / "run")[-1] < 32
