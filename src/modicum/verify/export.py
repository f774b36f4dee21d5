"""Whether what a run exported computes what was trained, step by step of the way out.

The trained model is restored from the run's checkpoint. All models compute in fp32, so that what
differs are their weights: what rounding, merging or a file has lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.machine.memory import release
from modicum.core.progress import StageProgress
from modicum.tasks import CausalLM, Data, Task
from modicum.tasks.images import ImageTask
from modicum.tasks.sequences import SequenceTask
from modicum.tasks.text_classes import TextClassTask
from modicum.trainer.restoring import FinishedRun
from modicum.verify.class_probes import ImageProbe, SequenceProbe, TextClassProbe
from modicum.verify.export_probe import ExportProbe, Incomplete, Loaded
from modicum.verify.findings import Verification, Wanting
from modicum.verify.outputs import Outputs, distance
from modicum.verify.text_probe import TextProbe

# How far logits may be from the trained model's, by the dtype that the weights were rounded to.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
# Nor may more than this share of what the adapter changes in the logits be lost ...
LOST = 0.25
# ... where that is above what fp32 itself loses.
NOISE = 1e-5
# What there is for the tasks that modicum has.
_KINDS: dict[type[Task[Any, Any, Any]], type[ExportProbe]] = {
    CausalLM: TextProbe,
    TextClassTask: TextClassProbe,
    ImageTask: ImageProbe,
    SequenceTask: SequenceProbe,
}


def verify_export(
    run: str | Path,
    *,
    against: str | Path | None = None,
    prompts: int | None = None,
    tokens: int = 16,
    progress: StageProgress = lambda *_: None,
) -> Verification:
    """Hold what a run exported against its trained weights: logits, and greedy text or class.

    Looked at are what the run wrote, read back; its adapter merged into the base as `modicum
    merge` does; its `compressed/` folder; and `against`. Nothing is written.

    Args:
        run: a finished run.
        against: a folder that was made of it: a model, an adapter, another run.
        prompts: how many beginnings of rows of the validation data, by default 4, or of a
            classifier how many rows, by default 32; of the training data where there is no other.
        tokens: of text, written after each prompt, at the most.

    Raises:
        InputError: there is no finished run, its task is not one of modicum's, its checkpoint or
            export is gone, or `against` is no model.
    """
    done = FinishedRun.of(run)
    kind = next((own for task, own in _KINDS.items() if isinstance(done.plan.task, task)), None)
    if kind is None:
        problem = (
            "exports of this task are not compared; those of text, classes of texts, images and "
            "sequences are"
        )
        raise InputError(problem, field="task.method", value=done.plan.task.name)
    if changed := done.changed_base():
        expected, found = "the weights that the run began with", f"others in {', '.join(changed)}"
        finding = Wanting("base", str(done.base), expected, found)
        return Verification([{"check": "base", "changed": changed}], [finding])
    with done.data(progress) as data:
        probe = kind(done, data, prompts, tokens)
        progress("restoring the trained model", 0, None)
        trial = _Trial(probe, *_trained(probe, data))
    trial.checks.append(probe.check())
    for name, where, make in _steps(probe, against):
        progress(f"{name}: {where}", 0, None)
        trial.look(name, where, make)
        release()
    return Verification(trial.checks, trial.findings)


def _trained(probe: ExportProbe, data: Data[Any]) -> tuple[Outputs, float | None]:
    """The trained model's outputs, and how far they are from those without its adapter."""
    model, adapter = probe.done.restored(data)
    found = probe.answers(model.float())
    if adapter is None:
        return found, None
    if adapter.for_full_model() is not None:
        raise InputError(
            "this run's adapter is for the full model, which computes something else than the "
            "pruned one that was trained, so there is nothing that it must equal",
            file=probe.done.folder.path,
        )
    adapter.detach()
    return found, distance(found, probe.changed(model, found))


@dataclass
class _Trial:
    """The trained model's outputs, and what was found in comparing others with them."""

    probe: ExportProbe
    trained: Outputs
    change: float | None
    checks: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Wanting] = field(default_factory=list)

    def look(self, name: str, where: str, make: Callable[[], Loaded]) -> None:
        """Compare one step's model; a merge that the method does not have is noted."""
        place = f"{name}: {where}"
        try:
            made = make()
        except _NotMergeable as refused:
            self.checks.append({"check": name, "where": where, "skipped": str(refused)})
            return
        except Incomplete as lacking:
            self.checks.append({"check": name, "where": where, "skipped": "it is incomplete"})
            self.findings.append(replace(lacking.finding, where=place))
            return
        exact = name == "exported" and made.adapter is not None
        dtype = torch.float32 if exact else coarsest(made.model)
        allowed = self._allowed(dtype)
        made.model.float()
        found = self.probe.aligned(made, self.probe.answers(made.model, self.trained))
        error = distance(self.trained, found)
        self.checks.append({
            "check": name, "where": where, "dtype": str(dtype).removeprefix("torch."),
            "error": error, "allowed": allowed, "adapter_changes": self.change,
            **self.probe.same(self.trained, found),
        })  # fmt: skip
        if error > allowed:
            self.findings.append(self._too_far(made, found, error, allowed, place))
        self.findings += self.probe.findings(
            made, self.trained, found, place, within=error <= allowed
        )

    def _too_far(
        self, made: Loaded, found: Outputs, error: float, allowed: float, place: str
    ) -> Wanting:
        said = f"{error:.2g}"
        if self.change is not None:
            said += f", where the adapter changes the logits by {self.change:.2g}"
        what = self.probe.reason(made, self.trained, found, allowed) or "logits"
        said += self.probe.lost(self.trained, found)
        return Wanting(what, place, f"a relative error of at most {allowed:.2g}", said)

    def _allowed(self, dtype: torch.dtype) -> float:
        limit = TOLERANCES[dtype]
        return limit if self.change is None else min(limit, max(LOST * self.change, NOISE))


class _NotMergeable(Exception):
    """The run's adapter has no dense form."""


def _steps(
    probe: ExportProbe, against: str | Path | None
) -> Iterator[tuple[str, str, Callable[[], Loaded]]]:
    """The models to look at: what the step is called, where it is, and how it is loaded."""
    path = probe.done.folder.path
    adapted = (path / "adapter").is_dir()
    made = path / ("adapter" if adapted else "model")
    yield "exported", str(made), lambda: probe.load(path)
    if adapted:
        yield "merged", f"{made} into its base", lambda: _merged(probe, path)
    small = path / "compressed"
    if small.is_dir():
        yield "compressed", str(small), lambda: probe.load_other(small)
    if against is not None:
        folder = Path(against)
        yield "against", str(folder), lambda: probe.load_other(folder)


def _merged(probe: ExportProbe, run: Path) -> Loaded:
    made = probe.load(run)
    assert made.adapter is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rounding, which is measured here
        try:
            made.adapter.merge(dense=next(made.model.parameters()).dtype)
        except InputError as error:
            raise _NotMergeable(error.problem) from None
    made.adapter.detach()
    return made


def coarsest(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters that rounds the most."""
    there = {parameter.dtype for parameter in model.parameters()}
    return max((each for each in TOLERANCES if each in there), key=TOLERANCES.__getitem__)
