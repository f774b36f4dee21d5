"""What the benchmarks share: one at a time, interleaved, summed up as medians and quartiles."""

from __future__ import annotations

import fcntl
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from modicum.core.files import write_json

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other benchmark runs on this machine, and keep others waiting."""
    path = Path(tempfile.gettempdir()) / f"modicum-benchmark-{os.getuid()}.lock"
    with open(path, "a", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another benchmark to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Tell who watches; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def interleaved(
    contenders: Mapping[str, Callable[[], float]], *, rounds: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Run all contenders once a round, every other round in reverse order: A B B A A B ...

    So a machine that slows down or speeds up during a round hurts nobody in the sum. Each
    contender returns its own figure; those of the first `warm_up` rounds are dropped.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warm_up + rounds):
        order = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in order:
            figure = contenders[name]()
            if number >= warm_up:
                figures[name].append(figure)
    return figures


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, least and greatest of some figures, and how many they are."""
    ordered = sorted(values)
    middle = quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {
        "median": median(ordered),
        "lower_quartile": middle[0],
        "upper_quartile": middle[2],
        "least": ordered[0],
        "greatest": ordered[-1],
        "count": len(ordered),
    }


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """The spread of the ratios of figures from the same rounds."""
    return spread([a / b for a, b in zip(above, below, strict=True)])


def write_result(
    name: str, figures: Mapping[str, Any], settings: Mapping[str, Any], path: Path | None = None
) -> Path:
    """Write benchmarks/results/NAME.json: the figures, and all that one needs to judge them.

    Args:
        path: another file to write.
    """
    import torch

    from modicum.core.machine import this_machine

    machine = this_machine(torch.device("cpu")).as_json()
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "name": name,
        "command": shlex.join(["python", *_argv()]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine | {"load_at_end": os.getloadavg()[0]},
        "versions": {"python": sys.version.split()[0]} | _versions(),
        "settings": dict(settings),
        **figures,
    }
    write_json(path, content)
    say(f"wrote {path}")
    return path


def _argv() -> list[str]:
    """The command's words, the script by its place in the checkout."""
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(HERE.parent)
    return [str(script.relative_to(HERE.parent)) if inside else script.name, *sys.argv[1:]]


def _versions() -> dict[str, str]:
    found = {}
    for name in ("modicum", *_LIBRARIES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
