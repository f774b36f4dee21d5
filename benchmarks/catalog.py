"""How long the catalog takes with 108 methods: those that are there, repeated under other names.

Medians over fresh processes in turns. `cold` has no cache of what was read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from common import HERE, alone, interleaved, say, spread, write_result
from simulated import checkout_with

METHODS = 108
MISTAKE = "adapter:\n  method: lora\n  rnk: 8\n"


def main() -> None:
    """Make the checkout, time the commands in turns, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with alone(), tempfile.TemporaryDirectory(prefix="modicum-catalog-") as temporary:
        folder = Path(temporary)
        names = checkout_with(METHODS, HERE.parent, folder / "checkout")
        (folder / "recipe.yaml").write_text(MISTAKE, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": str(folder / "checkout" / "src"),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        recipe = str(folder / "recipe.yaml")

        def cold() -> float:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            return _seconds(["methods"], environment)

        contenders = {
            "methods_cold": cold,
            "methods": lambda: _seconds(["methods"], environment, lines=len(names)),
            "recipe_error": lambda: _seconds(["train", recipe], environment, expected=2),
        }
        figures = {k: spread(v) for k, v in interleaved(contenders, rounds=rounds).items()}
    for name, figure in figures.items():
        say(f"{name:14} {figure['median']:.3f} s")
    write_result("catalog", {"methods": len(names), "seconds": figures}, {"rounds": rounds})


def _seconds(
    words: list[str], environment: Mapping[str, str], expected: int = 0, lines: int = 0
) -> float:
    command = [sys.executable, "-m", "modicum", *words]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode != expected or len(done.stdout.splitlines()) < lines:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return elapsed


if __name__ == "__main__":
    main()
