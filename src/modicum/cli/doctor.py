"""`modicum doctor`: what this machine has, what is wrong with it, and what to do about that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from modicum.cli.machine_facts import EXTRAS, Disk, MachineFacts, look
from modicum.cli.tables import print_json, table
from modicum.core.errors import FoundWanting
from modicum.core.units import format_bytes

Judgement = Literal["ok", "note", "wrong"]
OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 12)
LEAST_MEMORY = 2_000_000_000  # what torch and a small model take
LEAST_DISK = 2_000_000_000  # tokens and two checkpoints of a small run
LEAST_OPEN_FILES = 1024
LEAST_SHARED = 64_000_000


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at.

    Args:
        state: ok; note: something does not work, and nothing needs it; wrong: mend it first.
        advice: what to do, where there is something.
    """

    name: str
    value: str
    state: Judgement = "ok"
    advice: str = ""


def findings(facts: MachineFacts) -> list[Diagnosis]:
    """What the facts of a machine amount to, in the order in which to mend what is wrong."""
    return [
        Diagnosis("modicum", facts.modicum),
        _python(facts),
        _torch(facts),
        _processor(facts),
        _memory(facts),
        _gpu(facts),
        *_ranks(facts),
        _compiler(facts),
        *_extras(facts),
        _disk("cache", facts.cache, "set XDG_CACHE_HOME to a folder that does"),
        _disk("temporary files", facts.temporary, "set TMPDIR to a folder that does"),
        _disk("this folder", facts.here, "give --out a folder that does"),
    ]


def run_doctor(*, as_json: bool) -> None:
    """Look at this machine, and print what was found.

    Raises:
        FoundWanting: something is wrong.
    """
    found = findings(look())
    wrong = [finding.name for finding in found if finding.state == "wrong"]
    if as_json:
        print_json({"findings": [asdict(finding) for finding in found], "wrong": wrong})
    else:
        marks = {"ok": "", "note": "note", "wrong": "WRONG"}
        table(("Looked at", "Found", ""), [(f.name, f.value, marks[f.state]) for f in found])
        advice = [f"{finding.name}: {finding.advice}" for finding in found if finding.advice]
        if advice:
            print("\n" + "\n".join(advice))
    if wrong:
        raise FoundWanting(f"something is wrong with this machine: {', '.join(wrong)}")


def _python(facts: MachineFacts) -> Diagnosis:
    version = tuple(int(part) for part in facts.python.split(".")[:2])
    if version >= OLDEST_PYTHON:
        return Diagnosis("Python", facts.python)
    least = ".".join(map(str, OLDEST_PYTHON))
    return Diagnosis("Python", facts.python, "wrong", f"modicum needs Python {least} or newer")


def _torch(facts: MachineFacts) -> Diagnosis:
    if facts.torch is None:
        advice = f"it cannot be imported ({facts.torch_error}); install it again: pip install torch"
        return Diagnosis("torch", "none", "wrong", advice)
    build = f"for CUDA {facts.cuda}" if facts.cuda else "for CPUs"
    value = f"{facts.torch}, {build}"
    version = tuple(int(part) for part in facts.torch.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        least = ".".join(map(str, OLDEST_TORCH))
        advice = f"modicum needs torch {least} or newer: pip install -U torch"
        return Diagnosis("torch", value, "wrong", advice)
    return Diagnosis("torch", value)


def _processor(facts: MachineFacts) -> Diagnosis:
    used = f"{facts.cores} of {facts.processors} cores"
    value = ", ".join(part for part in (facts.processor, used, facts.instructions) if part)
    if facts.threads is not None and facts.threads.isdigit() and int(facts.threads) > facts.cores:
        advice = (
            f"OMP_NUM_THREADS is {facts.threads}, and this process may use {facts.cores} cores: "
            "threads wait for each other; unset it, or set it to no more than that"
        )
        return Diagnosis("processor", value, "wrong", advice)
    return Diagnosis("processor", value)


def _memory(facts: MachineFacts) -> Diagnosis:
    if not facts.memory:
        return Diagnosis("memory", "not known", "note")
    value = f"{format_bytes(facts.available)} free of {format_bytes(facts.memory)}"
    if facts.available < LEAST_MEMORY:
        advice = (
            f"less than {format_bytes(LEAST_MEMORY)} is free, under this process's limit if it has "
            "one: end other programs, or give the container more"
        )
        return Diagnosis("memory", value, "wrong", advice)
    return Diagnosis("memory", value)


def _gpu(facts: MachineFacts) -> Diagnosis:
    if facts.gpus:
        each = [f"{gpu.name}, {format_bytes(gpu.free)} free of {format_bytes(gpu.total)}"
                for gpu in facts.gpus]  # fmt: skip
        return Diagnosis("GPU", "; ".join(each))
    if not facts.nvidia or facts.torch is None:
        return Diagnosis("GPU", "none: runs use the processor")
    if facts.cuda is None:
        advice = (
            "there is an NVIDIA driver, and this torch is built for CPUs: install one for CUDA "
            "(docs/how-to/install.md)"
        )
    else:
        advice = (
            f"there is an NVIDIA driver, and torch for CUDA {facts.cuda} finds no device: look at "
            "nvidia-smi and CUDA_VISIBLE_DEVICES; the driver may be older than this CUDA"
        )
    return Diagnosis("GPU", "not usable", "wrong", advice)


def _ranks(facts: MachineFacts) -> Iterator[Diagnosis]:
    if facts.torch is not None:
        over = ", ".join(facts.backends)
        if over:
            yield Diagnosis("ranks", f"over {over}")
        else:
            yield Diagnosis("ranks", "one only", "note", "this torch has no torch.distributed")
    if facts.host_error is not None:
        advice = (
            f"this host's own name cannot be looked up ({facts.host_error}), so ranks may wait for "
            "each other: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME=lo on a single machine"
        )
        yield Diagnosis("host name", "unknown", "wrong", advice)
    if facts.ranks:
        advice = "this shell makes every command a rank of a run: unset them, but under torchrun"
        yield Diagnosis("environment", ", ".join(facts.ranks), "note", advice)
    if facts.open_files < LEAST_OPEN_FILES:
        advice = f"ranks and data need more: ulimit -n {LEAST_OPEN_FILES}"
        yield Diagnosis("open files", f"at most {facts.open_files}", "note", advice)
    if facts.shared is not None and facts.shared < LEAST_SHARED:
        advice = "ranks exchange tensors there: docker run --shm-size=1g"
        yield Diagnosis("/dev/shm", f"{format_bytes(facts.shared)} free", "note", advice)


def _compiler(facts: MachineFacts) -> Diagnosis:
    if facts.compiler is not None:
        return Diagnosis("C++ compiler", facts.compiler)
    advice = "training.compile needs one on a processor; without it blocks run as they are"
    return Diagnosis("C++ compiler", "none", "note", advice)


def _extras(facts: MachineFacts) -> Iterator[Diagnosis]:
    absent = {extra: names for extra, names in facts.missing.items() if names}
    there = [extra for extra in facts.missing if extra not in absent]
    yield Diagnosis("extras", ", ".join(there) or "none")
    for extra, names in absent.items():
        advice = f"for {EXTRAS[extra][1]}: pip install 'modicum[{extra}]'"
        yield Diagnosis(f"extra {extra}", f"without {', '.join(names)}", "note", advice)


def _disk(name: str, disk: Disk, otherwise: str) -> Diagnosis:
    value = f"{format_bytes(disk.free)} free, {disk.path}"
    if not disk.writable:
        return Diagnosis(name, value, "wrong", f"takes no files: {otherwise}")
    if disk.free < LEAST_DISK:
        advice = f"less than {format_bytes(LEAST_DISK)} is free: make room, or {otherwise}"
        return Diagnosis(name, value, "wrong", advice)
    return Diagnosis(name, value)
