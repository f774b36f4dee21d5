"""`modicum bench machine`: what was measured of this machine, and what it depends on."""

from __future__ import annotations

from dataclasses import asdict

from modicum.cli.tables import print_json, table
from modicum.core.machine.record import depends_on, machine_record, record_file
from modicum.core.units import format_bytes


def show_machine(*, again: bool, as_json: bool) -> None:
    """Print this machine's record; measure first where there is none, or if it is asked for.

    Raises:
        ModicumError: it could not be measured.
    """
    record, depends = machine_record(again=again), depends_on()
    if as_json:
        print_json({"record": asdict(record), "depends_on": depends, "file": str(record_file())})
        return
    least, most = record.kept
    table(
        ("Measured", "", ""),
        [
            ("loaded", format_bytes(record.loaded_bytes), "by a run after it was planned"),
            ("kept", f"{least:.2f} to {most:.2f}", "bytes next to a byte of tensors at the peak"),
            ("efficiency", f"{record.efficiency:.2f}", "of a large product's rate, in a step"),
            ("when", record.when, str(record_file())),
        ],
    )
    print()
    table(("It depends on", ""), list(depends.items()))
