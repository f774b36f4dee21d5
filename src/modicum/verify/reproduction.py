"""A run made anew from what its folder says, and how near the second one comes to the first.

Recipe, seeds, choices, ranks and the date that it may write are the run's; data, tokenizer and
everything else that a run makes before its first update are made again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError
from modicum.core.machine import pick_device
from modicum.core.progress import StageProgress
from modicum.core.units import format_duration
from modicum.data.tokenizer_files import exported_files
from modicum.parallel.launch import shared_environment
from modicum.tasks import task_of
from modicum.trainer.beginnings import changed_inputs, environment
from modicum.trainer.folder import EVALUATIONS, METRICS, PLAN, RunFolder
from modicum.verify.compared import relative, result_differences, tensor_distance
from modicum.verify.copies import begun_run, copied, ranks_of
from modicum.verify.findings import Verification, Wanting
from modicum.verify.processes import launched
from modicum.verify.stretch import Stretch
from modicum.verify.traces import results

# How far losses may be apart where versions or machine differ, over themselves: what is rounded in
# another way grows with the steps.
TOLERANCE = 1e-2
_MICRO = "training.micro_batch_size"


def reproduce(
    run: str | Path,
    out: str | Path | None = None,
    *,
    steps: int | None = None,
    ranks: int | None = None,
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda text: None,
    progress: StageProgress = lambda *_: None,
) -> Verification:
    """Make a run anew in another folder, and compare losses, evaluations and weights.

    Where the record says that all is as it was (versions, code, processor, kernels, threads,
    ranks), they must be equal to the bit. Else losses must agree within a tolerance; how far the
    weights are apart is reported.

    Args:
        run: a run folder.
        out: the new one; `RUN-again` where it is not given.
        steps: the first so many alone; None: all that the run has done.
        ranks: None: as many as the run had.
        tolerance: relative; None: to the bit where that can be, else 1e-2.
        say: hears what differs here and what it will cost, before it begins.

    Raises:
        InputError: there is no run, the new folder is taken, an input of the run has changed or is
            gone, or the run began with another run's state.
    """
    made = Reproduction.of(run, out, steps, ranks, tolerance)
    for sentence in made.beforehand():
        say(sentence)
    progress(f"steps 1 to {made.steps}, in {made.out}", 0, None)
    made.make()
    progress("comparing", 0, None)
    return made.compared()


@dataclass
class Reproduction:
    """A run, the folder in which it is made anew, and what is not as it was.

    Args:
        steps: how many are made; `last` whether they are all of a finished run.
        differs: in words, what may make other bits here; nothing: they must be the same.
    """

    run: RunFolder
    out: Path
    steps: int
    last: bool
    ranks: int
    differs: list[str]
    tolerance: float
    checks: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Wanting] = field(default_factory=list)

    @classmethod
    def of(
        cls, run: str | Path, out: str | Path | None, steps: int | None, ranks: int | None,
        tolerance: float | None,
    ) -> Reproduction:  # fmt: skip
        """Look at the run and at what is here."""
        folder = begun_run(run)
        record, recipe = folder.read_record(), folder.read_recipe()
        target = Path(out or folder.path.with_name(f"{folder.path.name}-again"))
        if target.exists() and any(target.iterdir()):
            problem = "is there already, and a run is made anew in a new folder"
            raise InputError(problem, file=target, field="--out")
        if record.get("forked_from"):
            problem = "began with another run's state, so it is not made of its recipe alone"
            raise InputError(problem, file=folder.path, field="forked_from")
        done = len(folder.rows(METRICS))
        if not done:
            raise InputError("has done no step, so there is nothing to compare", file=folder.path)
        _refuse_changes(folder)
        asked = min(steps or done, done)
        count = ranks or ranks_of(folder)
        here = environment(pick_device(recipe.training.device).type, count)
        if count > 1:  # they share the cores, and this process has them all
            threads = shared_environment(count).get("OMP_NUM_THREADS", here["threads"])
            here |= {"threads": threads}
        differs = list(_differences(folder, record, here))
        allowed = (TOLERANCE if differs else 0.0) if tolerance is None else tolerance
        last = asked == done and record.get("status") == "finished"
        return cls(folder, target, asked, last, count, differs, allowed)

    def beforehand(self) -> Iterator[str]:
        """What is to be known before it begins."""
        if self.differs:
            yield "not as it was: " + "; ".join(self.differs)
        within = f"within {self.tolerance:g}" if self.tolerance else "to the bit"
        seconds = [row["seconds"] for row in self.run.rows(METRICS)]
        took = format_duration(self.steps * median(seconds))
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        yield f"{self.steps} steps{ranks}, about {took} by the run's record, compared {within}"

    def make(self) -> None:
        """Make the run anew, with the date that it writes into its conversations."""
        copied(self.run, self.out, 0, parts=())
        kept = self.run.path / "tokenizer"
        if dates := set(kept.glob("*")) - set(exported_files(kept)):
            (self.out / "tokenizer").mkdir()
            for file in dates:
                shutil.copyfile(file, self.out / "tokenizer" / file.name)
        launched(Stretch(self.out, self.steps, ranks=self.ranks, finish=self.last))

    # Comparing

    def compared(self) -> Verification:
        """What of the new run is not the old one's."""
        again = RunFolder(self.out)
        self.checks.append({"check": "environment", "differs": self.differs})
        for name in (METRICS, EVALUATIONS):
            old, new = (_by_step(each, name, self.steps) for each in (self.run, again))
            self._rows(name, old, new)
        self._weights()
        self.checks.append({"check": "folder", "path": str(self.out)})
        return Verification(self.checks, self.findings)

    def _rows(
        self, name: str, old: Mapping[int, dict[str, Any]], new: Mapping[int, dict[str, Any]]
    ) -> None:
        equal, largest, first = 0, 0.0, None
        for step, row in old.items():
            # A run that was extended, or is not done in full, has evaluations that this has not.
            if step not in new and name == EVALUATIONS:
                continue
            found = new.get(step, {})
            if row == found:
                equal += 1
                continue
            apart = relative(row.get("loss"), found.get("loss"))
            largest = max(largest, apart)
            first = step if first is None else first
            if apart > self.tolerance or not self.tolerance:
                self._note(name, list(result_differences(row, found, step)))
        compared = [step for step in old if step in new]
        self.checks.append({"check": name.removesuffix(".jsonl"), "rows": len(compared),
                            "equal": equal, "first": first, "largest": largest,
                            "tolerance": self.tolerance})  # fmt: skip

    def _note(self, name: str, found: list[Wanting]) -> None:
        """Take the first finding of a file."""
        if found and not any(known.where.endswith(name) for known in self.findings):
            one = found[0]
            self.findings.append(
                Wanting(one.what, f"{one.where} of {name}", one.expected, one.found)
            )

    def _weights(self) -> None:
        """Compare the state of the newest checkpoint that both runs have."""
        stores = [CheckpointStore(path / "checkpoints") for path in (self.run.path, self.out)]
        both = set(stores[0].steps()) & set(stores[1].steps())
        if not both:
            kept = ", ".join(map(str, stores[0].steps())) or "none"
            self.checks.append({"check": "weights", "step": None, "kept": kept})
            return
        step, exact = max(both), not self.tolerance
        states = [store.read(step).state for store in stores]
        equal, every, largest = 0, 0, 0.0
        for view in states[0].keys() if exact else ["model"]:
            mine, theirs = states[0][view], states[1].get(view)
            for key in mine:
                apart = _distance(mine[key], None if theirs is None else theirs.get(key))
                equal, every, largest = equal + (apart == 0.0), every + 1, max(largest, apart)
                if apart and exact and not any(each.what == view for each in self.findings):
                    place = f"{key} after step {step}"
                    found = f"{apart:.2g} of its norm apart"
                    self.findings.append(Wanting(view, place, "as in the run", found))
        self.checks.append({"check": "weights", "step": step, "entries": every, "equal": equal,
                            "largest": largest})  # fmt: skip


def _refuse_changes(run: RunFolder) -> None:
    """Refuse inputs that are not what they were.

    Raises:
        InputError: with the first of them.
    """
    recipe, before = run.read_recipe(), run.read_record().get("inputs", {})
    task = task_of(recipe)
    changed = changed_inputs(recipe, task, task.look(recipe), before)
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        problem = f"is not what it was when the run began{more}; put it back as it was"
        raise InputError(problem, file=changed[0])


def _differences(
    run: RunFolder, record: Mapping[str, Any], here: Mapping[str, Any]
) -> Iterator[str]:
    """What may make other bits than the run's, in words."""
    there = record.get("environments") or []
    if not there:
        yield "the run's record does not say where its steps were made"
        there = [{**record.get("versions", {}), "modicum": record.get("modicum")}]
    elif len(there) > 1:
        steps = ", ".join(str(each["after_step"]) for each in there[1:])
        yield f"the run itself changed its place, versions or ranks after step {steps}"
    for name, value in there[-1].items():
        if name != "after_step" and here.get(name) != value:
            yield f"{name} was {value}, here it is {here.get(name, 'not set')}"
    if run.read_recipe().data.streaming:
        yield "its data is streamed, and nobody has read all of it to know whether it has changed"
    if here["device"] != "cpu":
        yield "an accelerator's kernels may add in another order each time"
    sizes = {
        choice["value"]
        for row in run.rows(PLAN)
        for choice in row["choices"]
        if choice["field"] == _MICRO
    }
    if len(sizes) > 1:
        yield "micro-batches became smaller in the middle of the run"


def _by_step(run: RunFolder, name: str, steps: int) -> dict[int, dict[str, Any]]:
    """The rows up to a step, without what depends on the clock."""
    rows = {row["step"]: row for row in run.rows(name) if row["step"] <= steps}
    if name == METRICS:
        return {step: results(row) for step, row in rows.items()}
    return {
        step: {key: value for key, value in row.items() if "second" not in key}
        for step, row in rows.items()
    }


def _distance(one: Any, other: Any) -> float:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return tensor_distance(one, other)
    return 0.0 if one == other else math.inf
