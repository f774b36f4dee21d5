"""Does any input make modicum show a stack trace, hang, or write where it should not?

Each input is a small valid one with something spoilt: a recipe's field, data, a model, an adapter,
a run folder, a word of the command, the environment. It must end in time, with the right exit code,
one message, and nothing changed but its output. Numbers are drawn from the seed, so

    python benchmarks/fuzz.py --seed S --only N

does input N again, and shows what the command said.

    python benchmarks/fuzz.py [--seed S] [--minutes M] [--only N ...] [--work FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from common import HERE, alone, say, write_result
from fuzz_cases import Case, draw
from fuzz_checks import faults
from fuzz_world import changed, make, restore, stamps
from fuzz_zygote import Ended, Request, Zygote, fresh

from modicum.cli.allocator import tuned
from modicum.core.errors import FoundWanting
from modicum.core.units import format_duration

LIMIT_SECONDS = 60.0


@dataclass(frozen=True)
class Find:
    """An input that something is wrong with."""

    number: int
    family: str
    command: str
    spoilt: str
    faults: list[str]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return dict(vars(self))


class Fuzzer:
    """A place of its own, the world in it, and the warm process."""

    def __init__(self, work: Path, seed: int) -> None:
        self.work, self.seed = work, seed
        self.template, self.world = work / "template", work / "world"
        for name in ("home", "tmp", "logs"):
            (work / name).mkdir(parents=True, exist_ok=True)
        environment = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(work / "home"),
            "TMPDIR": str(work / "tmp"),
            "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"),
            "OMP_NUM_THREADS": "1",
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": str(HERE.parent / "src"),
        }
        self.environment = tuned(environment)
        self.zygote = Zygote(self.environment)
        if not (self.template / "adapted" / "run.json").exists():
            make(self.template, self.environment)

    def do(self, number: int) -> tuple[Case, str, Ended, list[str]]:
        """Do one input: what it was, how it was spoilt, how it ended, and what is wrong."""
        random = Random(f"{self.seed}/{number}")
        case = draw(random)
        restore(self.world, self.template)
        spoilt = case.make(random, self.world)
        before = stamps(self.world)
        request = Request(
            case.words,
            str(self.world),
            self.environment | case.environment,
            LIMIT_SECONDS,
            case.output,
            case.typed,
            str(self.work / "logs"),
        )
        ended = fresh(request) if case.fresh else self.zygote.run(request)
        return case, spoilt, ended, faults(case, ended, changed(before, stamps(self.world)))


def main() -> None:
    """Fuzz for a while, or do some inputs again."""
    arguments = _arguments()
    with _place(arguments.work) as work:
        fuzzer = Fuzzer(work, arguments.seed)
        try:
            if arguments.only:
                wrong = [number for number in arguments.only if not _again(fuzzer, number)]
                raise SystemExit(FoundWanting.exit_code if wrong else 0)
            _fuzz(fuzzer, arguments)
        finally:
            fuzzer.zygote.close()


def _fuzz(fuzzer: Fuzzer, arguments: argparse.Namespace) -> None:
    begun = time.monotonic()
    finds: list[Find] = []
    families: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    known: set[str] = set()
    for number in count(arguments.first):
        if time.monotonic() - begun > 60 * arguments.minutes:
            break
        case, spoilt, ended, wrong = fuzzer.do(number)
        families[case.family] += 1
        codes[str(ended.code)] += 1
        if wrong:
            find = Find(number, case.family, _shown(case), spoilt, wrong)
            finds.append(find)
            if not set(wrong) <= known:
                known |= set(wrong)
                say(f"{number}: {'; '.join(wrong)}\n    {find.command}\n    {spoilt}")
    inputs, seconds = families.total(), time.monotonic() - begun
    say(f"{inputs} inputs in {format_duration(seconds)}, {len(finds)} finds of {len(known)} kinds")
    say(", ".join(f"{times} ended with {code}" for code, times in sorted(codes.items())))
    if arguments.write:
        results = {
            "inputs": inputs,
            "finds": len(finds),
            "seconds": seconds,
            "families": dict(sorted(families.items())),
            "exit_codes": dict(sorted(codes.items())),
            "found": [find.as_json() for find in finds],
        }
        settings = {"seed": fuzzer.seed, "minutes": arguments.minutes, "limit": LIMIT_SECONDS}
        with alone():
            write_result("fuzz", results, settings)
    if finds:
        raise SystemExit(FoundWanting.exit_code)


def _again(fuzzer: Fuzzer, number: int) -> bool:
    """Do one input and show it; whether all is well with it."""
    case, spoilt, ended, wrong = fuzzer.do(number)
    print(f"{number}: {_shown(case)}\n  spoilt: {spoilt}\n  exit code: {ended.code}")
    print(f"  {'; '.join(wrong) or 'nothing is wrong'}\n--- output\n{ended.out[-2000:]}")
    print(f"--- errors\n{ended.err[-4000:]}")
    return not wrong


def _shown(case: Case) -> str:
    """The command as one would type it."""
    before = [f"{name}={text}" for name, text in case.environment.items()]
    words = [word if len(word) < 200 else f"{word[:200]}..." for word in case.words]
    after = {"out": "", "full": " > /dev/full", "closed": " >&-"}[case.output]
    line = shlex.join([*before, "modicum", *words]) + after
    return line.encode("utf-8", "backslashreplace").decode()


@contextmanager
def _place(work: Path | None) -> Iterator[Path]:
    """The folder to work in: a new one that does not stay, where none is given."""
    if work is not None:
        yield work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="modicum-fuzz-") as temporary:
        yield Path(temporary)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="which inputs are drawn")
    parser.add_argument("--minutes", type=float, default=10, help="stop after so long")
    parser.add_argument("--first", type=int, default=0, help="the number to begin with")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="do these inputs again")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fuzz.json")
    parser.add_argument("--work", type=Path, help="a folder to work in, kept for the next time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
