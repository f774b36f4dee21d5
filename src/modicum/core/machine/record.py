"""What was measured of this machine once: a file a machine and versions, in the user's cache.

Formulas say what tensors take. What they cannot say differs from machine to machine: what Python
and torch hold with all that a run imports, what the C library keeps around tensors that come and
go, what kernels take as scratch, which part of a product's rate a step reaches. That is measured,
in seconds, by a process that trains small models (`modicum.trainer.probe`), and kept under the
names of all that it depends on: processor and instruction sets, Python, torch, libc, threads, the
environment that the allocator and the kernels read, and whether runs have a budget. What few runs
need is measured when the first of them is planned.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from modicum.core.errors import InputError, ModicumError
from modicum.core.files import regular, write_json
from modicum.core.machine.child_process import LIMIT_SECONDS, ChildFailed, answer_of
from modicum.core.machine.identity import (
    cache_folder,
    depends_on,
    fallback_folder,
    record_file,
    why_again,
)
from modicum.core.machine.probe_line import probe_line, runs_of
from modicum.core.machine.turn import tell, turn
from modicum.core.module_process import RUN_MODULE
from modicum.core.torch_compiler import compiler_is_loaded

# Runs in a process of its own: it trains, and what trains stands far above this file.
PROBE = "modicum.trainer.probe"
Reads = Literal["new tokenizer", "tokenizer", "images", "sequences"]
"""What a run reads: text, to train its tokenizer on it or with one that is there; or other data."""
RecordPart = Literal["recomputation", "images", "sequences", "compiled"]
"""What is measured when a run first needs it."""
# The figure that tells whether it was measured, and of which runs it is.
_PARTS: dict[RecordPart, tuple[str, str]] = {
    "recomputation": ("kept_again", "whose blocks run again in the backward pass"),
    "images": ("images", "on images"),
    "sequences": ("sequences", "on sequences"),
    "compiled": ("compiled_bytes", "whose blocks are compiled"),
}


class ProbeFailed(ModicumError):
    """The process that measures the machine failed."""


@dataclass(frozen=True)
class OtherRuns:
    """What was measured of runs that read no text.

    Attributes:
        loaded_bytes: as `MachineRecord` has it of runs on text.
        kept: the same, in runs of several sizes or at several times.
        efficiency: the same, in fp32.
        half_efficiency: the same, in bf16; None: as much slower than runs on text as in fp32.
    """

    loaded_bytes: int
    kept: tuple[float, float]
    efficiency: float
    half_efficiency: float | None = None


@dataclass(frozen=True)
class MachineRecord:
    """What was measured of a machine.

    Attributes:
        loaded_bytes: what a process comes to hold, tensors aside, after its plan was made: modules
            that are loaded when they are first used, the tokenizer that it trains, kernels' code.
        with_tokenizer_bytes: the same of a run whose tokenizer is there; None: not measured.
        without_gradients_bytes: the same of a run whose updates need no gradients: nothing loads
            the compiler, or kernels of a backward pass; None: not measured.
        compiler_bytes: what of it are torch's compiler and what that imports. The first optimizer
            loads them; models of transformers do so before the plan is made.
        compiled_bytes: what a process holds more where blocks are compiled; None: not measured.
        kept: of a byte of tensors that come and go, at the peak, what the allocator keeps next to
            it: the least and the most that was seen. Next to tensors that stay it keeps nothing.
        kept_again: the same where blocks run again in the backward pass; None: not measured.
        efficiency: of a large matrix product's rate, the part that a training step reaches.
        half_efficiency: the same of a step in bf16, and also of the rate of a product in fp32.
        images: of runs on images, which load convolutions' code; None: not measured.
        sequences: of runs on sequences, whose products are small; None: not measured.
        when: the date and time.
        device: of the machine that it was measured on, where more is measured when it is needed;
            None: nothing is.
    """

    loaded_bytes: int
    kept: tuple[float, float]
    efficiency: float
    when: str = ""
    compiler_bytes: int = 0
    half_efficiency: float | None = None
    with_tokenizer_bytes: int | None = None
    kept_again: tuple[float, float] | None = None
    without_gradients_bytes: int | None = None
    compiled_bytes: int | None = None
    images: OtherRuns | None = None
    sequences: OtherRuns | None = None
    device: str | None = None

    def figures(self) -> dict[str, Any]:
        """What was measured, as plain values.

        >>> "device" in MachineRecord(0, (0.0, 0.0), 1.0, device="cpu").figures()
        False
        """
        values = asdict(self)
        del values["device"]
        return values

    def has(self, parts: Iterable[RecordPart]) -> bool:
        """Whether these were measured.

        >>> MachineRecord(0, (0.0, 0.0), 1.0, kept_again=(0.4, 0.5)).has(["recomputation"])
        True
        """
        return all(getattr(self, _PARTS[part][0]) is not None for part in parts)

    def with_part(self, part: RecordPart) -> MachineRecord:
        """The record with a part, which is measured now if it was not.

        Raises:
            ProbeFailed: as `machine_record`.
        """
        if self.device is None or self.has([part]):
            return self
        return machine_record(self.device, parts=[part])

    @functools.cached_property
    def _kept_again(self) -> tuple[float, float] | None:
        return self.with_part("recomputation").kept_again

    @property
    def expected(self) -> float:
        """Bytes of the process that a byte of tensors that come and go takes, in the middle of what
        was seen."""
        return 1 + sum(self.kept) / 2

    def kept_where(self, *, recompute: bool) -> tuple[float, float]:
        """The least and the most that is kept, where blocks run again or do not.

        >>> record = MachineRecord(0, (0.1, 0.2), 1.0, kept_again=(0.4, 0.5))
        >>> record.kept_where(recompute=True), record.kept_where(recompute=False)
        ((0.4, 0.5), (0.1, 0.2))
        """
        return (self._kept_again if recompute else None) or self.kept

    def efficiency_in(self, *, half: bool) -> float:
        """The part of a product's rate in fp32 that a step reaches in bf16, or in fp32.

        >>> MachineRecord(0, (0.0, 0.0), 0.5, half_efficiency=2.0).efficiency_in(half=True)
        2.0
        """
        if half and self.half_efficiency is not None:
            return self.half_efficiency
        return self.efficiency

    def of_run(
        self, reads: Reads, *, gradients: bool = True, compiled: bool = False
    ) -> MachineRecord:
        """The record as it holds for a run that reads this, needs gradients and compiles blocks.

        >>> record = MachineRecord(9, (0.0, 0.1), 1.0, with_tokenizer_bytes=7)
        >>> record.of_run("tokenizer").loaded_bytes, record.of_run("new tokenizer").loaded_bytes
        (7, 9)
        """
        found = self
        if reads == "tokenizer" and found.with_tokenizer_bytes is not None:
            found = replace(found, loaded_bytes=found.with_tokenizer_bytes)
        if reads in ("images", "sequences"):
            known = self.with_part(reads)
            found = known._on(getattr(known, reads))
        if not gradients and self.without_gradients_bytes is not None:
            found = replace(found, loaded_bytes=self.without_gradients_bytes, compiler_bytes=0)
        if compiled:
            more = self.with_part("compiled").compiled_bytes or 0
            loaded = found.loaded_bytes + more
            found = replace(found, loaded_bytes=loaded, compiled_bytes=more)
        return found

    def _on(self, other: OtherRuns | None) -> MachineRecord:
        """The record of runs on other data than text."""
        if other is None:
            return self
        half = other.half_efficiency
        if half is None and self.half_efficiency is not None:
            half = self.half_efficiency * other.efficiency / self.efficiency
        figures = vars(other) | {"half_efficiency": half}
        return replace(self, **figures, kept_again=None, device=None)

    def still_loaded(self) -> int:
        """`loaded_bytes` of this process, without what it has loaded already."""
        return max(0, self.loaded_bytes - self.compiler_bytes + self.loaded_last())

    def loaded_last(self) -> int:
        """What of `still_loaded` is loaded for the first update alone: the compiler."""
        return 0 if compiler_is_loaded() else self.compiler_bytes


def machine_record(
    device: str = "cpu",
    *,
    parts: Collection[RecordPart] = (),
    again: bool = False,
    say: Callable[[str], None] | None = None,
) -> MachineRecord:
    """This machine's record: read where it was measured before, else measured now.

    Several processes that ask at once measure once: the others wait for the first.

    Args:
        device: what a run is on, cpu or cuda.
        parts: what it has in any case; another one is measured when it is first asked for.
        again: measure even where there is a record.
        say: hears a sentence before it takes seconds.

    Raises:
        ProbeFailed: the process that measures failed, with what it printed last.
    """
    key = json.dumps(depends_on(device), sort_keys=True)
    known = None if again else _known.get(key)
    if known is not None and (known.device is None or known.has(parts)):
        return known
    with turn(device, say=say or tell) as file:
        found = None if again else _read(file)
        missing = [part for part in parts if found is None or not found.has([part])]
        if found is None or missing:
            (say or tell)(_measuring(missing, found, file, key))
            found = _measured(device, missing, found)
            _write(file, {"depends_on": json.loads(key), "record": found.figures()})
    _known[key] = found = replace(found, device=device)
    return found


def _measuring(
    parts: Sequence[RecordPart], before: MachineRecord | None, file: Path, key: str
) -> str:
    """What is said before it takes seconds."""
    if before is None:
        what, seconds = f"this machine{why_again(file, key)}, once", "half a minute"
    else:
        said = " and ".join(_PARTS[part][1] for part in parts)
        what, seconds = f"more of this machine, once: a run {said}", "seconds"
    return f"Measuring {what}; it takes {seconds} on a fast processor, minutes on a slow one."


def remembered(name: str, measure: Callable[[], list[int]], count: int = 1) -> list[int]:
    """So many figures of this machine by a name: read from its record's folder, else measured now.

    Args:
        measure: gives `count` of them.
    """
    for folder in (cache_folder, fallback_folder):
        with suppress(OSError, InputError):
            found = _figures((folder() / record_file().name).with_suffix(".kernels.json")).get(name)
            if isinstance(found, list) and [isinstance(n, int) for n in found] == [True] * count:
                return found
    figures = measure()
    # A lock of its own: the process that is asked for the record asks for kernels' figures.
    with turn(what=".kernels") as record:
        file = record.with_suffix(".kernels.json")
        _write(file, _figures(file) | {name: figures})
    return figures


def _figures(file: Path) -> dict[str, Any]:
    """What `remembered` keeps in a file; nothing where it is damaged."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(regular(file).read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def assume(record: MachineRecord, device: str = "cpu") -> None:
    """Take `record` for this machine's, in this process: for those that measure, and for tests."""
    _known[json.dumps(depends_on(device), sort_keys=True)] = record


_known: dict[str, MachineRecord] = {}


def _read(file: Path) -> MachineRecord | None:
    """The record of a file; None where there is none that can be used."""
    try:
        return _record(json.loads(regular(file).read_bytes())["record"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    except (OverflowError, RecursionError):  # of Infinity, and of lists in lists in lists
        return None


def _record(raw: dict[str, Any]) -> MachineRecord:
    """The record of plain values.

    Raises:
        ValueError, KeyError, TypeError, AttributeError, OverflowError: they are none, or cannot be.
    """
    images, sequences = (
        None if (of := raw.get(part)) is None else _other_runs(of)
        for part in ("images", "sequences")
    )
    found = MachineRecord(
        int(raw["loaded_bytes"]),
        _range(raw["kept"]),
        float(raw["efficiency"]),
        str(raw["when"]),
        int(raw["compiler_bytes"]),
        float(raw["half_efficiency"]),
        int(raw["with_tokenizer_bytes"]),
        None if (again := raw.get("kept_again")) is None else _range(again),
        int(raw["without_gradients_bytes"]),
        None if (compiled := raw.get("compiled_bytes")) is None else int(compiled),
        images,
        sequences,
    )
    with_text = min(found.of_run(reads).loaded_bytes for reads in ("new tokenizer", "tokenizer"))
    known = [other for other in (images, sequences) if other is not None]
    others = [found.without_gradients_bytes, found.compiled_bytes]
    others += [each.loaded_bytes for each in known]
    rates = [found.efficiency, found.efficiency_in(half=True)]
    rates += [each.efficiency for each in known]
    rates += [each.half_efficiency for each in known if each.half_efficiency is not None]
    if (
        0 <= found.compiler_bytes <= with_text
        and min(each or 0 for each in others) >= 0
        and all(0 < rate < 100 for rate in rates)
    ):
        return found
    raise ValueError(f"not of a machine: {found}")


def _other_runs(raw: dict[str, Any]) -> OtherRuns:
    half = None if (rate := raw.get("half_efficiency")) is None else float(rate)
    return OtherRuns(int(raw["loaded_bytes"]), _range(raw["kept"]), float(raw["efficiency"]), half)


def _range(raw: Sequence[Any]) -> tuple[float, float]:
    """The least and the most.

    Raises:
        ValueError, TypeError: it is none.
    """
    low, high = (float(each) for each in raw)
    if 0 <= low <= high < 10:
        return low, high
    raise ValueError(f"no range: {raw}")


def _write(file: Path, content: dict[str, Any]) -> None:
    with suppress(OSError, InputError):  # measured again next time, then
        write_json(file, content)


def _measured(
    device: str, parts: Sequence[RecordPart], before: MachineRecord | None = None
) -> MachineRecord:
    """Measure parts, and what every run needs where that was not measured before."""
    runs = ["every", *parts] if before is None else parts
    options = ["--budget"] if "a budget" in depends_on(device) else []
    if before is not None:
        options.append(f"--loaded={before.loaded_bytes}")
    try:
        # The threads of this process are the run's, whatever the environment says.
        with probe_line(device, runs_of(runs)) as waiting:
            found = answer_of(
                RUN_MODULE,
                [PROBE, device, *runs, *options],
                work=PROBE,
                limit_seconds=LIMIT_SECONDS,
                environment={"OMP_NUM_THREADS": str(torch.get_num_threads())},
                waiting=waiting,
            )
        known = {"when": datetime.now(UTC).isoformat(timespec="seconds")}
        return _record(known | ({} if before is None else asdict(before)) | found)
    except ChildFailed as error:
        again = "; the same command tries again" if "from outside" in str(error) else ""
        raise ProbeFailed(f"this machine could not be measured: {error}{again}") from None
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ProbeFailed(f"this machine could not be measured: {PROBE} said {found}") from None


@functools.cache
def placeholder() -> MachineRecord:
    """A record for those that measure: nothing is known, and nothing is kept."""
    return MachineRecord(0, (0.0, 0.0), 1.0)
