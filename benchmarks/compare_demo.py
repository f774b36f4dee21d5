"""How long a first comparison takes: three adapters on the demo's model, tuned and judged.

    python benchmarks/compare_demo.py [--base runs/demo-pretrain] [--keep FOLDER]

Without `--base` the demo's model is trained first, which is not timed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import alone, say, write_result

SIDES, TOKENS, TRIALS, SEEDS = "lora,pissa,mos", "100k", 3, 3


def modicum(*words: str) -> str:
    """What a command prints; it must end well."""
    command = [sys.executable, "-m", "modicum", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout


def main() -> None:
    """Train the base if there is none, then time the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, help="the demo's first run")
    parser.add_argument("--keep", type=Path, help="leave the comparison in this folder")
    arguments = parser.parse_args()
    with alone(), tempfile.TemporaryDirectory() as temporary:
        base = arguments.base or Path(temporary) / "demo-pretrain"
        if not base.is_dir():
            say("training the demo's model")
            modicum("train", "demo-pretrain", "--out", str(base), "--quiet")
        out = arguments.keep or Path(temporary) / "comparison"
        start = time.perf_counter()
        found = json.loads(
            modicum(
                "compare", "demo-adapt", "--vary", f"adapter={SIDES}", "--budget",
                f"tokens={TOKENS}", "--trials", str(TRIALS), "--seeds", str(SEEDS), "--out",
                str(out), "--set", f"model.path={base}", "--fresh", "--json",
            )
        )  # fmt: skip
        seconds = time.perf_counter() - start
    runs = [row["seconds"] for row in found["trials"]]
    figures = {
        "minutes": seconds / 60,
        "runs": len(runs),
        "training_share": sum(value or 0.0 for value in runs) / seconds,
        "same_data": all(row["same"] for row in found["data"].values()),
        "winner": found["winner"],
        "means": {row["side"]: row["mean"] for row in found["judgement"]["standings"]},
    }
    settings = {"sides": SIDES, "tokens": TOKENS, "trials": TRIALS, "seeds": SEEDS}
    write_result("compare_demo", figures, settings)


if __name__ == "__main__":
    main()
