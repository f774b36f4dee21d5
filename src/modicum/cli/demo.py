"""`modicum demo`: both shipped recipes, one after the other, and what came of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.cli.tables import table
from modicum.core.errors import ModicumError
from modicum.core.machine.child_process import signal_name
from modicum.core.units import format_bytes, format_duration
from modicum.report.numbers import quantity

PARTS = (
    ("demo-pretrain", "a small code model, from nothing, on the Python standard library"),
    ("demo-adapt", "LoRA under a memory budget, on a package it has not seen"),
)


class DemoFailed(ModicumError):
    """A part of the demo failed; it has said why."""


def run_demo(runs: Path, progress: str) -> None:
    """Run both parts, each in a process of its own, so that each has its own memory to measure.

    Raises:
        ModicumError: a part failed, with its exit code.
    """
    start = time.perf_counter()
    for number, (name, what) in enumerate(PARTS, start=1):
        print(f"\n[{number}/{len(PARTS)}] {name}: {what}\n", flush=True)
        command = [sys.executable, "-m", "modicum", "train", name, "--out", str(runs / name)]
        command += ["--progress", progress]
        if name == "demo-adapt":
            command += ["--set", f"model.path={runs / PARTS[0][0]}"]
        code = _finish(command)
        if code:
            ended = (
                f"ended with exit code {code}" if code > 0 else f"was ended by {signal_name(-code)}"
            )
            failure = DemoFailed(f"{name} {ended}; the same command resumes it")
            failure.exit_code = code if code > 0 else 1  # type: ignore[misc]
            raise failure
    show_results(runs)
    print(f"\nthe demo took {format_duration(time.perf_counter() - start)}")
    for name, _ in PARTS:
        print(f"report: {runs / name / 'report.html'}")
    print(f"let it write: {_command()} chat {runs / PARTS[1][0]} --prompt 'async def '")


def show_results(runs: Path) -> None:
    """Print what both parts were predicted to take, what they took, and what they wrote."""
    from modicum.report import summary

    facts = {name: summary(runs / name) for name, _ in PARTS}
    print("\nWhat was predicted, and what came:\n")
    table(("", *(name for name, _ in PARTS)), _rows(list(facts.values())))
    _show_choices(runs / PARTS[1][0])
    _show_samples(runs / PARTS[1][0])
    print(f"\n{about_samples(facts[PARTS[1][0]])}")


def show_functions(folder: Path) -> None:
    """Write labelled functions of the standard library, and say where and how many.

    Raises:
        InputError: something is in the folder already.
    """
    from modicum.data.library_functions import write_functions

    for side, rows in write_functions(folder).items():
        print(f"wrote {folder / side}.jsonl: {rows:,} functions")
    print("next:  modicum train functions-lora")


def _command() -> str:
    """What to type for modicum: the environment of a checkout is on the PATH only if activated."""
    called = Path(sys.argv[0])
    typed = called.name == "modicum" and shutil.which("modicum") is None
    return str(called) if typed else "modicum"


def _finish(command: list[str]) -> int:
    """Run a part to its end; asked to stop, let it save first."""
    with subprocess.Popen(command) as part:
        while True:
            try:
                return part.wait()
            except KeyboardInterrupt:
                part.terminate()


def _rows(facts: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    def row(words: str, *path: str) -> tuple[str, ...]:
        cells = [words]
        for fact in facts:
            value: Any = fact
            for key in path:
                value = (value or {}).get(key)
            if value is None:
                cells.append("-")
            elif "bytes" in path[0]:
                cells.append(format_bytes(value))
            else:
                cells.append(f"{value:,.3f}" if path[0] == "loss" else f"{value:,.0f}")
        return tuple(cells)

    return [
        row("trained parameters", "parameters", "trainable"),
        row("tensor bytes, predicted", "peak_bytes", "predicted"),
        row("tensor bytes, measured", "peak_bytes", "measured"),
        row("Python and torch, before the first tensor", "peak_bytes", "base"),
        row("process, budget", "peak_bytes", "budget"),
        row("process, predicted", "peak_bytes", "process_predicted"),
        row("process, measured", "peak_bytes", "process"),
        row("tokens per second", "tokens_per_second"),
        row("validation loss, before", "loss", "initial_validation"),
        row("validation loss, after", "loss", "validation"),
    ]


def _show_choices(folder: Path) -> None:
    """What the budget was, and what the plan chose for it."""
    from modicum.trainer.folder import PLAN, RunFolder

    plan = RunFolder(folder).rows(PLAN)[0]
    said = plan["prediction"]
    budget, base = said["budget_bytes"], said["process_base"] or 0
    own = f"{format_bytes(base)} for Python and torch here, and " if base else ""
    print(f"\n{folder.name}: its budget was {own}{format_bytes(budget - base)} for the run, so")
    for choice in plan["choices"]:
        value = choice["value"]
        shown = ("no", "yes")[value] if isinstance(value, bool) else value
        print(f"    {choice['field']} is {shown}: {choice['why']}")


def about_samples(facts: Mapping[str, Any]) -> str:
    """Why the samples are nonsense, and which figures show that the run worked.

    Args:
        facts: of the run that wrote them, as `report.summary` has them.
    """
    loss, peak = facts["loss"], facts["peak_bytes"]
    before, after = (quantity(loss[key], "nats") for key in ("initial_validation", "validation"))
    predicted, measured = (format_bytes(peak[key]) for key in ("predicted", "measured"))
    return (
        f"A model of {facts['parameters']['total']:,} parameters writes nonsense that looks like "
        "code after minutes of training.\n"
        "Look at the validation loss (on text that it never trained on) instead, "
        f"{before} before adapting and {after} after, and at the plan:\nit predicted {predicted} "
        f"of tensors, and {measured} were measured."
    )


def _show_samples(folder: Path) -> None:
    from modicum.trainer.folder import SAMPLES, RunFolder

    rows = RunFolder(folder).rows(SAMPLES)
    first, last = min(r["step"] for r in rows), max(r["step"] for r in rows)
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        print(f"\n--- {prompt!r}")
        for step, when in ((first, "before adapting"), (last, "after")):
            for row in rows:
                if row["prompt"] == prompt and row["step"] == step:
                    text = row["text"].rstrip()
                    print(f"{when}:\n" + "\n".join(f"    {line}" for line in text.splitlines()))
