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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeVar

from modicum.core.contracts.catalog import MethodRecord, find
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, write_json
from modicum.core.progress import Listener
from modicum.proofs.bench.quiet import alone, quiet
from modicum.proofs.pace import ProofPace, known_pace, pace_event, remember_pace
from modicum.proofs.proof import (
    Criterion,
    Figure,
    Part,
    Proof,
    Relation,
    SweptRates,
    nothing_stands,
)

T = TypeVar("T")
N = TypeVar("N")


class ProofRun:
    """One run of a proof: what it is called with (`null`, `full`, `fresh`) and what it notes.

    Attributes:
        seeds: set by the proof, for the record.
        reused: how many trainings of baselines were known, for the record.
    """

    def __init__(
        self,
        record: MethodRecord,
        *,
        null: bool,
        full: bool,
        fresh: bool = False,
        listener: Listener | None = None,
        pace: ProofPace | None = None,
    ) -> None:
        self.record, self.null, self.full, self.fresh = record, null, full, fresh
        self.seeds: tuple[int, ...] = (0,)
        self.reused = 0
        self._listener = listener or (lambda event: None)
        self._figures: list[Figure] = []
        self._criteria: list[Criterion] = []
        self._sweeps: dict[str, SweptRates] = {}
        self._null: str | None = None
        self._plants = null and nothing_stands(record.info)
        self._planted = False
        self._versions: dict[str, str] = {}
        self._pace = pace
        self._loads: list[float] = []
        self._alone = ExitStack()
        self._began: list[float] = []
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

    def swept(self, arm: str, best: float, tried: Sequence[float]) -> None:
        """Note at which learning rates an arm was tried, and which was best."""
        self._sweeps[arm] = SweptRates(arm, best, tuple(tried))

    def progress(self, doing: str) -> None:
        """Say that a run begins, a training or another part, to whoever shows progress.

        How many there are and how long they take is known where the proof was made before.
        """
        elapsed, pace = self.seconds, self._pace
        self._began.append(elapsed)
        run, total, left = len(self._began), None, None
        if pace is not None:
            total = pace.runs if pace.runs >= run else None
            left = pace.seconds_left(run, elapsed)
        self._listener(
            {
                "event": "phase", "name": doing, "unit": "run", "done": run, "total": total,
                "about": True, "seconds": elapsed, "seconds_left": left,
            }
        )  # fmt: skip

    def quiet(self) -> float:
        """Before a series is timed in a full run: nothing else runs here; the load, for the record.

        Raises:
            BusyMachine: other programs do.
        """
        if not self.full:
            return 0.0
        self._alone.enter_context(alone())
        self._loads.append(quiet())
        return self._loads[-1]

    def close(self) -> None:
        """Let others time on this machine."""
        self._alone.close()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.perf_counter() - self._started

    @property
    def pace(self) -> ProofPace:
        """What it took."""
        return ProofPace(self.seconds, len(self._began), tuple(self._began))

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
        loads = {"load_before_series": max(self._loads)} if self._loads else {}
        return Proof(
            info=self.record.info,
            mode="full" if self.full else "quick",
            null=self.null,
            planted=self._planted,
            figures=tuple(self._figures),
            criteria=tuple(self._criteria),
            seeds=self.seeds,
            seconds=self.seconds,
            machine=this_machine(pick_device("cpu")).as_json() | loads,
            versions=versions() | self._versions,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            sweeps=tuple(self._sweeps.values()),
            reused=self.reused,
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
    fresh: bool = False,
    plugins: Iterable[str | Path] = (),
    listener: Listener | None = None,
) -> Proof:
    """Run the proof of the method `name`.

    Args:
        null: put the baseline, or a perturbed operation, in the method's place.
        full: the experiment of record instead of the quick one.
        fresh: train the baselines again that an earlier proof has trained.
        plugins: files in which methods of your own, and their proofs, are.
        listener: is called with a `pace` event, then with `phase` and `criterion` events.

    Raises:
        InputError: no method has this name, it has no proof, the proof compares with a library
            that is not installed, or other programs run where a full one times something.
    """
    record = find(name, plugins)
    experiment = _experiment(record)
    mode = "full" if full else "quick"
    pace = known_pace(record.name, mode, null=null)
    run = ProofRun(record, null=null, full=full, fresh=fresh, listener=listener, pace=pace)
    if listener is not None:
        listener(pace_event(record.name, mode, pace))
    with closing(run), _quiet_and_single_threaded():
        experiment(run)
        proof = run.conclude()  # the record says with how many threads it ran
    remember_pace(record.name, mode, null=null, pace=run.pace)
    return proof


def write(proof: Proof, folder: str | Path) -> Path:
    """Save a proof as JSON in `folder` and return the file; null runs have names of their own."""
    suffix = f"{'.full' if proof.mode == 'full' else ''}{'.null' if proof.null else ''}"
    path = Path(folder) / f"{proof.info.name}{suffix}.json"
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, proof.as_json())
    return path


def has_proof(record: MethodRecord) -> bool:
    """Whether a method of modicum's own has a proof; it is not imported.

    >>> has_proof(find("lora"))
    True
    """
    name = _module_of(record)
    parent = name.rpartition(".")[0]
    return bool(importlib.util.find_spec(parent) and importlib.util.find_spec(name))


def _module_of(record: MethodRecord) -> str:
    return f"modicum.proofs.{record.room}.{record.name}"


def _experiment(record: MethodRecord) -> Callable[[ProofRun], None]:
    """The `prove` function of a method's proof."""
    expected = "prove(run) in the method's own file"
    if (record.module or "").startswith("modicum."):
        name = _module_of(record)
        expected = f"src/{name.replace('.', '/')}.py"
        module = importlib.import_module(name) if has_proof(record) else None
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
