"""How long `make test` takes with 108 methods: those that are there, repeated under other names.

What runs is the sample of a checkout without a green commit, as in CI's first run. Copies of a
method have copies of its proof and of its own tests; a copy that fails would say that something
names a method by hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import HERE, alone, say, write_result
from simulated import checkout_with

METHODS = 108
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def main() -> None:
    """Make the checkout, run its tests once, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", type=int, default=METHODS)
    parser.add_argument("--seed", default="0", help="of the sample")
    arguments = parser.parse_args()
    with alone(), tempfile.TemporaryDirectory(prefix="modicum-tests-") as temporary:
        checkout = Path(temporary) / "checkout"
        names = checkout_with(arguments.methods, HERE.parent, checkout)
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-n", "logical", "--maxprocesses=4",
                   "--dist=worksteal", "-q", f"--sample={arguments.seed}"]  # fmt: skip
        started = time.perf_counter()
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        seconds = time.perf_counter() - started
    lines = done.stdout.strip().splitlines()
    for line in [line for line in lines if line.startswith(("FAILED", "ERROR"))][:20]:
        say(line)
    counts = {word: int(number) for number, word in COUNTS.findall(lines[-1])}
    say(f"{lines[-1]}; {seconds / 60:.1f} min with {len(names)} methods")
    figures = {"methods": len(names), "minutes": seconds / 60, "counts": counts}
    write_result("test-time", figures, {"seed": arguments.seed})
    if done.returncode:
        raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
