"""What all proofs share: figures, criteria, the null, the verdict.

The proof of a method is a function `prove(run: ProofRun) -> None`, in
`modicum/proofs/<room>/<name>.py` or, for a plugin, in the plugin's own file. It measures, notes
`figures`, and states criteria with `at_most` and `at_least`; all else is done here.

A proof that cannot fail proves nothing. So what is examined goes through `contender`, which also
names its null: the baseline in the method's place, or the operation made slightly wrong. In a null
run it hands out the null, and each null must then miss one of the criteria that follow it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar

from modicum.core.contracts.catalog import MethodRecord, find
from modicum.core.contracts.method import Info
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, write_json
from modicum.core.progress import Listener

T = TypeVar("T")
N = TypeVar("N")


@dataclass(frozen=True)
class Figure:
    """One quantity of the method and of its baseline; `claimed` is what the paper says of it."""

    name: str
    method: float
    baseline: float
    claimed: str = ""

    @property
    def ratio(self) -> float:
        """Method over baseline; no number, which passes no criterion, where the baseline is 0."""
        return self.method / self.baseline if self.baseline else math.nan

    def as_json(self) -> dict[str, Any]:
        """The figure as plain values, the ratio among them."""
        return {
            "name": self.name,
            "method": _finite(self.method),
            "baseline": _finite(self.baseline),
            "ratio": _finite(self.ratio),
            "claimed": self.claimed,
        }


@dataclass(frozen=True)
class Criterion:
    """What must be so: `figure` is `relation` `bar`; `null_is` would have to miss it."""

    sentence: str
    figure: float
    relation: Literal["at most", "at least"]
    bar: float
    null_is: str

    @property
    def passed(self) -> bool:
        """Whether it is so; a figure that is no number passes nothing."""
        if self.relation == "at most":
            return self.figure <= self.bar
        return self.figure >= self.bar

    def as_json(self) -> dict[str, Any]:
        """The criterion as plain values."""
        return asdict(self) | {"figure": _finite(self.figure), "passed": self.passed}

    def __str__(self) -> str:
        return f"{self.sentence}: {self.figure:.4g}, and the bar is {self.relation} {self.bar:.4g}"


@dataclass(frozen=True)
class Proof:
    """What a proof found, and where it was run.

    Args:
        mode: `quick` has thresholds of its own; `full` is the experiment of record.
        null: whether the nulls stood in the method's place; the verdict must then be against it.
    """

    info: Info
    mode: Literal["quick", "full"]
    null: bool
    figures: tuple[Figure, ...]
    criteria: tuple[Criterion, ...]
    seeds: tuple[int, ...]
    seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    when: str

    @property
    def verdict(self) -> Literal["holds", "does not hold"]:
        """`holds` when every criterion is met; in a null run, while any null gets through."""
        if self.null:
            return "holds" if self.undetected else "does not hold"
        return "holds" if all(criterion.passed for criterion in self.criteria) else "does not hold"

    @property
    def undetected(self) -> tuple[str, ...]:
        """In a null run, the nulls that met all their criteria: each is a defect of the proof."""
        caught = {c.null_is for c in self.criteria if not c.passed}
        nulls = dict.fromkeys(c.null_is for c in self.criteria)
        return tuple(null for null in nulls if null not in caught) if self.null else ()

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, in one sentence."""
        if self.undetected:
            return f"a defect of this proof, it does not notice: {'; '.join(self.undetected)}"
        missed = [str(criterion) for criterion in self.criteria if not criterion.passed]
        return "; ".join(missed) if missed else f"all {len(self.criteria)} criteria are met"

    def as_json(self) -> dict[str, Any]:
        """The proof as plain values, in the order in which a reader wants them."""
        return {
            "name": self.info.name,
            "room": self.info.room,
            "title": self.info.title,
            "verdict": self.verdict,
            "reason": self.reason,
            "mode": self.mode,
            "null": self.null,
            "paper": self.info.paper,
            "claim": self.info.claim,
            "figures": [figure.as_json() for figure in self.figures],
            "criteria": [criterion.as_json() for criterion in self.criteria],
            "seeds": list(self.seeds),
            "seconds": round(self.seconds, 2),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "when": self.when,
        }


class ProofRun:
    """One run of a proof: what the proof is called with (`null`, `full`) and what it notes.

    Attributes:
        seeds: set by the proof, for the record.
    """

    def __init__(
        self, record: MethodRecord, *, null: bool, full: bool, listener: Listener | None = None
    ) -> None:
        self.record, self.null, self.full = record, null, full
        self.seeds: tuple[int, ...] = (0,)
        self._listener = listener or (lambda event: None)
        self._figures: list[Figure] = []
        self._criteria: list[Criterion] = []
        self._null: str | None = None
        self._versions: dict[str, str] = {}
        self._started = time.perf_counter()

    def contender(self, method: T, *, null: N, null_is: str) -> T | N:
        """What the criteria that follow examine: `method`, or in a null run `null`."""
        self._null = null_is
        return null if self.null else method

    def figure(self, name: str, *, method: float, baseline: float, claimed: str = "") -> Figure:
        """Note a quantity of both sides; `claimed` is what the paper says of it."""
        figure = Figure(name, float(method), float(baseline), claimed)
        self._figures.append(figure)
        return figure

    def at_most(self, sentence: str, figure: float, bar: float) -> None:
        """State that `figure` must be at most `bar`."""
        self._state(sentence, figure, "at most", bar)

    def at_least(self, sentence: str, figure: float, bar: float) -> None:
        """State that `figure` must be at least `bar`."""
        self._state(sentence, figure, "at least", bar)

    def progress(self, doing: str, done: int = 0, total: int | None = None) -> None:
        """Say what is being done, to whoever shows progress."""
        self._listener({"event": "phase", "name": doing, "done": done, "total": total})

    def library(self, name: str, extra: str) -> ModuleType:
        """Import a library that the proof compares with, and note its version.

        Raises:
            InputError: it is not installed.
        """
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise InputError(
                f"the proof of {self.record.name} compares with {name}, which cannot be imported "
                f"({error}); pip install modicum[{extra}]"
            ) from None
        self._versions[name] = str(getattr(module, "__version__", "unknown"))
        return module

    def conclude(self) -> Proof:
        """The proof that this run amounts to.

        Raises:
            TypeError: the proof has stated no criterion.
        """
        from modicum.core.machine import pick_device, this_machine, versions

        if not self._criteria:
            raise TypeError(f"the proof of {self.record.name} states no criterion")
        return Proof(
            info=self.record.info,
            mode="full" if self.full else "quick",
            null=self.null,
            figures=tuple(self._figures),
            criteria=tuple(self._criteria),
            seeds=self.seeds,
            seconds=time.perf_counter() - self._started,
            machine=this_machine(pick_device("cpu")).as_json(),
            versions=versions() | self._versions,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _state(
        self, sentence: str, figure: float, relation: Literal["at most", "at least"], bar: float
    ) -> None:
        if self._null is None:
            raise TypeError(f"{sentence!r} examines no contender, so nothing could miss it")
        criterion = Criterion(sentence, float(figure), relation, float(bar), self._null)
        self._criteria.append(criterion)
        self._listener({"event": "criterion", **criterion.as_json()})


def prove(
    name: str,
    *,
    null: bool = False,
    full: bool = False,
    plugins: Iterable[str | Path] = (),
    listener: Listener | None = None,
) -> Proof:
    """Run the proof of the method `name`.

    Args:
        null: put the baseline, or a perturbed operation, in the method's place.
        full: the experiment of record instead of the quick one.
        plugins: files in which methods of your own, and their proofs, are.
        listener: is called with `phase` and `criterion` events as the proof runs.

    Raises:
        InputError: no method has this name, it has no proof, or the proof compares with a library
            that is not installed.
    """
    record = find(name, plugins)
    experiment = _experiment(record)
    run = ProofRun(record, null=null, full=full, listener=listener)
    with _quiet_and_single_threaded():
        experiment(run)
    return run.conclude()


def write(proof: Proof, folder: str | Path) -> Path:
    """Save a proof as JSON in `folder` and return the file; null runs have names of their own."""
    suffix = f"{'.full' if proof.mode == 'full' else ''}{'.null' if proof.null else ''}"
    path = Path(folder) / f"{proof.info.name}{suffix}.json"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, proof.as_json())
    return path


def _experiment(record: MethodRecord) -> Callable[[ProofRun], None]:
    """The `prove` function of a method's proof."""
    expected = "prove(run) in the method's own file"
    if (record.module or "").startswith("modicum."):
        name = f"modicum.proofs.{record.room}.{record.name}"
        expected = f"src/{name.replace('.', '/')}.py"
        there = importlib.util.find_spec(name.rpartition(".")[0]) and importlib.util.find_spec(name)
        module = importlib.import_module(name) if there else None
    else:
        module = sys.modules[record.load().__module__]
    experiment = getattr(module, "prove", None)
    if not callable(experiment):
        raise InputError(
            f"this method has no proof yet (it would be {expected})", value=record.name
        )
    return experiment


@contextmanager
def _quiet_and_single_threaded() -> Iterator[None]:
    """Proofs work on tiny matrices, for which a second thread costs more than it does.

    What a library will one day rename is not for those who read a proof.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        torch.set_num_threads(threads)


def _finite(number: float) -> float | None:
    """JSON has no word for a figure that is no number."""
    return number if math.isfinite(number) else None
