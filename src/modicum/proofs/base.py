"""What all proofs share: figures, criteria, the null, the verdict and its two parts.

The proof of a method is a function `prove(run: ProofRun) -> None`, in
`modicum/proofs/<room>/<name>.py` or, for a plugin, in the plugin's own file. It measures, notes
`figures`, and states criteria; all else is done here. A criterion is of one of three parts:

- *claim*: what the paper's headline says, as far as it can be shown here (`at_most`, `at_least`);
- *check*: what must be so for the claim to mean something: the authors' numbers, an equal budget,
  the mechanism that the paper gives as the reason (`part="check"`);
- *against*: the best simple alternative at equal budget (`against`), one a proof.

A proof that cannot fail proves nothing. So what is examined goes through `contender`, which also
names its null: the baseline in the method's place, or the operation made slightly wrong. In a null
run it hands out the null. Then each null must miss one of the criteria that follow it, and each
part of the verdict that stood must fall. Where neither part stands, nothing could fall: there the
run hands out what the proof has `planted`, an effect of known size, which must be found.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from modicum.core.contracts.catalog import MethodRecord, find
from modicum.core.contracts.method import (
    Against,
    AgainstResult,
    ClaimVerdict,
    Info,
    Verdict,
    verdict_of,
)
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, write_json
from modicum.core.progress import Listener

T = TypeVar("T")
N = TypeVar("N")
Part = Literal["claim", "check", "against"]
Relation = Literal["at most", "at least"]


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
    """What must be so: `figure` is `relation` `bar`; `null_is` would have to miss it.

    Args:
        part: of the verdict to which it belongs.
        spread: the standard deviation of the figure over seeds; None where there is but one.
        rival: of the part `against`, what the figure compares with: then it is the method's over
            the rival's, and less is better.
    """

    sentence: str
    figure: float
    relation: Relation
    bar: float
    null_is: str
    part: Part = "claim"
    spread: float | None = None
    rival: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is so; a figure that is no number passes nothing.

        Against a rival, equal passes: within the spread.
        """
        if self.part == "against":
            return self.result != "worse"
        if self.relation == "at most":
            return self.figure <= self.bar
        return self.figure >= self.bar

    @property
    def result(self) -> AgainstResult:
        """Against a rival: better or worse by more than the spread, or equal."""
        spread = self.spread or 0.0
        if self.figure + spread < self.bar:
            return "better"
        return "equal" if self.figure - spread <= self.bar else "worse"

    @property
    def narrowly_missed(self) -> bool:
        """Whether it is missed by less than the figure's own spread over seeds."""
        return not self.passed and abs(self.figure - self.bar) < (self.spread or 0.0)

    def as_json(self) -> dict[str, Any]:
        """The criterion as plain values."""
        finite = {"figure": _finite(self.figure), "passed": self.passed}
        return asdict(self) | finite | {"narrowly_missed": self.narrowly_missed}

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" (spread {self.spread:.2g})"
        said = f"{self.sentence}: {self.figure:.4g}{spread}"
        if self.part == "against":
            return f"{said}, {Against(self.result, self.rival)}"
        narrowly = ", missed by less than its spread over seeds" if self.narrowly_missed else ""
        return f"{said}, and the bar is {self.relation} {self.bar:.4g}{narrowly}"


def claim_verdict_of(criteria: Iterable[Criterion]) -> ClaimVerdict:
    """How far the claim was found: in full, in part, not at all, or not measured.

    A check that is missed lowers a claim that holds to one that does so in part.
    """
    claim, check = ([c.passed for c in criteria if c.part == part] for part in ("claim", "check"))
    if not claim:
        return "not shown here"
    if not any(claim):
        return "does not hold"
    return "holds" if all(claim) and all(check) else "in part"


def against_of(criteria: Iterable[Criterion]) -> Against:
    """How the method stood against its rival, where one was measured."""
    for criterion in criteria:
        if criterion.part == "against":
            return Against(criterion.result, criterion.rival)
    return Against()


@dataclass(frozen=True)
class Proof:
    """What a proof found, and where it was run.

    Args:
        info: the method's, with the verdict that it is known for.
        mode: `quick` has thresholds of its own; `full` is the experiment of record.
        null: whether the nulls stood in the method's place; what stood must then fall.
        planted: whether, as nothing stood, it was what the proof plants: it must be found.
    """

    info: Info
    mode: Literal["quick", "full"]
    null: bool
    planted: bool
    figures: tuple[Figure, ...]
    criteria: tuple[Criterion, ...]
    seeds: tuple[int, ...]
    seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    when: str

    @property
    def claim_verdict(self) -> ClaimVerdict:
        """The paper's headline, as far as this machine can show it."""
        return claim_verdict_of(self.criteria)

    @property
    def against(self) -> Against:
        """The method against the best simple alternative; that it is a baseline, its info says."""
        baseline = self.info.against.result == "baseline"
        return self.info.against if baseline else against_of(self.criteria)

    @property
    def verdict(self) -> Verdict:
        """Both parts in one word; in a null run, `holds` if there is any of the `defects`."""
        if self.null and not self.planted:
            return "holds" if self.defects else "does not hold"
        return verdict_of(self.claim_verdict, self.against)

    @property
    def undetected(self) -> tuple[str, ...]:
        """In a null run, the nulls that met all their criteria: each is a defect of the proof."""
        if not self.null or self.planted:
            return ()
        judged = [c for c in self.criteria if c.part != "against"]
        caught = {c.null_is for c in judged if not c.passed}
        return tuple(
            null for null in dict.fromkeys(c.null_is for c in judged) if null not in caught
        )

    @property
    def defects(self) -> tuple[str, ...]:
        """In a null run, what is wrong with the proof: it would say the same of anything."""
        if not self.null:
            return ()
        if self.planted:
            alone = self.claim_verdict == "not shown here" and self.against.result == "better"
            return () if alone or self.claim_verdict == "holds" else ("what was planted",)
        found = list(self.undetected)
        if _RANKS.index(self.claim_verdict) >= _RANKS.index(_stood(self.info)):
            found.append(f"that the claim should have fallen (it {_held(self.claim_verdict)})")
        if self.info.against.result == self.against.result == "better":
            found.append(f"that a null is not {self.against}")
        return tuple(found)

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, in one sentence."""
        if self.defects:
            return f"a defect of this proof, it does not notice: {'; '.join(self.defects)}"
        told = [str(c) for c in self.criteria if not c.passed or c.part == "against"]
        if all(criterion.passed for criterion in self.criteria):
            told.insert(0, f"all {len(self.criteria)} criteria are met")
        if self.planted:
            told.insert(0, "what was planted is found")
        return "; ".join(told)

    def as_json(self) -> dict[str, Any]:
        """The proof as plain values, in the order in which a reader wants them."""
        return {
            "name": self.info.name,
            "room": self.info.room,
            "title": self.info.title,
            "verdict": self.verdict,
            "claim_verdict": self.claim_verdict,
            "against": asdict(self.against),
            "reason": self.reason,
            "mode": self.mode,
            "null": self.null,
            "planted": self.planted,
            "defects": list(self.defects),
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
        self._plants = null and nothing_stands(record.info)
        self._planted = False
        self._versions: dict[str, str] = {}
        self._started = time.perf_counter()

    def contender(self, method: T, *, null: N, null_is: str, planted: T | None = None) -> T | N:
        """What the criteria that follow examine: `method`, or in a null run `null`.

        Args:
            planted: the method with an advantage of known size, which the criteria must find: what
                a null run examines where neither part of the known verdict stands.
        """
        self._null = null_is
        if not self.null:
            return method
        if not self._plants:
            return null
        self._planted = self._planted or planted is not None
        return method if planted is None else planted

    def figure(self, name: str, *, method: float, baseline: float, claimed: str = "") -> Figure:
        """Note a quantity of both sides; `claimed` is what the paper says of it."""
        figure = Figure(name, float(method), float(baseline), claimed)
        self._figures.append(figure)
        return figure

    def at_most(
        self,
        sentence: str,
        figure: float,
        bar: float,
        *,
        part: Literal["claim", "check"] = "claim",
        seeds: Sequence[float] = (),
    ) -> None:
        """State that `figure` must be at most `bar`; `seeds`: the same of each seed alone."""
        self._state(sentence, figure, "at most", bar, part, seeds)

    def at_least(
        self,
        sentence: str,
        figure: float,
        bar: float,
        *,
        part: Literal["claim", "check"] = "claim",
        seeds: Sequence[float] = (),
    ) -> None:
        """State that `figure` must be at least `bar`; `seeds`: the same of each seed alone."""
        self._state(sentence, figure, "at least", bar, part, seeds)

    def against(self, rival: str, sentence: str, ratios: Sequence[float]) -> None:
        """Compare with the best simple alternative at equal budget.

        Args:
            rival: which that is.
            sentence: what is compared, and that less of it is better.
            ratios: the method's over the rival's, of each seed or setting; their mean is better or
                worse where it is further from 1 than they spread.

        Raises:
            TypeError: the proof has named a rival already.
        """
        if any(criterion.part == "against" for criterion in self._criteria):
            raise TypeError(f"{sentence!r}: the proof has named its best simple alternative")
        mean = statistics.fmean(ratios)
        self._state(sentence, mean, "at most", 1.0, "against", ratios, rival)

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
            TypeError: the proof has stated no criterion; or neither part of the verdict stands,
                and it plants nothing.
        """
        from modicum.core.machine import pick_device, this_machine, versions

        if not self._criteria:
            raise TypeError(f"the proof of {self.record.name} states no criterion")
        if self._plants and not self._planted:
            raise TypeError(
                f"neither part of the verdict on {self.record.name} stands, so a null could not "
                "fall: its proof must give a contender(planted=...)"
            )
        return Proof(
            info=self.record.info,
            mode="full" if self.full else "quick",
            null=self.null,
            planted=self._planted,
            figures=tuple(self._figures),
            criteria=tuple(self._criteria),
            seeds=self.seeds,
            seconds=time.perf_counter() - self._started,
            machine=this_machine(pick_device("cpu")).as_json(),
            versions=versions() | self._versions,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _state(
        self,
        sentence: str,
        figure: float,
        relation: Relation,
        bar: float,
        part: Part,
        seeds: Sequence[float],
        rival: str = "",
    ) -> None:
        if self._null is None:
            raise TypeError(f"{sentence!r} examines no contender, so nothing could miss it")
        known = len(seeds) > 1 and all(map(math.isfinite, seeds))
        spread = statistics.stdev(seeds) if known else None
        criterion = Criterion(
            sentence, float(figure), relation, float(bar), self._null, part, spread, rival
        )
        self._criteria.append(criterion)
        self._listener({"event": "criterion", **criterion.as_json()})


def nothing_stands(info: Info) -> bool:
    """Whether a method's proof was run, and neither part of its verdict stands."""
    if info.claim_verdict in ("holds", "in part") or info.against.result == "better":
        return False
    return info.claim_verdict == "does not hold" or info.against.result in ("equal", "worse")


_RANKS: tuple[ClaimVerdict, ...] = get_args(ClaimVerdict)


def _stood(info: Info) -> ClaimVerdict:
    """What a null's claim must stay below: that of a method without a verdict, below `holds`."""
    return info.claim_verdict if info.claim_verdict in ("holds", "in part") else "holds"


def _held(claim_verdict: ClaimVerdict) -> str:
    return {"in part": "holds in part"}.get(claim_verdict, claim_verdict)


def ratios(method: Iterable[float], rival: Iterable[float]) -> list[float]:
    """The method's over the rival's, seed by seed.

    >>> ratios([1.0, 3.0], [2.0, 2.0])
    [0.5, 1.5]
    """
    return [mine / theirs for mine, theirs in zip(method, rival, strict=True)]


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
