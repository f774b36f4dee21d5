"""`modicum check`: a room's battery on the methods of a file, and how they did in it."""

from __future__ import annotations

from pathlib import Path

from modicum.cli.tables import print_json, table
from modicum.core.contracts.catalog import read_file
from modicum.core.errors import FoundWanting, InputError
from modicum.proofs.contracts import run_battery


def run_checks(file: Path, *, as_json: bool) -> None:
    """Run the batteries, and print a line for each check.

    Raises:
        InputError: the file defines no method, or one of a room without a battery.
        FoundWanting: a check failed.
    """
    records = read_file(file)
    if not records:
        raise InputError("defines no method: no class in it has an `info`", file=file)
    results = [(record.name, result) for record in records for result in run_battery(record)]
    failed = sum(not result.passed for _, result in results)
    skipped = sum(result.skipped for _, result in results)
    if as_json:
        print_json(
            [
                {
                    "method": name,
                    "check": result.name,
                    "passed": result.passed,
                    "skipped": result.skipped,
                    "message": result.message,
                }
                for name, result in results
            ]
        )
    else:
        rows = [
            (
                name,
                result.name,
                "skipped" if result.skipped else "ok" if result.passed else "FAILED",
                result.message,
            )
            for name, result in results
        ]
        table(("method", "check", "", "why"), rows)
        print(
            f"{len(results) - failed - skipped} of {len(results)} passed, {skipped} "
            f"({skipped / len(results):.0%}) say nothing of such a method, {failed} failed"
        )
    if failed:
        raise FoundWanting(f"{failed} of {len(results)} checks failed")
