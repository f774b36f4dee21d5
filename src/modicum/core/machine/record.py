"""What was measured of this machine once: a file a machine and versions, in the user's cache.

Formulas say what tensors take. What they cannot say differs from machine to machine: what Python
and torch hold with all that a run imports, what the C library keeps around tensors that come and
go, what kernels take as scratch, which part of a product's rate a step reaches. That is measured,
in seconds, by a process that trains small models (`modicum.trainer.probe`), and kept under the
names of all that it depends on: processor and instruction sets, Python, torch, libc, threads, the
environment that the allocator and the kernels read, and whether runs have a budget.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from modicum.core.errors import InputError, ModicumError
from modicum.core.files import regular, user_cache, write_json
from modicum.core.heap import HUGE_PAGE, mapped_from
from modicum.core.machine.child_process import LIMIT_SECONDS, ChildFailed, answer_of
from modicum.core.machine.probe_line import probe_line
from modicum.core.torch_private import compiler_is_loaded

# Runs in a process of its own: it trains, and what trains stands far above this file.
PROBE = "modicum.trainer.probe"
# As `python -m` runs a module.
_PROGRAM = (
    "import runpy; sys.argv[1:] = given[1:]; "
    "runpy.run_module(given[0], run_name='__main__', alter_sys=True)"
)
_FORMAT = 13
Reads = Literal["new tokenizer", "tokenizer", "no text"]
"""What of text a run reads: all, to train its tokenizer on it; with one that is there; nothing."""
# What of the environment changes what a process holds, or which kernels run.
_VARIABLES = (
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "MALLOC_CONF",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "DNNL_PRIMITIVE_CACHE_CAPACITY",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
)
_PREFIXES = ("MALLOC_", "TCMALLOC_")


class ProbeFailed(ModicumError):
    """The process that measures the machine failed."""


@dataclass(frozen=True)
class MachineRecord:
    """What was measured of a machine.

    Attributes:
        loaded_bytes: what a process comes to hold, tensors aside, after its plan was made: modules
            that are loaded when they are first used, the tokenizer that it trains, kernels' code.
        with_tokenizer_bytes: the same of a run whose tokenizer is there; None: not measured.
        without_text_bytes: the same of a run that reads no text, but images; None: not measured.
        without_gradients_bytes: the same of a run whose updates need no gradients: nothing loads
            the compiler, or kernels of a backward pass; None: not measured.
        without_text_kept: of a run that reads no text, the least and the most that was kept next to
            a byte of tensors that come and go: in one run at several times; None: not measured.
        compiler_bytes: what of it are torch's compiler and what that imports. The first optimizer
            loads them; models of transformers do so before the plan is made.
        kept: of a byte of tensors that come and go, at the peak, what the allocator keeps next to
            it: the least and the most that was seen. Next to tensors that stay it keeps nothing.
        kept_again: the same where blocks run again in the backward pass; None: not measured.
        efficiency: of a large matrix product's rate, the part that a training step reaches.
        half_efficiency: the same of a step in bf16, and also of the rate of a product in fp32.
        when: the date and time.
    """

    loaded_bytes: int
    kept: tuple[float, float]
    efficiency: float
    when: str = ""
    compiler_bytes: int = 0
    half_efficiency: float | None = None
    with_tokenizer_bytes: int | None = None
    without_text_bytes: int | None = None
    without_text_kept: tuple[float, float] | None = None
    kept_again: tuple[float, float] | None = None
    without_gradients_bytes: int | None = None

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
        return self.kept_again if recompute and self.kept_again is not None else self.kept

    def efficiency_in(self, *, half: bool) -> float:
        """The part of a product's rate in fp32 that a step reaches in bf16, or in fp32.

        >>> MachineRecord(0, (0.0, 0.0), 0.5, half_efficiency=2.0).efficiency_in(half=True)
        2.0
        """
        if half and self.half_efficiency is not None:
            return self.half_efficiency
        return self.efficiency

    def of_run(self, reads: Reads, *, gradients: bool = True) -> MachineRecord:
        """The record as it holds for a run that reads this, and needs gradients or does not.

        >>> record = MachineRecord(9, (0.0, 0.1), 1.0, with_tokenizer_bytes=7)
        >>> record.of_run("tokenizer").loaded_bytes, record.of_run("new tokenizer").loaded_bytes
        (7, 9)
        """
        loaded, kept, again = self.loaded_bytes, self.kept, self.kept_again
        if reads == "tokenizer" and self.with_tokenizer_bytes is not None:
            loaded = self.with_tokenizer_bytes
        if reads == "no text" and self.without_text_bytes is not None:
            loaded = self.without_text_bytes
        if reads == "no text" and self.without_text_kept is not None:
            kept, again = self.without_text_kept, None
        found = replace(self, loaded_bytes=loaded, kept=kept, kept_again=again)
        if not gradients and self.without_gradients_bytes is not None:
            found = replace(found, loaded_bytes=self.without_gradients_bytes, compiler_bytes=0)
        return found

    def still_loaded(self) -> int:
        """`loaded_bytes` of this process, without what it has loaded already."""
        there = self.compiler_bytes if compiler_is_loaded() else 0
        return max(0, self.loaded_bytes - there)


def depends_on(device: str = "cpu") -> dict[str, str]:
    """All that a record depends on, by name: another value of any is another machine here."""
    libc = "-".join(platform.libc_ver()) or platform.platform()
    found = {
        "format": str(_FORMAT),
        "processor": processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "libc": libc,
    }
    if device == "cuda":
        found["accelerator"] = torch.cuda.get_device_name()
    if device == "cpu" and mapped_from() == HUGE_PAGE:
        found["a budget"] = f"tensors are mapped from {HUGE_PAGE} bytes on"
    names = [name for name in os.environ if name in _VARIABLES or name.startswith(_PREFIXES)]
    return found | {name: os.environ[name] for name in sorted(names)}


def cache_folder() -> Path:
    """Where records are kept: `$XDG_CACHE_HOME/modicum/machines`, or below `~/.cache`."""
    return user_cache("machines")


def record_file(device: str = "cpu") -> Path:
    """The file of this machine's record, there or not."""
    digest = hashlib.sha256(json.dumps(depends_on(device), sort_keys=True).encode()).hexdigest()
    return cache_folder() / f"{digest[:16]}.json"


def machine_record(
    device: str = "cpu", *, again: bool = False, say: Callable[[str], None] | None = None
) -> MachineRecord:
    """This machine's record: read where it was measured before, else measured now.

    Several processes that ask at once measure once: the others wait for the first.

    Args:
        device: what a run is on, cpu or cuda.
        again: measure even where there is a record.
        say: hears a sentence before it takes seconds.

    Raises:
        ProbeFailed: the process that measures failed, with what it printed last.
    """
    key = json.dumps(depends_on(device), sort_keys=True)
    if not again and (known := _known.get(key)) is not None:
        return known
    with _turn(device, say=say or tell) as file:
        found = None if again else _read(file)
        if found is None:
            (say or tell)(
                f"Measuring this machine{_why_again(file, key)}, once; "
                "it takes half a minute on a fast processor, some minutes on a slow or busy one."
            )
            found = _measured(device)
            _write(file, {"depends_on": json.loads(key), "record": asdict(found)})
    _known[key] = found
    return found


def _why_again(file: Path, key: str) -> str:
    """What of this process is other than of those that were measured here; empty: there are none.

    Of several it is the one that differs least.
    """
    depends: dict[str, str] = json.loads(key)
    found: list[list[str]] = []
    for other in file.parent.glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            before = dict(json.loads(regular(other).read_bytes())["depends_on"])
            names = sorted(depends.keys() | before.keys())
            differs = [each for each in names if depends.get(each) != before.get(each)]
            if differs:
                found.append(differs)
    least = sorted(found, key=len)[:1]
    return f" again (other than before: {', '.join(least[0])})" if least else ""


def remembered(name: str, measure: Callable[[], list[int]]) -> list[int]:
    """Figures of this machine by a name: read from its record's folder, else measured now."""
    for folder in (cache_folder(), _fallback_folder()):
        found = _figures((folder / record_file().name).with_suffix(".kernels.json")).get(name)
        if isinstance(found, list) and all(isinstance(each, int) for each in found):
            return found
    figures = measure()
    # A lock of its own: the process that is asked for the record asks for kernels' figures.
    with _turn(what=".kernels") as record:
        file = record.with_suffix(".kernels.json")
        _write(file, _figures(file) | {name: figures})
    return figures


def _figures(file: Path) -> dict[str, Any]:
    """What `remembered` keeps in a file; nothing where it is damaged."""
    with suppress(OSError, ValueError):
        found = json.loads(regular(file).read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def processor() -> str:
    """The processor's name, as the system has it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def assume(record: MachineRecord, device: str = "cpu") -> None:
    """Take `record` for this machine's, in this process: for those that measure, and for tests."""
    _known[json.dumps(depends_on(device), sort_keys=True)] = record


_known: dict[str, MachineRecord] = {}


def tell(text: str) -> None:
    """Say a sentence on standard error, before something takes seconds."""
    print(f"modicum: {text}", file=sys.stderr, flush=True)


def _fallback_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"modicum-machines-{os.getuid()}"


@contextmanager
def _turn(
    device: str = "cpu", what: str = "", say: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """The record's file, while no other process measures or writes what this one does.

    That it waits for another one is said.

    Where the cache cannot be written, the file of this user's temporary folder.
    """
    file = record_file(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = open(file.with_suffix(f"{what}.lock"), "a", encoding="utf-8")  # noqa: SIM115
    except OSError:
        file = _fallback_folder() / file.name
        file.parent.mkdir(mode=0o700, exist_ok=True)
        handle = open(file.with_suffix(f"{what}.lock"), "a", encoding="utf-8")  # noqa: SIM115
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if say is not None:
                say("Another process measures this machine; waiting for its figures.")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield file


def _read(file: Path) -> MachineRecord | None:
    """The record of a file; None where there is none that can be used."""
    try:
        return _record(json.loads(regular(file).read_bytes())["record"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _record(raw: dict[str, Any]) -> MachineRecord:
    """The record of plain values.

    Raises:
        ValueError, KeyError, TypeError: they are none, or cannot be.
    """
    low, high = (float(each) for each in raw["kept"])
    least, most = (float(each) for each in raw["kept_again"])
    fewest, greatest = (float(each) for each in raw["without_text_kept"])
    found = MachineRecord(
        int(raw["loaded_bytes"]),
        (low, high),
        float(raw["efficiency"]),
        str(raw["when"]),
        int(raw["compiler_bytes"]),
        float(raw["half_efficiency"]),
        int(raw["with_tokenizer_bytes"]),
        int(raw["without_text_bytes"]),
        (fewest, greatest),
        (least, most),
        int(raw["without_gradients_bytes"]),
    )
    bytes_make_sense = (
        0
        <= found.compiler_bytes
        <= min(found.of_run(reads).loaded_bytes for reads in get_args(Reads))
    ) and found.of_run("tokenizer", gradients=False).loaded_bytes >= 0
    rates = (found.efficiency, found.efficiency_in(half=True))
    ranges = ((low, high), (least, most), (fewest, greatest))
    parts_make_sense = all(0 <= less <= more < 10 for less, more in ranges)
    if bytes_make_sense and parts_make_sense and all(0 < rate < 100 for rate in rates):
        return found
    raise ValueError(f"not of a machine: {found}")


def _write(file: Path, content: dict[str, Any]) -> None:
    with suppress(OSError, InputError):  # measured again next time, then
        write_json(file, content)


def _measured(device: str) -> MachineRecord:
    try:
        # The threads of this process are the run's, whatever the environment says.
        with probe_line(device) as waiting:
            found = answer_of(
                _PROGRAM,
                [PROBE, device, *(["budget"] if "a budget" in depends_on(device) else [])],
                work=PROBE,
                limit_seconds=LIMIT_SECONDS,
                environment={"OMP_NUM_THREADS": str(torch.get_num_threads())},
                waiting=waiting,
            )
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return _record(found | {"when": when})
    except ChildFailed as error:
        again = "; the same command tries again" if "from outside" in str(error) else ""
        raise ProbeFailed(f"this machine could not be measured: {error}{again}") from None
    except (ValueError, KeyError, TypeError):
        raise ProbeFailed(f"this machine could not be measured: {PROBE} said {found}") from None


@functools.cache
def placeholder() -> MachineRecord:
    """A record for those that measure: nothing is known, and nothing is kept."""
    return MachineRecord(0, (0.0, 0.0), 1.0)
