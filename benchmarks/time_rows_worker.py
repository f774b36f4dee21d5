"""`modicum train` with a delay of 200 ms at one kind of place: what `time_rows.py` starts.

    python benchmarks/time_rows_worker.py PLACE LOG train RECIPE --out FOLDER ...

What was slept is appended to LOG, line by line, as a process that is killed has no last word.
Delays are put around what is timed, where a slow disk, network or model would be: none is in the
clock's own places.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

DELAY = 0.2
START_DELAYS = 10  # there is one start: it is delayed by as many at once
KILLED_AFTER = 18  # updates; the last checkpoint before it is of the tenth
LATE = 10  # updates after which those that will be lost are delayed


def delay(log: Path, times: int = 1) -> None:
    """Sleep, and note for how long that was."""
    begun = time.perf_counter()
    time.sleep(times * DELAY)
    with open(log, "a", encoding="utf-8") as handle:
        handle.write(f"{time.perf_counter() - begun}\n")


def before(owner: Any, name: str, sleep: Callable[[], None]) -> None:
    """Sleep before each call of a function."""
    function = getattr(owner, name)

    def slow(*args: Any, **options: Any) -> Any:
        sleep()
        return function(*args, **options)

    setattr(owner, name, slow)


class SlowWork:
    """A collective that ends later: whoever waits for it waits longer."""

    def __init__(self, work: Any, sleep: Callable[[], None]) -> None:
        self._work, self._sleep = work, sleep

    def wait(self) -> Any:
        """Wait for it, and longer."""
        self._sleep()
        return self._work.wait()


def slow_wire(sleep: Callable[[], None]) -> None:
    """Let every collective that runs next to the computation end later."""
    import torch.distributed as dist

    reduce = dist.all_reduce

    def slow(*args: Any, **options: Any) -> Any:
        work = reduce(*args, **options)
        return SlowWork(work, sleep) if options.get("async_op") else work

    dist.all_reduce = slow


def updates(each: Callable[[int], None]) -> None:
    """Call `each` with the number of every update, before the weights are changed."""
    from modicum.core.contracts.strategy import Strategy

    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        each(done)

    before(Strategy, "update", count)


def killed(sleep: Callable[[], None], number: int) -> None:
    """Delay the updates after the last checkpoint, and end without a word."""
    if number > KILLED_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)
    if number > LATE:
        sleep()


def slow_down(place: str, sleep: Callable[[], None]) -> None:
    """Put the delay where `place` says."""
    from modicum.checkpoint import saving
    from modicum.trainer import evaluate, session
    from modicum.trainer.record import RunRecord

    late = os.environ.get("RANK") == "1"
    if place == "data":
        before(session, "counted", sleep)
    elif place == "compute" or (place == "slow rank" and late):
        updates(lambda number: sleep())
    elif place == "wire":
        slow_wire(sleep)
    elif place == "checkpoint":
        before(saving, "write_part", sleep)
    elif place == "evaluation":
        before(evaluate, "micro_batches", sleep)
    elif place == "tracking":
        before(RunRecord, "count", sleep)
    elif place in ("lost", "killed"):
        updates(partial(killed, sleep if place == "lost" else lambda: None))


def main() -> None:
    """Delay, and do what the rest of the command line says."""
    place, log = sys.argv[1], Path(sys.argv[2])
    sleep = partial(delay, log)
    if place == "start-up":
        sleep(START_DELAYS)
    else:
        slow_down(place, sleep)
    sys.argv = ["modicum", *sys.argv[3:]]
    from modicum.cli.main import run

    run()


if __name__ == "__main__":
    main()
