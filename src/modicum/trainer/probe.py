"""Measure this machine, as `python -m modicum.trainer.probe cpu`: small runs, and what they held.

Each run has a process of its own, which does all that a run does. Of two sizes, what grows with
tensors is distinguished from what does not: modules and kernels that are loaded when they are first
used, and what a tokenizer leaves behind. A small run with a tokenizer that is there, and some on
images and on sequences, show what that is where none is trained, and one without a backward pass
what it is then. The others show what the allocator keeps next to tensors in bf16, where weights are
frozen, and where blocks run again: each then leaves its input between the places of what it works
in. Runs on images and on sequences, blocks that run again and compiled ones are parts of their own,
measured when they are named. On an accelerator, where forecasts are of tensors alone, one run shows
how fast it is. The figures are a line of JSON on standard output, for
`modicum.core.machine.record`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from modicum.core.errors import Interrupted
from modicum.core.files import write_json
from modicum.core.heap import LARGEST, map_for
from modicum.core.machine import this_machine
from modicum.core.machine.memory import forget_peak, peak_resident_bytes, resident_bytes
from modicum.core.machine.probe_line import RUNS
from modicum.core.machine.record import assume, placeholder
from modicum.core.torch_compiler import load_compiler
from modicum.planner import plan
from modicum.planner.choose import COMPILE
from modicum.planner.plan import Plan
from modicum.recipe import Recipe
from modicum.trainer.folder import METRICS, RunFolder
from modicum.trainer.loop import train

_DATA: dict[str, Any] = {"limit": "1MB", "sequence_length": 256}
_MODEL = {"layers": 5, "width": 256, "heads": 4, "vocabulary_size": 2048}
_IMAGES = {"images": 64, "held_out": 16, "widths": [48, 48, 96, 96]}
_STEPS = 5  # what is kept grows for some updates, and the meter gives it back after the first two
# Runs that have a budget map their tensors otherwise; this one limits nothing.
_NO_LIMIT = "1000TB"
_budget: str | None = None
# What the heap keeps in runs on images varies from one to the next, where tensors are in it.
_TURNS = 3
# What keeps an accelerator busy: few weights, as each is drawn and written, and many rows, by its
# memory. A small step waits for launches.
_BUSY: dict[str, Any] = {"layers": 4, "width": 1024, "heads": 16, "vocabulary_size": 2048}
_BUSY_ROWS, _BUSY_STEPS, _ROOM_OF_ROW = 128, 6, 150_000_000
# So many rows have logits of 32 MiB.
_MAPPED_ROWS = LARGEST // (4 * _DATA["sequence_length"] * _MODEL["vocabulary_size"])


def main() -> None:
    """Run all, and print the figures."""
    global _budget
    asked = _arguments()
    if asked.budget:
        _budget = _NO_LIMIT
        map_for(budget=True)  # which the record is of
    assume(placeholder(), asked.device)
    with tempfile.TemporaryDirectory(prefix="modicum-probe-") as folder:
        print(json.dumps(_figures(Path(folder), asked.device, asked.parts, asked.loaded)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure this machine.")
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("parts", nargs="*", choices=tuple(RUNS), default=["every"])
    parser.add_argument("--budget", action="store_true", help="runs have one")
    parser.add_argument("--loaded", type=int, default=0, help="bytes, as a run of `every` had them")
    return parser.parse_args()


def _figures(folder: Path, device: str, parts: Sequence[str], loaded: int = 0) -> dict[str, Any]:
    """See `MachineRecord`."""
    if device != "cpu":
        full, half = (_run(folder / name, _busy(name, device)) for name in ("fp32", "bf16"))
        return {
            "loaded_bytes": 0,
            "with_tokenizer_bytes": 0,
            "without_gradients_bytes": 0,
            "compiled_bytes": 0,
            "compiler_bytes": 0,
            "kept": [0.0, 0.0],
            "kept_again": [0.0, 0.0],
            "efficiency": full["efficiency"],
            "half_efficiency": half["efficiency"],
            # Nothing else is known of them there.
            **dict.fromkeys(("images", "sequences"), _others(0, [0.0], full)),
        }
    half_model = {**_MODEL, "width": _alone(folder / "half", _half_width)["width"]}
    found: dict[str, Any] = {}
    if "every" in parts:
        found = _every(folder, half_model)
        loaded = found["loaded_bytes"]
    if "recomputation" in parts:
        found |= _recomputation(folder, half_model, loaded)
    if "images" in parts:
        found |= _on_images(folder)
    if "sequences" in parts:
        found |= _on_sequences(folder)
    if "compiled" in parts:
        found |= _compiled(folder)
    return found


def _every(folder: Path, half_model: dict[str, Any]) -> dict[str, Any]:
    """What any run may need."""
    compiler = _alone(folder / "compiler", _load)["compiler"]
    small = _alone(folder / "small", partial(_run, recipe=_recipe(_MODEL, rows=2)))
    # In a run with a budget its tensors are just too small to be mapped on their own.
    middle = _alone(folder / "middle", partial(_run, recipe=_recipe(_MODEL, rows=7)))
    large = _alone(folder / "fp32", partial(_run, recipe=_recipe(_MODEL, rows=10)))
    kept, loaded = _line(small, large)
    base_model = {"path": str(folder / "fp32" / "model")}
    read = _alone(folder / "read", partial(_run, recipe=_recipe(base_model, rows=2)))
    read_loaded = max(0, round(_beyond(read) - kept * read["small"]))
    forward = _alone(folder / "forward", partial(_run, recipe=_without_gradients(base_model)))
    adapted = _recipe(base_model, rows=14).changed(adapter={"method": "lora", "rank": 8})
    in_bf16 = _recipe(half_model, rows=10, precision="bf16")
    found, efficiency = [kept, _share(_beyond(middle) - loaded, middle["small"])], {}
    for name, recipe, held in (("bf16", in_bf16, loaded), ("adapted", adapted, read_loaded)):
        run = _alone(folder / name, partial(_run, recipe=recipe))
        if run["small"] >= LARGEST:  # of fewer it is chance
            found.append(_share(_beyond(run) - held, run["small"]))
        efficiency[name] = run["efficiency"]
    return {
        "loaded_bytes": loaded,
        "with_tokenizer_bytes": read_loaded,
        "without_gradients_bytes": max(0, round(_beyond(forward) - kept * forward["small"])),
        "compiler_bytes": min(compiler, loaded, read_loaded),
        "kept": [min(found), max(found)],
        "efficiency": large["efficiency"],
        "half_efficiency": efficiency["bf16"],
    }


def _recomputation(folder: Path, half_model: dict[str, Any], loaded: int) -> dict[str, Any]:
    """What is kept where blocks run again.

    With logits that are mapped on their own, as those of runs that must save memory are.
    """
    again = []
    for name, shape in (("fp32", _MODEL), ("bf16", half_model)):
        recipe = _recipe(shape, _MAPPED_ROWS, precision=name)
        recipe = recipe.changed(training__recompute="blocks")
        run = _alone(folder / f"{name}-again", partial(_run, recipe=recipe))
        again.append(_share(_beyond(run) - loaded, run["small"]))
    return {"kept_again": [min(again), max(again)]}


def _on_images(folder: Path) -> dict[str, Any]:
    """What a run on images loads and keeps, and its speed."""
    turns = _TURNS if _budget is None else 1
    few, *several = (
        _alone(folder / f"images-{number}", partial(_run, recipe=_images(rows)))
        for number, rows in enumerate((16, *(160,) * turns))
    )
    _, loaded = _line(few, sorted(several, key=_beyond)[turns // 2])
    found = _others(loaded, [_line(few, each)[0] for each in several], several[-1])
    # Convolutions in bf16 are much slower than products where there are no instructions for them.
    in_half = partial(_run, recipe=_images(16).changed(training__precision="bf16"))
    half = _alone(folder / "images-bf16", in_half)["efficiency"]
    return {"images": found | {"half_efficiency": half}}


def _on_sequences(folder: Path) -> dict[str, Any]:
    """The same of a run on sequences. States of one step are small, and all of a wide net's are
    mapped on their own."""
    few, narrow, wide = (
        _alone(folder / f"sequences-{rows}-{width}", partial(_run, recipe=_sequences(rows, width)))
        for rows, width in ((16, 256), (1024, 256), (1024, 512))
    )
    kept = [_line(few, each)[0] for each in (narrow, wide)]
    return {"sequences": _others(max(0, round(_beyond(few))), kept, wide)}


def _others(loaded: int, kept: Sequence[float], run: dict[str, Any]) -> dict[str, Any]:
    """See `OtherRuns`."""
    ends = [min(kept), max(kept)]
    return {"loaded_bytes": loaded, "kept": ends, "efficiency": run["efficiency"]}


def _compiled(folder: Path) -> dict[str, Any]:
    """What a run holds more where its blocks are compiled, with nothing in the compiler's cache."""
    eager = _alone(folder / "eager", partial(_run, recipe=_recipe(_MODEL, rows=2)))
    compiled = _alone(folder / "compiled", _run_compiled)
    return {"compiled_bytes": max(0, round(_beyond(compiled) - _beyond(eager)))}


def _run_compiled(out: Path) -> dict[str, Any]:
    """A run whose blocks are compiled, also where that is slower."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(out.with_suffix(".cache"))
    recipe = _recipe(_MODEL, rows=2).changed(training__compile="blocks")
    return _run(out, recipe, {COMPILE: "blocks"})


def _line(small: dict[str, Any], large: dict[str, Any]) -> tuple[float, int]:
    """Of two sizes of a run: what is kept next to a byte of tensors, and what is loaded."""
    first, last = sorted((small, large), key=lambda run: run["small"])
    kept = _share(_beyond(last) - _beyond(first), last["small"] - first["small"])
    return kept, max(0, round(_beyond(large) - kept * large["small"]))


def _share(held: float, small: int) -> float:
    """What is held next to a byte of small tensors; of few, most of it is chance."""
    return max(0.0, held / max(small, LARGEST))


def _half_width(out: Path) -> dict[str, Any]:
    """Width of the run in bf16: a processor without instructions for it would take minutes."""
    single, half = (_product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    return {"width": _MODEL["width"] if half < 2 * single else 64}


def _product_seconds(dtype: torch.dtype) -> float:
    """The fastest of three products of matrices."""
    factors = torch.ones(512, 512, dtype=dtype)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        factors @ factors
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _beyond(run: dict[str, Any]) -> float:
    """What a run's process grew by beyond its tensors."""
    beyond: float = run["grown"] - run["tensors"]
    return beyond


def _load(out: Path) -> dict[str, Any]:
    """What the process grows by when it loads torch's compiler."""
    before = resident_bytes()
    load_compiler()
    return {"compiler": resident_bytes() - before}


def _alone(out: Path, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Work in a process of its own, forked before torch has threads: a start costs no import.

    Raises:
        ChildProcessError: it failed, and has said why.
    """
    if (child := os.fork()) == 0:
        code = 1
        try:
            write_json(out.with_suffix(".json"), work(out))
            code = 0
        except Interrupted:
            _end_by(signal.SIGTERM)
        finally:
            if code:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    if status:
        raise ChildProcessError(f"the run {out.name} ended with status {status}")
    figures: dict[str, Any] = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    print(f"{out.name}: {figures}", file=sys.stderr)
    return figures


def _end_by(number: int) -> None:
    """End as a signal ends a process, which whoever started this one sees."""
    with suppress(OSError):  # SIGKILL's way cannot be set
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _run(out: Path, recipe: Recipe, chosen: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the process would grow by if nothing were kept, the bytes next to which something is
    kept, what it did grow by since it was planned, and its speed."""
    made = plan(recipe.changed(budget__memory=_budget))
    for field, value in (chosen or {}).items():
        made = made.chosen(field, value, "this run measures it")
    train(made, out, listener=_without_preparing)
    return {
        "tensors": made.prediction.process_bytes(0, 0.0, staged=False),
        "small": max(1, made.prediction.small_bytes),
        "grown": peak_resident_bytes() - made.process_base,
        "efficiency": _efficiency(made, out),
    }


def _without_preparing(event: dict[str, Any]) -> None:
    """Forget the peak of the time before the model is built: what is read by then is given back."""
    if event.get("name") == "building":
        forget_peak()


def _busy(precision: str, device: str) -> Recipe:
    rows = max(1, min(_BUSY_ROWS, torch.cuda.mem_get_info()[0] // _ROOM_OF_ROW))
    return _recipe(_BUSY, rows, precision, device).changed(training__steps=_BUSY_STEPS)


def _without_gradients(model: dict[str, Any]) -> Recipe:
    recipe = _recipe(model, rows=2).changed(training__clip_norm=None)
    return recipe.changed(optimizer={"method": "distzo2"})


def _images(rows: int) -> Recipe:
    return Recipe(
        task={"method": "images", **_IMAGES},
        training=_training(rows, "fp32", "cpu"),
        evaluation={"rows": 4},
        checkpoint={"asynchronous": False},
    )


def _sequences(rows: int, width: int) -> Recipe:
    shape = {"sequences": rows, "held_out": 16, "length": 16, "width": width}
    return Recipe(
        task={"method": "sequences", **shape},
        training=_training(rows, "fp32", "cpu"),
        evaluation={"rows": 4},
        checkpoint={"asynchronous": False},
    )


def _recipe(
    model: dict[str, Any], rows: int, precision: str = "fp32", device: str = "cpu"
) -> Recipe:
    return Recipe(
        model=model,
        data=_DATA,
        training=_training(rows, precision, device),
        samples={"count": 1, "tokens": 4},
        evaluation={"rows": 4},
        checkpoint={"asynchronous": False},
    )


def _training(rows: int, precision: str, device: str) -> dict[str, Any]:
    return {
        "steps": _STEPS,
        "batch_size": rows,
        "micro_batch_size": rows,
        "recompute": "none",
        "compile": "none",
        "precision": precision,
        "device": device,
    }


def _efficiency(made: Plan, folder: Path) -> float:
    """Of the rate of a large product, the part that the fastest step reached.

    The machine may have other work to do while it is measured, which must not count: a part above
    one says that it had some while the product was timed, so that is timed again.
    """
    seconds = min(float(row["seconds"]) for row in RunFolder(folder).rows(METRICS))
    reached, rate = made.prediction.flops / seconds, made.machine.flops
    if reached > rate:
        rate = max(rate, this_machine(torch.device(made.device)).flops)
    return reached / rate


if __name__ == "__main__":
    main()
