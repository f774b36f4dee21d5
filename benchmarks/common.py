"""What the benchmarks share: one at a time, interleaved, summed up as medians and quartiles."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from modicum.core.files import write_json
from modicum.proofs.bench import quiet as quiet_machine
from modicum.proofs.bench.quiet import BusyMachine, alone, say

__all__ = [
    "HERE",
    "RESULTS",
    "alone",
    "interleaved",
    "paired_ratio",
    "quiet",
    "say",
    "spread",
    "write_result",
]

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "tokenizers")


def quiet(*, refuses: bool = True) -> float:
    """The machine's load right before a series, once it has fallen (`modicum.proofs.bench.quiet`).

    Args:
        refuses: the benchmark ends where it does not fall; else it stays as it is.
    """
    try:
        return quiet_machine.quiet(refuses=refuses)
    except BusyMachine as error:
        raise SystemExit(f"{error}; the same command when they have ended") from None


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
