"""What runs on a CUDA device, whether it computes what the CPU does, and whether plans of it hold.

`kernels`: what is written in Triton against PyTorch's operations. `methods`: every method in its
tiny form trains a small decoder (or what it asks for) on the device and on the CPU. Their losses
must agree, an interrupted run must resume to the bit, and the measured peak of tensor bytes stands
next to the forecast. `forecasts`: models of 1 to 7 billion random weights, planned under a budget
and trained for some updates: peak and step next to the forecast.

    python benchmarks/gpu.py                       # ten minutes on a large card
    python benchmarks/gpu.py --parts methods --only lora --only nf4

Parts and methods can be run apart: what was measured before on the same card is kept.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from common import RESULTS, alone, say, write_result
from gpu_models import FORECASTS, Forecast, model_folder

Row = dict[str, Any]
PARTS = ("kernels", "methods", "forecasts")
STEPS, BATCH, INTERRUPTED = 6, 8, 3
# Losses in fp32 of two devices may be so far apart, relatively, in a few updates: these move them
# by one part in a hundred.
LOSSES_WITHIN, BF16_WITHIN = 2e-4, 2e-3
DECODER: Row = {"layers": 2, "width": 64, "heads": 4, "vocabulary_size": 600}
TEXT: Row = {"include": ["json/**", "email/**"], "sequence_length": 64}


def settings(recipe: Row, device: str, precision: str) -> Row:
    """The recipe with all that makes its runs short and alike."""
    sections: Row = {
        "training": {
            "steps": STEPS,
            "batch_size": BATCH,
            "device": device,
            "precision": precision,
            "compile": "none",
        },
        "checkpoint": {"every": 2},
        "evaluation": {"every": STEPS, "rows": 8},
        "samples": {"count": 0},
    }
    if "task" not in recipe:
        sections |= {"data": TEXT}
        recipe = {"model": DECODER} | recipe
    return recipe | {name: given | recipe.get(name, {}) for name, given in sections.items()}


def base_model(folder: Path) -> Path:
    """A trained model for the methods that ask for one; its head is a layer of its own."""
    recipe: Row = {"model": DECODER | {"tied_embeddings": False}}
    trained(settings(recipe, "cpu", "fp32"), folder)
    return folder


def trained(recipe: Row, out: Path, *, interrupted: bool = False) -> Row:
    """Run a recipe, or interrupt it, plan it again and resume; what it came to."""
    import modicum

    if interrupted:
        with suppress(KeyboardInterrupt):
            modicum.train(modicum.plan(modicum.Recipe(**recipe)), out=out, listener=_interrupt)
    modicum.train(modicum.plan(modicum.Recipe(**recipe)), out=out)
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    run = json.loads((out / "run.json").read_text())
    return {
        "losses": [step["loss"] for step in steps if "loss" in step],
        "peak": run["peak_bytes"],
    }


def _interrupt(event: Row) -> None:
    if event["event"] == "step" and event["step"] == INTERRUPTED:
        raise KeyboardInterrupt


def apart(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two runs' losses."""
    return max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(one, other, strict=True))


def method_row(name: str, recipe: Row, base: str) -> Row:
    """A method on both devices, in bf16, and resumed."""
    import modicum
    from modicum.core.errors import ModicumError

    torch.set_num_threads(1)
    text = json.dumps(recipe).replace("{base}", base)
    row: Row = {"name": name, "faults": []}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        runs: dict[str, Row] = {}
        for label, device, precision in (
            ("cpu", "cpu", "fp32"), ("cuda", "cuda", "fp32"), ("bf16", "cuda", "bf16"),
        ):  # fmt: skip
            asked = settings(json.loads(text), device, precision)
            try:
                modicum.plan(modicum.Recipe(**asked))
            except ModicumError as reason:
                row[f"refused_{label}"] = str(reason)
                continue
            try:
                runs[label] = trained(asked, Path(work) / label)
            except Exception as error:  # whatever comes is a finding
                row["faults"].append(f"{label}: {type(error).__name__}: {str(error)[:400]}")
        if "cuda" in runs:
            asked = settings(json.loads(text), "cuda", "fp32")
            try:
                again = trained(asked, Path(work) / "again", interrupted=True)["losses"]
                row["resumed_apart"] = apart(again, runs["cuda"]["losses"])
                if row["resumed_apart"]:
                    row["faults"].append(f"resumed: losses {row['resumed_apart']:.2e} apart")
            except Exception as error:
                row["faults"].append(f"resume: {type(error).__name__}: {str(error)[:400]}")
            row["peak"] = runs["cuda"]["peak"]
        if "cpu" in runs:
            row["losses"] = runs["cpu"]["losses"]
        if "cuda" in runs and "cpu" in runs:
            row["losses_apart"] = apart(runs["cuda"]["losses"], runs["cpu"]["losses"])
            if not row["losses_apart"] <= LOSSES_WITHIN:
                row["faults"].append(f"losses: {row['losses_apart']:.2e} from the CPU's")
        if "bf16" in runs and "cpu" in runs:
            row["bf16_apart"] = apart(runs["bf16"]["losses"], runs["cpu"]["losses"])
            if not row["bf16_apart"] <= BF16_WITHIN:
                row["faults"].append(f"bf16: losses {row['bf16_apart']:.2e} from fp32's")
    return row | {"seconds": round(time.monotonic() - begun, 1)}


def method_rows(only: list[str]) -> Iterator[tuple[str, Row]]:
    """Recipes of every method that runs on one rank, by name."""
    from modicum.planner.combinations import refusal, rows

    for row in rows():
        if (not only or row.record.name in only) and refusal(row, "one rank") is None:
            yield row.name, row.recipe()


def methods(work: Path, only: list[str], jobs: int) -> Iterator[Row]:
    """A row for each method, several at a time: nothing is timed."""
    base = base_model(work / "base")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        waiting = {
            pool.submit(method_row, name, recipe, str(base)): name
            for name, recipe in reversed([*method_rows(only)])
        }
        for done in as_completed(waiting):
            try:
                row = done.result()
            except Exception as error:
                row = {"name": waiting[done], "faults": [f"{type(error).__name__}: {error}"]}
            say(f"{row['name']}: {'; '.join(row['faults']) or 'ok'} ({row.get('seconds')} s)")
            yield row


def kernels() -> Iterator[Row]:
    """Kernels next to PyTorch's operations: the same bits on both devices, and seconds."""
    from modicum.linears import quantized
    from modicum.linears.int8 import Int8Linear
    from modicum.linears.nf4 import NF4Linear

    for kind in (NF4Linear, Int8Linear):
        on_cpu = kind.from_dense(
            torch.randn(4097, 11008, generator=torch.Generator().manual_seed(0))
        )
        tensors = [tensor.cuda() for tensor in on_cpu.frozen_tensors()]
        row: Row = {"name": f"{kind.form}, decoded", "shape": [4097, 11008]}
        for dtype in (torch.bfloat16, torch.float32):
            expected = quantized.decode(*on_cpu.frozen_tensors(), 11008, kind.form, dtype)
            for label, by_kernel in (("kernel", True), ("operations", False)):
                with _there_is_triton(by_kernel):
                    made = quantized.decode(*tensors, 11008, kind.form, dtype)
                row[f"{dtype}, {label}, same bits"] = torch.equal(made.cpu(), expected)
        for label, by_kernel in (("kernel", True), ("operations", False)):
            decode = partial(quantized.decode, *tensors, 11008, kind.form, torch.bfloat16)
            with _there_is_triton(by_kernel):
                seconds = [_seconds(decode) for _ in range(30)]
            row[f"seconds, {label}"] = median(seconds[5:])
        say(str(row))
        yield row


def _there_is_triton(there: bool) -> AbstractContextManager[Any]:
    return mock.patch("modicum.linears.quantized._has_triton", return_value=there)


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def forecast_row(forecast: Forecast, work: Path) -> Row:
    """A large model under a budget: what the plan said, and what came."""
    import modicum
    from modicum.core.machine.memory import release

    out = work / "run"
    shutil.rmtree(out, ignore_errors=True)
    recipe = forecast.recipe(model_folder(work, forecast.model))
    made = modicum.plan(modicum.Recipe(**recipe))
    begun = time.monotonic()
    modicum.train(made, out=out)
    seconds = time.monotonic() - begun
    run = json.loads((out / "run.json").read_text())
    first = json.loads((out / "plan.jsonl").read_text().splitlines()[0])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    peak = run["peak_bytes"]
    step = median(each["seconds"] for each in steps[3:])
    tokens = first["tokens_per_update"]
    release()
    return {
        "name": forecast.name,
        "recipe": {**recipe, "model": forecast.model},
        "peak": peak,
        "tensors_error": peak["predicted"] / peak["measured"] - 1,
        "reserved": torch.cuda.max_memory_reserved(),
        "step": step,
        "step_predicted": tokens / first["prediction"]["tokens_per_second"],
        "tokens_per_second": tokens / step,
        "flops_per_second": made.prediction.flops / step,
        "choices": {each["field"]: each["value"] for each in first["choices"]},
        "losses": [each["loss"] for each in steps],
        "seconds": seconds,
    }


def forecasts(work: Path, only: list[str]) -> Iterator[Row]:
    """A row for each large model, one at a time, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    for each in FORECASTS:
        if only and each.name not in only:
            continue
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                row = pool.submit(partial(forecast_row, each, work)).result()
            except Exception as error:
                row = {"name": each.name, "faults": [f"{type(error).__name__}: {str(error)[:600]}"]}
        say(summary(row))
        yield row


def summary(row: Row) -> str:
    """A row of forecasts for people."""
    if "faults" in row:
        return f"{row['name']}: {row['faults'][0]}"
    peak = row["peak"]
    return (
        f"{row['name']}: {peak['measured'] / 1e9:.2f} GB of tensors "
        f"({100 * row['tensors_error']:+.1f} %), a step {row['step']:.3f} s "
        f"(forecast {row['step_predicted']:.3f}), {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['flops_per_second'] / 1e12:.0f} TFLOP/s; {row['seconds']:.0f} s in all"
    )


def kept(card: str) -> Row:
    """What was measured before on this card."""
    path = RESULTS / "gpu.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    same = known["settings"]["card"] == card
    return {part: known[part] for part in PARTS if part in known} if same else {}


def main() -> None:
    """Run the parts, write each row as soon as it is there, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--only", action="append", default=[], help="a row's name")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1))
    parser.add_argument("--output", type=Path, help="write the result there, not among the others")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here")
    card = torch.cuda.get_device_name()
    figures = kept(card) if asked.output is None else {}
    named = {"card": card, "cuda": torch.version.cuda, "steps": STEPS}
    with alone(), tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        ways: dict[str, Callable[[], Iterator[Row]]] = {
            "kernels": kernels,
            "methods": lambda: methods(work, asked.only, asked.jobs),
            "forecasts": lambda: forecasts(work, asked.only),
        }
        for part in asked.parts:
            rows = {row["name"]: row for row in figures.get(part, [])}
            for row in ways[part]():
                rows[row["name"]] = row
                figures[part] = [rows[name] for name in sorted(rows)]
                write_result("gpu", figures, named, asked.output)
    wrong = [row for rows in figures.values() for row in rows if row.get("faults")]
    sys.exit(5 if wrong else 0)


if __name__ == "__main__":
    main()
