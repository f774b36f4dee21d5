"""How long a user waits for modicum itself: medians over fresh processes, after one warm-up."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import alone, interleaved, say, spread, write_result

MISTAKE = "training:\n  steps: 10\n  lerning_rate: 1e-3\n"


def seconds(command: list[str], expected: int = 0) -> float:
    """Wall time of a fresh process that must end with the exit code `expected`."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    elapsed = time.perf_counter() - start
    if done.returncode != expected:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr}")
    return elapsed


def main() -> None:
    """Time every command, in turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    modicum = [str(Path(sys.executable).with_name("modicum"))]
    with alone(), tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(MISTAKE, encoding="utf-8")
        contenders = {
            "python": lambda: seconds([sys.executable, "-c", "pass"]),
            "import": lambda: seconds([sys.executable, "-c", "import modicum"]),
            "help": lambda: seconds([*modicum, "--help"]),
            "methods": lambda: seconds([*modicum, "methods"]),
            "recipe_error": lambda: seconds([*modicum, "train", str(recipe)], expected=2),
        }
        figures = {k: spread(v) for k, v in interleaved(contenders, rounds=rounds).items()}
    for name, figure in figures.items():
        say(f"{name:14} {figure['median']:.3f} s")
    write_result("startup", {"seconds": figures}, {"rounds": rounds})


if __name__ == "__main__":
    main()
