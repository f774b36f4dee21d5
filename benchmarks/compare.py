"""Whether comparisons are right: studies of synthetic losses, kills, and what the engine costs.

400 studies compare a method with itself under another name, with noise of its own: a difference
that is reported is a false alarm. 400 have a side that is better by three standard deviations over
seeds. In a further 200 both sides have the same best loss at other settings, where luck in tuning
is a real difference; its share has no bar. One study is killed (`kill -9`) 20 times.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import alone, say, spread, write_result

from modicum.comparison import Comparison, Outcome, Settings, Side, Study, TrialPart, TrialRange

DEVIATION = 0.01  # of a side's loss over seeds
CURVATURES = {"rate": 0.1, "decay": 0.02}  # of the loss, a decade squared
SPACE = {
    "rate": TrialRange(1e-4, 1e-1, default=1e-3),
    "decay": TrialRange(1e-3, 1.0, default=0.1),
}
MIDDLES = {"rate": -2.5, "decay": -1.5}
SHARED = math.sqrt(0.5)  # of the deviation, what a seed does to both sides
KILLS = 20
TRIAL_SECONDS = 0.1
LONG_TRIAL_SECONDS = 0.5  # still far less than a run's start


def noise(*key: object) -> float:
    """A standard normal number of this name."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    first, second = (int.from_bytes(digest[i : i + 6], "little") for i in (0, 6))
    return math.sqrt(-2 * math.log((first + 1) / 2**48)) * math.cos(2 * math.pi * second / 2**48)


class Landscape:
    """Losses of one study: a bowl over one or two parameters, and noise of seed, side and settings.

    Args:
        number: of the study, of which the best settings are a function.
        gain: what the loss of `b` is less by.
        apart: whether the sides have their least loss at other settings.
    """

    def __init__(self, number: int, gain: float = 0.0, *, apart: bool = False) -> None:
        self.number, self.gain, self.apart = number, gain, apart

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        loss = 2.0 - (self.gain if side == "b" else 0.0)
        for name, curvature in CURVATURES.items():
            if name in settings:
                which = side if self.apart else "both"
                best = MIDDLES[name] + 0.4 * noise(self.number, name, which)
                loss += curvature * (math.log10(settings[name]) - best) ** 2
        own = (self.number, side, seed, part, sorted(settings.items()))
        common = SHARED * noise(self.number, seed)
        loss += DEVIATION * (common + math.sqrt(1 - SHARED**2) * noise(*own))
        return Outcome("finished", loss, data_hash=f"{self.number}/{seed}")


def sides(parameters: int) -> list[Side]:
    """Two sides that search so many parameters in the same ranges."""
    space = dict(list(SPACE.items())[:parameters])
    return [Side(name, space, {"name": name}) for name in ("a", "b")]


def compared(landscape: Landscape) -> Comparison:
    """A study as it is by default, of one parameter or, every other time, of two."""
    with scratch() as folder:
        number = landscape.number
        study = Study(folder, sides(1 + number % 2), landscape, seed=10_000 * number, journal=False)
        return study.run()


def counted(studies: int, gain: float = 0.0, *, apart: bool = False) -> dict[str, Any]:
    """The verdicts of so many studies, and how wide their intervals are."""
    verdicts: Counter[str] = Counter()
    widths, by_seeds = [], 0
    for number in range(studies):
        found = compared(Landscape(number, gain, apart=apart))
        verdicts[found.winner or "none"] += 1
        (difference,) = found.judgement.differences
        if difference.interval is not None:
            widths.append((difference.interval[1] - difference.interval[0]) / DEVIATION)
        if difference.seed_interval is not None:
            by_seeds += not difference.seed_interval[0] <= 0 <= difference.seed_interval[1]
        if (number + 1) % 50 == 0:
            say(f"{number + 1} of {studies} studies, gain {gain:g}: {dict(verdicts)}")
    shares = {name: verdicts[name] / studies for name in ("a", "b", "none")}
    return {
        "studies": studies,
        "winners": shares,
        "different_by_seeds_alone": by_seeds / studies,
        "interval_in_deviations": spread(widths),
    }


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: what a disk takes is measured apart."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


# Kills


def sleeping_study(folder: Path) -> Study:
    """The study that is killed: each trial notes whether it has a record already."""
    landscape, log = Landscape(0), folder.parent / f"{folder.name}.log"

    def trial(side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        from modicum.comparison import trial_name

        name = trial_name(side, settings, seed, part)
        known = (folder / "trials" / f"{name}.json").exists()
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{name} {'again' if known else 'new'}\n")
        time.sleep(TRIAL_SECONDS)
        return landscape(side, settings, seed, part)

    return Study(folder, sides(2), trial, parallel=2)


def table(folder: Path) -> dict[str, Any]:
    """What `compare.json` says, but for times."""
    found: dict[str, Any] = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
    for row in found["trials"]:
        del row["seconds"]
    return found


def killed(kills: int, seed: int = 0) -> dict[str, Any]:
    """A study that is killed so often next to one that is not."""
    chance, moments = random.Random(seed), list[int]()
    with tempfile.TemporaryDirectory() as place:
        calm, broken = Path(place) / "calm", Path(place) / "broken"
        sleeping_study(calm).run()
        command = [sys.executable, __file__, "--study", str(broken)]
        done, attempts = 0, 0
        while done < kills:
            process, attempts = subprocess.Popen(command), attempts + 1
            until = records(broken) + chance.choice((0, 0, 1, 2))
            while process.poll() is None and records(broken) < until:
                time.sleep(0.005)
            if until == records(broken):
                time.sleep(chance.uniform(0, 3 * TRIAL_SECONDS))
            process.send_signal(signal.SIGKILL)
            if process.wait() == -signal.SIGKILL:
                done += 1
                moments.append(records(broken))
            elif attempts > 2 * kills:
                raise SystemExit("the study ended before it was killed often enough")
        subprocess.run(command, check=True)
        lines = (Path(place) / "broken.log").read_text(encoding="utf-8").split("\n")
        begun = [line.split()[0] for line in lines if line]
        return {
            "kills": done,
            "records_at_kills": moments,
            "trials": records(broken),
            "begun": len(begun),
            "trials_twice": sum(line.endswith(" again") for line in lines),
            "tables_differ": int(table(broken) != table(calm)),
        }


def records(folder: Path) -> int:
    """How many trials of a study have a record."""
    return sum(1 for _ in folder.glob("trials/*.json"))


# Cost


def overhead() -> dict[str, Any]:
    """What the engine, its files and Optuna's journal take, next to trials of half a second."""
    spent, landscape = list[float](), Landscape(0)

    def trial(side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        began = time.perf_counter()
        time.sleep(LONG_TRIAL_SECONDS)
        outcome = landscape(side, settings, seed, part)
        spent.append(time.perf_counter() - began)
        return outcome

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        Study(folder, sides(2), trial).run()
        seconds = time.perf_counter() - began
    inside = sum(spent)
    return {
        "share": (seconds - inside) / inside,
        "seconds_a_trial": (seconds - inside) / len(spent),
        "trials": len(spent),
        "seconds_of_a_trial": LONG_TRIAL_SECONDS,
    }


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--study", type=Path, help="run the study that is killed, in this folder")
    arguments = parser.parse_args()
    if arguments.study:
        sleeping_study(arguments.study).run()
        return
    with alone():
        figures: Mapping[str, Any] = {
            "kills": killed(KILLS),
            "overhead": overhead(),
            "same": (same := counted(arguments.studies)),
            "false_alarms": 1 - same["winners"]["none"],
            "different": (different := counted(arguments.studies, 3 * DEVIATION)),
            "found": different["winners"]["b"],
            "apart": counted(arguments.studies // 2, apart=True),
        }
    write_result("compare", figures, {"deviation": DEVIATION, "curvatures": CURVATURES})


if __name__ == "__main__":
    main()
