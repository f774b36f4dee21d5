"""What two runs of one recipe differ in, and what an exported model scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum import adapters
from modicum.checkpoint import CheckpointStore
from modicum.core.layers.full_model import FullModel
from modicum.core.layers.map import silence
from modicum.core.ranks.ranks import Ranks
from modicum.core.weight_digests import weight_digests
from modicum.models import convnet, huggingface, recurrent
from modicum.planner import Plan, plan
from modicum.recipe import Recipe
from modicum.tasks.text import formed
from modicum.trainer.evaluate import evaluate

# What reads the model that a run of a task has left.
_LOADERS: dict[str, Callable[[Path], nn.Module]] = {
    "images": convnet.load,
    "sequences": recurrent.load,
}
# What a row has that depends on the clock, the machine or the process.
_OF_THE_PROCESS = {
    "seconds",
    "seconds_in_fp32",
    "elapsed",
    "data_seconds",
    "tokens_per_second",
    "bytes",
}


def differing(one: Path, other: Path) -> list[str]:
    """What is not the same to the bit: rows of losses, rows of evaluations, the final state."""
    found = []
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        rows = [list(_rows(folder / name)) for folder in (one, other)]
        if rows[0] != rows[1]:
            steps = [a["step"] for a, b in zip(*rows, strict=False) if a != b]
            place = f"from step {steps[0]}" if steps else f"{len(rows[0])} and {len(rows[1])} rows"
            found.append(f"{name} differs, {place}")
    return found + [f"the state differs in {name}" for name in _differing_state(one, other)][:3]


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_text().splitlines():
        row = json.loads(line)
        yield {key: value for key, value in row.items() if key not in _OF_THE_PROCESS}


def _differing_state(one: Path, other: Path) -> Iterator[str]:
    """Names of the tensors and values that two runs' last checkpoints do not share."""
    newest = [CheckpointStore(folder / "checkpoints").newest() for folder in (one, other)]
    if newest[0] is None or newest[1] is None:
        yield "a checkpoint, which is not there"
        return
    states = [found.state for found in newest if found is not None]
    for view in sorted(states[0].keys() | states[1].keys()):
        if not all(view in state for state in states):
            yield view
            continue
        mine, theirs = (state[view] for state in states)
        for key in sorted({*mine, *theirs}):
            if key not in mine or key not in theirs or not _same(mine[key], theirs[key]):
                yield f"{view}/{key}"


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def exported_score(values: dict[str, Any], run: Path) -> float:
    """The loss that the exported model has on the data that the run was evaluated on.

    It is loaded as anybody would load it, by one process.
    """
    recipe = Recipe(**values)
    made = plan(recipe.changed(parallel__strategy="auto", comm=None))
    data = made.task.prepare(recipe, made.inputs, run, lambda *_: None, Ranks())
    assert data.validation is not None
    result = evaluate(
        made.task,
        exported(made, run),
        data.validation,
        rows=recipe.evaluation.rows,
        micro_batch_size=made.prediction.choice.micro_batch_size,
        precision=recipe.training.precision,
        ranks=Ranks(),
        check=lambda: None,
    )
    return float(result["loss"])


def exported(made: Plan, run: Path) -> nn.Module:
    """The model that a finished run has left.

    An adapter for the full model is on that one, without what the run's model had lost: so it is
    what was trained.
    """
    recipe = made.recipe
    if recipe.task is not None:
        return _LOADERS[recipe.task["method"]](run / "model")
    if recipe.adapter is None:
        small = run / "compressed"
        return huggingface.load(small if small.is_dir() else run / "model")
    half = recipe.training.precision == "bf16"
    folder = adapters.base_model_of(run / "adapter")
    assert folder is not None
    dtype = torch.bfloat16 if half else torch.float32
    forms = formed(recipe, huggingface.read_config(folder), ["linear"]).forms
    model = huggingface.load(folder, dtype=dtype, linear=forms)
    part = FullModel.read(run / "base")
    if part is not None and part.weights == weight_digests(Path(folder)):
        for lost in part.reduction.parts:
            silence(model, lost.units, lost.removed)
    adapters.load(model, run / "adapter")
    return model
