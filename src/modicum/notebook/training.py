"""`modicum.train`: a plan is run, in a folder of its own, and gives the run as a value."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import NoneType
from typing import Any

from modicum import trainer
from modicum.core.arguments import check_callable, check_type
from modicum.core.progress import Listener
from modicum.core.ranks.ranks import Ranks
from modicum.notebook.progress import NotebookProgress, notebook_display
from modicum.notebook.trained_run import TrainedRun
from modicum.planner import Plan
from modicum.recipe import Recipe
from modicum.recipe.training import LENGTHS

RUNS = Path("runs")
# What may be another when the same call resumes or extends a run.
_OF_A_START = ("parallel", "tracking", "export", "cost")


def train(
    plan: Plan,
    out: str | Path | None = None,
    *,
    listener: Listener | None = None,
    fork: str | Path | None = None,
    restart: bool = False,
    ranks: Ranks | None = None,
) -> TrainedRun:
    """Run a plan, or resume where an interrupted run of it stopped.

    Args:
        plan: from `modicum.plan`.
        out: the run folder; by default `default_folder(plan.recipe)`, the same for the same recipe,
            so that the same call resumes. Ranks on several hosts need one that all see.
        listener: is called with every event, as `docs/reference/run-folder.md` lists them; by
            default a line under the cell of a notebook, and nothing elsewhere.
        fork: a run folder whose newest checkpoint a *new* run starts from.
        restart: begin anew and replace the run of this recipe that is there.
        ranks: this process among those that were joined (`core.ranks.ranks.joined`), each of which
            calls this with the same plan.

    Returns:
        The content of `run.json` as a dict (on rank 0), with the run's model, adapter, tokenizer
        and curves as attributes.

    Raises:
        InputError: the folder is in use, holds another run or other files; the data is wrong;
            a rank has another recipe, code or model; training diverged; the disk is full; an
            argument is of another type.
        Interrupted: SIGTERM or Ctrl-C (in a notebook: interrupt the kernel) on any rank; the state
            is saved, and the same call resumes.
        PeerLost: another rank is gone.
    """
    _check(plan, out, listener, fork, ranks)
    folder = default_folder(plan.recipe) if out is None else Path(out)
    with ExitStack() as stack:
        if listener is None and (display := notebook_display()) is not None:
            listener = stack.enter_context(NotebookProgress(display))
        content = trainer.train(
            plan,
            folder,
            listener=listener or (lambda event: None),
            fork=fork,
            restart=restart,
            ranks=ranks,
        )
    return TrainedRun(content, folder)


def _check(plan: object, out: object, listener: Any, fork: object, ranks: object) -> None:
    """Refuse arguments of other types before anything is written."""
    planned = "modicum.train(modicum.plan(recipe))"
    file = "modicum.train(modicum.plan(modicum.recipe_yaml.load(path)))"
    instead = {
        Recipe: planned,
        str: file,
        Path: file,
        TrainedRun: f"{planned}; the same recipe resumes or extends the run",
        dict: "modicum.train(modicum.plan(modicum.Recipe(**fields)))",
    }
    check_type(plan, Plan, "train(plan)", "a modicum.Plan", instead)
    for name, path in (("out", out), ("fork", fork)):
        check_type(path, (str, os.PathLike, NoneType), f"train({name})", "a path, or None")
    check_callable(listener, "train(listener)")
    check_type(
        ranks, (Ranks, NoneType), "train(ranks)", "joined ranks, or None",
        {int: "modicum.plan(recipe, ranks=N), or start N ranks: modicum train --ranks N"},
    )  # fmt: skip


def default_folder(recipe: Recipe) -> Path:
    """The run folder of a recipe that names none: `runs/`, what is trained, a digest of the recipe.

    More steps, epochs or tokens, other ranks and other trackers are no other run.

    >>> default_folder(Recipe(training={"steps": 10})).parts[:1]
    ('runs',)
    >>> default_folder(Recipe()) == default_folder(Recipe(training={"steps": 10}))
    True
    """
    values = recipe.anchored().plain()
    for length in LENGTHS:
        values["training"].pop(length, None)
    values["checkpoint"].pop("asynchronous")
    for name in _OF_A_START:
        values.pop(name, None)
    text = json.dumps(values, sort_keys=True, default=str)
    kind = "full" if recipe.adapter is None else recipe.adapter["method"]
    return RUNS / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
