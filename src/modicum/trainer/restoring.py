"""The trained model of a finished run, as its checkpoint holds it: the measure of its exports."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modicum.adapters import AttachedAdapter
from modicum.adapters.preparation import Preparation
from modicum.checkpoint import Checkpoint, CheckpointStore
from modicum.core.contracts.state import StateRegistry
from modicum.core.errors import InputError
from modicum.core.progress import StageProgress
from modicum.core.ranks.ranks import Ranks
from modicum.core.run_folders import no_run
from modicum.core.weight_digests import changed_weights
from modicum.planner import Plan
from modicum.planner.planning import plan_anyway
from modicum.recipe import Recipe
from modicum.tasks import Data, task_of
from modicum.trainer.best import best_of
from modicum.trainer.build import build_model, build_strategy
from modicum.trainer.folder import BASE, EVALUATIONS, PLAN, PREPARED, RunFolder, operated_at
from modicum.trainer.surgery import with_surgery


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its folder, its recipe planned anew for one process, and its checkpoint.

    Args:
        checkpoint: of the step whose weights were exported.
        base: the folder of the base model that the recipe names; None where the model was new.
    """

    folder: RunFolder
    plan: Plan
    checkpoint: Checkpoint
    base: Path | None

    @classmethod
    def of(cls, path: str | Path) -> FinishedRun:
        """Look at a run folder; nothing in it is written.

        Raises:
            InputError: there is no run, it has not finished, or its checkpoint is damaged or gone.
        """
        folder = RunFolder(Path(path))
        if not folder.path.is_dir() or not folder.started():
            raise no_run(folder.path)
        record = folder.read_record()
        if record.get("status") != "finished":
            problem = "this run has not finished; the same `modicum train` command resumes it"
            raise InputError(problem, file=folder.path)
        recipe = folder.read_recipe()
        checkpoint = _exported(folder, recipe)
        plan, _ = plan_anyway(recipe)
        base = plan.inputs.model_folder
        if recipe.method("compress") is not None:
            inputs = plan.task.compressed(plan.inputs, folder.path / BASE)
            plan = replace(plan, inputs=inputs)
        for row in folder.rows(PLAN):  # layers that changed their shapes while the run trained
            if 0 <= operated_at(row) <= checkpoint.step:
                plan = with_surgery(plan, row["surgery"], folder.path)
        return cls(folder, plan, checkpoint, base)

    def changed_base(self) -> list[str]:
        """The base model's weight files that are not what they were when the run began."""
        return changed_weights(self.base, self.checkpoint.state["inputs"].get("model", {}))

    @contextmanager
    def data(self, progress: StageProgress) -> Iterator[Data[Any]]:
        """The run's data by its own tokenizer, read from links to the run's files.

        Whatever has to be made anew is made in a temporary folder.
        """
        with tempfile.TemporaryDirectory(prefix="modicum-verify-") as name:
            for part in ("data", "tokenizer"):
                if (source := self.folder.path / part).is_dir():
                    shutil.copytree(source, Path(name) / part, copy_function=_linked)
            plan = self.plan
            yield plan.task.prepare(plan.recipe, plan.inputs, Path(name), progress, Ranks())

    def restored(self, data: Data[Any]) -> tuple[Any, AttachedAdapter | None]:
        """The model with the weights of the checkpoint, in evaluation mode, and its adapter.

        Raises:
            InputError: the checkpoint does not fit the model.
        """
        prepared = self.folder.path / PREPARED
        ranks = Ranks()
        strategy = build_strategy(self.plan, ranks)
        model, adapter = build_model(
            self.plan,
            self.plan.task.config(self.plan.inputs, data),
            strategy,
            kept=self.checkpoint.state["model"],
            prepared=Preparation.load(prepared) if prepared.is_dir() else None,
        )
        registry = StateRegistry()
        strategy.register(registry, model)
        others = set(self.checkpoint.content["views"]) - {"model"}
        self.checkpoint.load(registry, skip=others)
        return model.eval(), adapter


def _linked(source: str, target: str) -> None:
    """A hard link to a file; a copy where the two are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _exported(folder: RunFolder, recipe: Recipe) -> Checkpoint:
    """The checkpoint whose weights the run exported: its best, where it keeps that, or its last.

    Raises:
        InputError: it is damaged or gone.
    """
    store = CheckpointStore(folder.path / "checkpoints")
    step: int | None = None
    if recipe.evaluation.keep_best:
        step = best_of(folder.rows(EVALUATIONS), recipe.evaluation, task_of(recipe).better).step
    step = folder.read_record().get("steps") if step is None else step
    if step is None or step not in store.steps():
        problem = f"the checkpoint of step {step}, whose weights were exported, is gone"
        raise InputError(problem, file=store.folder)
    return Checkpoint.of(store.path(step))
