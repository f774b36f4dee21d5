"""`modicum bench machine`: what was measured of this machine, and what it depends on."""

from __future__ import annotations

import sys
from typing import Any, get_args

import torch

from modicum.cli.tables import print_json, table
from modicum.core.machine import this_machine
from modicum.core.machine.identity import depends_on, record_file
from modicum.core.machine.memory import resident_bytes
from modicum.core.machine.record import MachineRecord, RecordPart, machine_record
from modicum.core.units import format_bytes

_PROCESSOR_ALONE = (
    "this describes the processor, and not the CUDA device here; for that take a profile that "
    "comes with modicum, or write one by hand: modicum plan RECIPE --machine FILE"
)


def show_machine(*, again: bool, as_json: bool) -> None:
    """Print this machine's record; measure first where there is none, or if it is asked for.

    It is that of the processor, also where there is an accelerator, which is then said.

    Raises:
        ModicumError: it could not be measured.
    """
    if torch.cuda.is_available():
        print(_PROCESSOR_ALONE, file=sys.stderr)
    record, depends = machine_record(parts=get_args(RecordPart), again=again), depends_on()
    if as_json:
        found = {"record": record.figures(), "depends_on": depends, "file": str(record_file())}
        print_json(found | {"profile": _profile(record)})
        return
    kept = [record.kept_where(recompute=again) for again in (False, True)]
    said = [f"{least:.2f} to {most:.2f}" for least, most in kept]
    loaded = [record.of_run(reads).loaded_bytes for reads in ("tokenizer", "images", "sequences")]
    loaded.append(record.of_run("tokenizer", gradients=False).loaded_bytes)
    table(
        ("Measured", "", ""),
        [
            ("loaded", format_bytes(record.loaded_bytes), "by a run after it was planned"),
            ("", format_bytes(loaded[0]), "the same, where a tokenizer is there"),
            ("", format_bytes(loaded[1]), "the same, on images"),
            ("", format_bytes(loaded[2]), "the same, on sequences"),
            ("", format_bytes(loaded[3]), "the same, without a backward pass"),
            ("", format_bytes(record.compiled_bytes or 0), "more, where blocks are compiled"),
            ("kept", said[0], "bytes next to a byte of tensors at the peak"),
            ("", said[1], "the same, where blocks run again in the backward pass"),
            ("efficiency", f"{record.efficiency:.2f}", "of a large product's rate, in a step"),
            ("in bf16", f"{record.efficiency_in(half=True):.2f}", "of the same rate, in fp32"),
            ("when", record.when, str(record_file())),
        ],
    )
    print()
    table(("It depends on", ""), list(depends.items()))


def _profile(record: MachineRecord) -> dict[str, Any]:
    """This machine as `modicum plan --machine FILE` reads it on another one."""
    found = this_machine(torch.device("cpu"))
    in_half = record.efficiency_in(half=True) / record.efficiency
    others: dict[str, Any] = {}
    for reads in ("images", "sequences"):
        run = record.of_run(reads)
        base = resident_bytes() + run.still_loaded()
        others[reads] = {"efficiency": run.efficiency, "base": base, "kept": list(run.kept)}
    return {
        "name": found.processor,
        "device": "cpu",
        "memory": found.available_bytes + resident_bytes(),
        "flops": {"fp32": found.flops, "bf16": found.flops * in_half},
        "efficiency": record.efficiency,
        "base": resident_bytes() + record.still_loaded(),
        "kept": list(record.kept),
        **others,
        "measured": True,
        "source": f"modicum bench machine, {record.when}",
    }
