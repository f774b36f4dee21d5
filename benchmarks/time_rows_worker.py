"""`modicum train` with delays of 200 ms at places of each kind: what `time_rows.py` starts.

    python benchmarks/time_rows_worker.py MODE LOG train RECIPE --out FOLDER ...

Before and after each delay the rows of the run's clock are looked at, and what moved is appended to
LOG, a line each, as a process that is killed has no last word. Delays are put where a slow disk,
network or model would be: none is in the clock's own places.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from modicum.core.clock import (
    BUILDING,
    CHECKPOINT,
    DATA,
    EVALUATING,
    FORWARD,
    IMPORTS,
    TRACKING,
    UPDATE,
    WAITING,
    WIRE,
    Clock,
)

DELAY = 0.2
KILLED_AFTER = 18  # updates; the last checkpoint before it is of the tenth
LATE = 10  # updates after which those that will be lost are delayed
SLOW_RANK_DELAYS = 5  # in each update of it: ranks of a busy machine are late by themselves, too


class Delays:
    """Sleeps, and notes what each sleep has moved."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self.clock: Clock | None = None

    def remember(self) -> None:
        """Look at the clock that the command will make for its process."""
        make = Clock.of_process

        def made() -> Clock:
            self.clock = make()
            return self.clock

        Clock.of_process = made  # type: ignore[method-assign]

    def sleep(self, row: str, times: int = 1) -> None:
        """Sleep, and note what moved next to the row that it should be found in."""
        before = self._rows()
        begun = time.perf_counter()
        time.sleep(times * DELAY)
        slept = time.perf_counter() - begun
        after = self._rows()
        moved = {name: after[name] - before.get(name, 0.0) for name in after}
        line = {"row": row, "slept": slept, "moved": moved}
        with open(self._log, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")

    def _rows(self) -> Mapping[str, float]:
        return {} if self.clock is None else self.clock.rows()


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
        self._work, self._sleep, self._ended = work, sleep, False

    def is_completed(self) -> bool:
        """Whether somebody has waited for it."""
        return self._ended

    def wait(self) -> Any:
        """Wait for it, and longer."""
        if not self._ended:
            self._sleep()
        self._ended = True
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


def slow_everywhere(delays: Delays) -> None:
    """A delay at a place of each kind."""
    from modicum.checkpoint import saving
    from modicum.core.contracts.step import StepProgram
    from modicum.trainer import evaluate, session, setup
    from modicum.trainer.record import RunRecord

    def forward(program: StepProgram, batch: Any) -> Any:
        if program.clock.total(TRACKING) and program.model.training:  # past the rehearsal
            delays.sleep(FORWARD)
        return summed(program, batch)

    summed = StepProgram.summed
    StepProgram.summed = forward  # type: ignore[method-assign, assignment]
    before(setup, "assemble", partial(delays.sleep, BUILDING))
    before(session, "counted", partial(delays.sleep, DATA))
    updates(lambda number: delays.sleep(UPDATE))
    before(saving, "write_part", partial(delays.sleep, CHECKPOINT))
    before(evaluate, "micro_batches", partial(delays.sleep, EVALUATING))
    before(RunRecord, "count", partial(delays.sleep, TRACKING))
    if "RANK" in os.environ:
        slow_wire(partial(delays.sleep, WIRE))


def killed(delays: Delays, number: int) -> None:
    """Delay the updates after the last checkpoint, and end without a word."""
    if number > KILLED_AFTER:
        os.kill(os.getpid(), signal.SIGKILL)
    if number > LATE:
        delays.sleep(UPDATE)


def main() -> None:
    """Delay, and do what the rest of the command line says."""
    mode, delays = sys.argv[1], Delays(Path(sys.argv[2]))
    sys.argv = ["modicum", *sys.argv[3:]]
    if mode in ("everywhere", "again"):
        delays.sleep(IMPORTS)  # before there is a clock: it counts from the process's start
    delays.remember()
    if mode == "everywhere":
        slow_everywhere(delays)
    elif mode == "killed":
        updates(partial(killed, delays))
    elif mode == "slow rank" and os.environ.get("RANK") == "1":
        updates(lambda number: delays.sleep(WAITING, SLOW_RANK_DELAYS))
    from modicum.cli.main import run

    run()


if __name__ == "__main__":
    main()
