"""The demo, run afresh: how long it takes, what was predicted and what came."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import alone, say, write_result

PARTS = ("demo-pretrain", "demo-adapt")


def figures_of(run: Path) -> dict[str, Any]:
    """What a part's run.json says, with the two ratios that are promised."""
    record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    peak, final = record["peak_bytes"], record["final"]
    return {
        "seconds": record["seconds"],
        "tokens_per_second": record["tokens_per_second"],
        "peak_bytes": peak,
        "prediction_error": abs(peak["predicted"] / peak["measured"] - 1),
        "process_over_budget": peak["process"] / peak["budget"],
        "final": final,
        "validation_loss_change": final["validation_loss"] - final["initial_validation_loss"],
    }


def main() -> None:
    """Run the demo in an empty folder, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    modicum = [sys.executable, "-m", "modicum"]
    with alone(), tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [*modicum, "demo", "--runs", folder, "--progress", "lines"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - start
        parts = {name: figures_of(Path(folder) / name) for name in PARTS}
    figures = {
        "seconds": seconds,
        "largest_prediction_error": max(part["prediction_error"] for part in parts.values()),
        "largest_process_over_budget": max(p["process_over_budget"] for p in parts.values()),
        "parts": parts,
    }
    say(f"{seconds:.0f} s; {json.dumps(parts, indent=2)}")
    write_result("demo", figures, {"recipes": PARTS})


if __name__ == "__main__":
    main()
