"""`kill -9` at seeded moments, the same command again, and what is another than it was.

A run of each kind is left in peace; others of the same kind are killed over and over: in seven of
ten cases at a moment of the unbroken run's life (start, data preparation, steps, evaluation,
saving, export), in three while they start again. With several ranks it hits rank 0, another rank or
the process that watches them. At the end rows and weights are compared to the bit, and then the
same is done to `transformers.Trainer`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from common import alone, say, write_result
from kill_contenders import RECIPE, STEPS, Modicum, Outcome, Transformers

FSDP, COMPILED = "parallel.strategy=fsdp", "training.compile=blocks"
ONE, TWO = Modicum(), Modicum(2)
SHARDED, BLOCKS = Modicum(2, (FSDP,)), Modicum(1, (COMPILED,))
KINDS = [ONE, SHARDED, ONE, TWO, BLOCKS, TWO, ONE, SHARDED, ONE, TWO]  # one after the other
STARTING = 0.3  # of all kills
PATIENCE_SECONDS = (
    30.0  # after which processes that a killed one has left behind count as forgotten
)
Moment = tuple[int, float]  # after this step (0: after the start), and so many seconds


@dataclass
class Attempt:
    """A started command, and all processes that come of it: they are one session."""

    process: subprocess.Popen[bytes]
    told: Path
    ended: ClassVar[threading.Event] = threading.Event()
    """Set when the benchmark itself ends early: nothing is started any more."""

    @classmethod
    def start(cls, command: list[str], out: Path) -> Attempt:
        """Run the command; what it says goes to a file next to its folder."""
        if cls.ended.is_set():
            raise SystemExit(1)
        told = out.parent / "told.txt"
        with open(told, "wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        return cls(process, told)

    def runs(self) -> bool:
        """Whether the command has not ended yet; it is ended with the benchmark."""
        if self.ended.is_set():
            self.clear()
        return self.process.poll() is None

    def processes(self) -> dict[int, int | None]:
        """The pids that are alive, each with its rank, None for those that are no rank."""
        found: dict[int, int | None] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                # After the name in brackets: state, parent, group, session.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) != self.process.pid or fields[0] == "Z":
                    continue
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            numbers = [int(line[5:]) for line in environment if line.startswith(b"RANK=")]
            own_child = int(fields[1]) == self.process.pid
            found[int(folder.name)] = numbers[0] if numbers and own_child else None
        return found

    def kill(self, chance: random.Random) -> str:
        """Kill one of the processes; which."""
        ranks = {rank: pid for pid, rank in self.processes().items() if rank is not None}
        victims = {f"rank {rank}": pid for rank, pid in sorted(ranks.items())}
        victims["supervisor" if ranks else "the process"] = self.process.pid
        name = chance.choice(list(victims))
        os.kill(victims[name], signal.SIGKILL)
        return name

    def end(self) -> tuple[float, int]:
        """Wait for all processes to end; seconds, and how many had to be killed for it."""
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE_SECONDS:
            if not self.processes():
                self.process.wait()
                return time.monotonic() - began, 0
            time.sleep(0.02)
        return time.monotonic() - began, self.clear()

    def clear(self) -> int:
        """Kill all that is left; how many."""
        left = self.processes()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return len(left)

    def last_event(self) -> str:
        """What modicum reported last; so one knows what it was about."""
        events = [line for line in self.told.read_bytes().split(b"\n") if b'"event": "' in line]
        return events[-1].split(b'"event": "')[1].split(b'"')[0].decode() if events else "nothing"


@dataclass
class Calm:
    """A run that was left in peace."""

    outcome: Outcome
    seconds: float
    times: list[float]
    """When each step's row was there, in seconds since the start."""

    def moments(self, count: int, chance: random.Random) -> list[Moment]:
        """When to kill another run of the kind, in the order in which it will come there."""
        moments: list[Moment] = []
        for point in sorted(chance.uniform(0.0, self.seconds) for _ in range(count)):
            step = sum(time_ <= point for time_ in self.times)
            if chance.random() < STARTING:
                moments.append((0, chance.uniform(0.0, self.times[0])))
            else:
                moments.append((step, point - self.times[step - 1] if step else point))
        return moments


@dataclass
class Tally:
    """What became of one run and its kills."""

    kind: str
    victims: list[str] = field(default_factory=list)
    after_steps: list[int] = field(default_factory=list)
    after_events: list[str] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    repeated_steps: list[int] = field(default_factory=list)
    seconds_to_end: list[float] = field(default_factory=list)
    left_behind: int = 0
    failed_starts: list[str] = field(default_factory=list)
    differing_rows: dict[str, int] = field(default_factory=dict)
    missing_steps: int = 0
    steps_logged_again: int = 0
    differing_weights: bool = False

    def attempt(self, kind: Any, out: Path, moment: Moment | None, chance: random.Random) -> str:
        """Start the run, and kill it at that moment: `killed`, or `finished` or `failed` before."""
        attempt = Attempt.start(kind.command(out), out)
        step, delay = moment or (10**9, 0.0)
        while kind.steps_done(out) < step and attempt.runs():
            time.sleep(0.004)
        until = time.monotonic() + delay
        while time.monotonic() < until and attempt.runs():
            time.sleep(0.004)
        if attempt.process.poll() is None:
            self.victims.append(attempt.kill(chance))
            self.after_steps.append(kind.steps_done(out))
            self.after_events.append(attempt.last_event())
            seconds, left = attempt.end()
            self.exit_codes.append(attempt.process.returncode)
            self.seconds_to_end.append(seconds)
            self.left_behind += left
            self.repeated_steps.append(max(0, kind.steps_done(out) - kind.steps_saved(out)))
            return "killed"
        attempt.end()
        if attempt.process.returncode == 0:
            return "finished"
        lines = attempt.told.read_text(errors="replace").splitlines() or ["(it said nothing)"]
        self.failed_starts.append(lines[-1])
        kind.mend(out, "\n".join(lines[-20:]))
        return "failed"

    def compare(self, kind: Any, out: Path, calm: Calm) -> None:
        """See what the finished run came to."""
        outcome, log = kind.outcome(out), kind.log(out)
        self.differing_rows = calm.outcome.differences(outcome)
        self.differing_weights = calm.outcome.weights != outcome.weights
        steps = {row[0] for row in outcome.rows["metrics"]}
        self.missing_steps = len(set(range(1, STEPS + 1)) - steps)
        self.steps_logged_again = len(log) - len(set(log))


def run_calmly(kind: Any, folder: Path) -> Calm:
    """A run to its end, and its timetable."""
    folder.mkdir()
    out, times = folder / "run", list[float]()
    began = time.monotonic()
    attempt = Attempt.start(kind.command(out), out)
    while attempt.runs():
        time.sleep(0.004)
        times += [time.monotonic() - began] * (kind.steps_done(out) - len(times))
    if attempt.process.returncode:
        raise SystemExit(f"{kind.name}, left in peace:\n{attempt.told.read_text()}")
    calm = Calm(kind.outcome(out), time.monotonic() - began, times)
    say(f"{kind.name}, left in peace: {calm.seconds:.1f} s, the first step after {times[0]:.1f} s")
    return calm


def run_killed(kind: Any, folder: Path, calm: Calm, kills: int, chance: random.Random) -> Tally:
    """A run that is killed and started again until it is through."""
    folder.mkdir()
    out, tally = folder / "run", Tally(kind.name)
    for moment in [*calm.moments(kills, chance), None]:
        while (end := tally.attempt(kind, out, moment, chance)) == "failed":
            pass
        if end == "finished":
            break
    tally.compare(kind, out, calm)
    say(
        f"{folder.name}, {kind.name}: {len(tally.victims)} kills, "
        f"{len(tally.failed_starts)} failed starts, differing rows {tally.differing_rows}, weights "
        + ("differ" if tally.differing_weights else "equal")
    )
    return tally


@contextmanager
def ended_at_last() -> Iterator[None]:
    """When the benchmark cannot continue or is stopped, so are the runs in other threads."""
    try:
        yield
    except BaseException:
        Attempt.ended.set()
        raise


def campaign(
    kinds: list[Any], folder: Path, *, kills: int, runs: int, seed: int, together: int
) -> list[Tally]:
    """So many kills over so many runs; more runs follow where some ended before their last kill."""
    folder.mkdir()
    tallies: list[Tally] = []
    with ThreadPoolExecutor(together) as pool, ended_at_last():
        different = list(dict.fromkeys(kinds[:runs]))
        peaceful = [folder / f"calm-{number}" for number in range(len(different))]
        calm = dict(zip(different, pool.map(run_calmly, different, peaceful), strict=True))
        while (left := kills - sum(len(tally.victims) for tally in tallies)) > 0:
            count = min(left, runs) if not tallies else 1
            begun = len(tallies)
            shares = [left // count + (number < left % count) for number in range(count)]
            futures = []
            for number, share in enumerate(shares, begun):
                kind, chance = (
                    kinds[number % min(runs, len(kinds))],
                    random.Random(f"{seed}/{number}"),
                )
                place = folder / f"run-{number}"
                futures.append(pool.submit(run_killed, kind, place, calm[kind], share, chance))
            tallies += [future.result() for future in futures]
    return tallies


def summed(tallies: list[Tally]) -> dict[str, Any]:
    """The figures of all runs of one contender."""

    def every(name: str) -> list[Any]:
        return [value for tally in tallies for value in getattr(tally, name)]

    return {
        "kills": len(every("victims")),
        "runs": len(tallies),
        "differing_rows": sum(sum(tally.differing_rows.values()) for tally in tallies),
        "differing_weights": sum(tally.differing_weights for tally in tallies),
        "lost_steps": sum(tally.missing_steps for tally in tallies),
        "failed_starts": len(every("failed_starts")),
        "lost_steps_and_failed_starts": sum(tally.missing_steps for tally in tallies)
        + len(every("failed_starts")),
        "runs_with_failed_starts": sum(bool(tally.failed_starts) for tally in tallies),
        "kinds_of_failed_starts": Counter(line[:160] for line in every("failed_starts")),
        "steps_logged_again": sum(tally.steps_logged_again for tally in tallies),
        "steps_done_again": {
            "in_all": sum(every("repeated_steps")),
            "most_after_one_kill": max(every("repeated_steps"), default=0),
        },
        "processes_left_behind": sum(tally.left_behind for tally in tallies),
        "most_seconds_to_end": max(every("seconds_to_end"), default=0.0),
        "victims": Counter(every("victims")),
        "last_events": Counter(every("after_events")),
        "exit_codes": Counter(str(code) for code in every("exit_codes")),
        "by_run": [
            {
                "kind": tally.kind,
                "victims": tally.victims,
                "after_steps": tally.after_steps,
                "differing_rows": tally.differing_rows,
                "differing_weights": tally.differing_weights,
            }
            for tally in tallies
        ],
    }


def main() -> None:
    """Kill, resume, compare, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--contender-kills", type=int, default=50, help="of transformers.Trainer")
    parser.add_argument("--contender-runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=2, help="runs at a time")
    parser.add_argument("--keep-no-result", action="store_true", help="print the figures instead")
    arguments = parser.parse_args()
    shared = {"seed": arguments.seed, "together": arguments.together}
    with alone(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = campaign(
            KINDS, folder / "modicum", kills=arguments.kills, runs=arguments.runs, **shared
        )
        theirs = campaign(
            [Transformers()],
            folder / "transformers",
            kills=arguments.contender_kills,
            runs=arguments.contender_runs,
            **shared,
        )
    figures = {"steps": STEPS, **summed(ours), "transformers": summed(theirs)}
    if arguments.keep_no_result:
        print(json.dumps(figures, indent=2))
    else:
        write_result("kill", figures, vars(arguments) | {"recipe": RECIPE})


if __name__ == "__main__":
    main()
