"""What people see of the composition drill."""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modicum.core.errors import FoundWanting
from modicum.core.files import write_json
from modicum.core.units import format_duration


def run_drill(
    seed: int, count: int, *, work: Path | None, output: Path | None, as_json: bool
) -> None:
    """Run the drill, line by line, and say how it came out.

    Raises:
        FoundWanting: a case is not as it should be, or too few were accepted.
    """
    import torch

    from modicum.core.machine import this_machine
    from modicum.proofs.drill import drill

    def tell(event: dict[str, Any]) -> None:
        if not as_json and event["event"] == "result":
            print(_line(event), flush=True)

    with tempfile.TemporaryDirectory(prefix="modicum-drill-") as temporary:
        drilled = drill(seed, count, work or Path(temporary), listener=tell)
    content = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": this_machine(torch.device("cpu")).as_json(),
        "seed": seed,
        "count": count,
        **drilled.as_json(),
    }
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_json(output, content)
    if as_json:
        print(json.dumps(content, indent=2))
    passed = sum(result.passed for result in drilled.results)
    told = f"{passed} of {count} passed, {drilled.accepted_share:.0%} were accepted"
    if not as_json:
        print(told)
    if not drilled.passed:
        raise FoundWanting(f"the drill found something wanting: {told}")


def _line(result: dict[str, Any]) -> str:
    """A case in a line: its methods, and what became of it."""
    recipe = result["case"]["recipe"]
    methods = [value["method"] for value in recipe.values() if "method" in value]
    head = f"{result['name']:>8}  {' + '.join(methods)}"
    if result["faults"]:
        return f"{head}: WRONG: {'; '.join(result['faults'])}"
    if result["refused"] is not None:
        return f"{head}: refused: {result['refused']}"
    took = format_duration(result["seconds"])
    return f"{head}: resumed and exported the same, peak {result['peak_ratio']:.2f}, {took}"
