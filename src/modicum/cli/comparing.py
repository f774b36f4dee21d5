"""What `modicum compare` does: what it says before, while it runs and afterwards."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.cli.tables import print_json, table
from modicum.core.errors import InputError
from modicum.core.units import format_bytes, format_duration
from modicum.report.numbers import short

if TYPE_CHECKING:
    from modicum.comparison.comparing import Settled
    from modicum.comparison.comparison import Comparison

_TIMED = 2  # trials, before it is said how long the others will take


@dataclass(frozen=True)
class CompareCommand:
    """The command as it was typed."""

    recipes: tuple[str, ...]
    vary: str | None = None
    budget: str | None = None
    out: Path | None = None
    trials: int = 12
    seeds: int = 5
    tune: tuple[str, ...] = ()
    sampler: Any = "tpe"
    baseline: str | None = None
    parallel: int = 1
    ranks: int = 1
    on: Any = None
    protocol: str | None = None
    fresh: bool = False
    retry: bool = False
    overrides: tuple[str, ...] = ()
    mode: str = "auto"
    as_json: bool = False

    @property
    def folder(self) -> Path:
        """`--out`, or one named after the sides."""
        if self.out is not None:
            return self.out
        stems = [Path(recipe).stem for recipe in self.recipes]
        varied = [self.vary.partition("=")[0]] if self.vary else []
        by = [self.protocol] if self.protocol else []
        return Path("compare") / "-".join([*stems, *varied, *by])

    def run(self, *, dry_run: bool = False) -> None:
        """Plan all sides; then show what it would take, or tune, judge and show what came of it.

        Raises:
            ModicumError: what is wrong, or in the way.
        """
        from modicum.comparison.by_protocol import foreseen
        from modicum.comparison.comparing import run_settled, settled, tuned_ranges
        from modicum.optim.protocol import protocol_of

        if self.protocol is not None:
            protocol_of(self.protocol)
        says = CompareLines(silent=self.mode == "quiet", as_json=self.mode == "json")
        asked = settled(
            self.recipes, vary=self.vary, budget=self.budget, overrides=self.overrides,
            trials=self.trials, seeds=self.seeds, ranks=self.ranks,
            folder=None if dry_run else self.folder,
            tell=lambda text: says({"event": "phase", "name": text}),
        )  # fmt: skip
        if dry_run:
            tuned_ranges(asked, self.tune)
            _show_settled(asked.row() if self.protocol is None else foreseen(asked), self.as_json)
            return
        if self.protocol is not None:
            self._by_protocol(asked, says)
            return
        says.begin(asked)
        found = run_settled(
            asked, self.folder, sampler=self.sampler, tune=self.tune, baseline=self.baseline,
            parallel=self.parallel, ranks=self.ranks, on=self.on, fresh=self.fresh,
            retry=self.retry, progress=says,
        )  # fmt: skip
        from modicum.report.compared import write_compared

        page = write_compared(self.folder)
        if self.as_json:
            print_json(found.to_json())
        elif self.mode != "quiet":
            show_comparison(found, asked, self.folder)
            print(f"page:   {page}")

    def _by_protocol(self, asked: Settled, says: CompareLines) -> None:
        """Carry a protocol out, and show the speed-ups in data that it found.

        Raises:
            InputError: it does not take what was asked for.
        """
        from modicum.comparison.by_protocol import run_protocol

        if self.sampler != "tpe":
            problem = "a protocol has a search of its own; leave it out"
            raise InputError(problem, field="--sampler", value=self.sampler)
        assert self.protocol is not None
        report = run_protocol(
            asked, self.folder, self.protocol, tune=self.tune, baseline=self.baseline,
            parallel=self.parallel, ranks=self.ranks, on=self.on, fresh=self.fresh, progress=says,
        )  # fmt: skip
        from modicum.report.comparison import write_comparison

        page = write_comparison(self.folder)
        if self.as_json:
            print_json(report)
        elif self.mode != "quiet":
            show_report(report)
            print(f"page:   {page}")


@dataclass
class CompareLines:
    """A line on standard error for each trial, with how long the others will take."""

    silent: bool = False
    as_json: bool = False
    runs: int = 0
    _sides: int = 0
    _seeds: int = 0
    _done: int = 0
    _trained: int = 0
    _begun: float = field(default_factory=lambda: time.monotonic())

    def begin(self, asked: Settled) -> None:
        """Say what will be done, and who does not take part."""
        row = asked.row()
        self.runs = row["runs"]
        self._sides, self._seeds = len(asked.taking_part), asked.seeds
        self._begun = time.monotonic()
        for side in row["sides"]:
            if side["refused"]:
                self._say(f"{side['side']} does not take part: {side['refused']}")
            elif own := words_of(_stated(side["fixed"])):
                self._say(f"{side['side']}: {own}")
        hours = format_duration(row["hours"] * 3600)
        self._say(f"{self.runs} runs, about {hours} by the plans; more where a range is widened")

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Tell of an event."""
        if self.as_json:
            print(json.dumps(event, default=str), flush=True)
            return
        tell = getattr(self, f"_on_{event['event']}", None)
        if tell is not None:
            tell(event)

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        self._say(str(event["name"]))

    def _on_begun(self, event: Mapping[str, Any]) -> None:
        if event["known"]:
            self._say(f"resumes with {event['known']} trials that have finished")

    def _on_damaged(self, event: Mapping[str, Any]) -> None:
        self._say(f"{event['file']} is damaged; it is made anew, from the runs that are there")

    def _on_widened(self, event: Mapping[str, Any]) -> None:
        self._say(
            f"{event['side']}: {_short(event['parameter'])} is best at the end of its range, which "
            f"is {event['low']:.4g} to {event['high']:.4g} now; every side gets trials up to "
            f"{event['trials']}"
        )
        self.runs = max(self.runs, self._sides * (event["trials"] + self._seeds))

    def _on_trial(self, event: Mapping[str, Any]) -> None:
        outcome, tuning = event["outcome"], event["part"] == "tune"
        self._done += 1
        if event["known"]:
            return
        self._trained += not outcome["taken"]
        told = outcome["status"].replace("_", " ")
        if outcome["loss"] is not None:
            told = f"loss {outcome['loss']:.4f}"
        if outcome["message"]:
            told += f" ({outcome['message']})"
        if outcome["taken"]:
            told += ", taken from another comparison"
        what = words_of(event["settings"]) if tuning else f"seed {event['seed']}"
        if "ratio" in event:  # a protocol's
            number = f"at {event['ratio']:g} of the tokens"
        else:
            number = f"{event['number'] + 1}/{event['of']}"
        part, left = "tune " if tuning else "judge", self._left()
        self._say(f"{part} {event['side']} {number}  {what}: {told}{left}")

    def _left(self) -> str:
        """How long the others will take, as long as those that were trained since it began."""
        left = self.runs - self._done
        if left < 1 or self._trained < _TIMED:
            return ""
        seconds = left * (time.monotonic() - self._begun) / self._trained
        return f"; {left} more in about {format_duration(seconds)}"

    def _say(self, text: str) -> None:
        if not self.silent:
            print(text, file=sys.stderr, flush=True)


def words_of(settings: Mapping[str, Any]) -> str:
    """Settings for people: the last part of each path and its value.

    >>> words_of({"training.learning_rate": 0.00123456, "recipe": "0f"})
    'learning_rate 0.001235'
    """
    shown = {path: value for path, value in settings.items() if path != "recipe"}
    return ", ".join(f"{_short(path)} {_value(value)}" for path, value in shown.items())


def _value(value: Any) -> str:
    """A field's value, as people write it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def _stated(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is settled for a side, what has a value."""
    return {path: value for path, value in fixed.items() if value is not None}


def _short(path: str) -> str:
    return path.rpartition(".")[2]


def _show_settled(row: Mapping[str, Any], as_json: bool) -> None:
    """What a comparison would take."""
    if as_json:
        print_json(row)
        return
    rows = []
    for side in row["sides"]:
        if side["refused"]:
            rows.append((side["side"], "does not take part", "", "", "", "", side["refused"]))
            continue
        spent = side["bytes"]
        note = "as it is: no size" if side["reference"] else words_of(_stated(side["fixed"]))
        rows.append(
            (side["side"], f"{side['runs']} runs", format_duration(side["seconds"]),
             *(format_bytes(spent[kind]) for kind in ("peak", "state", "trained")), note)
        )  # fmt: skip
    table(("Side", "Runs", "Time", "Peak", "State", "Trained", "Settled"), rows)
    for side in row["sides"]:
        if side.get("unequal"):
            print(textwrap.fill(f"{side['side']} {side['unequal']}.", 80, break_long_words=False))
    hours = format_duration(row["hours"] * 3600)
    most = "at the most " if "at_most" in row else ""
    print(f"{most}{row['runs']} runs, about {hours} by the plans, without what each takes to start")


def show_comparison(found: Comparison, asked: Settled, folder: Path) -> None:
    """The table of 80 columns, the verdict in a sentence, and what to do next."""
    print()
    kind = None if asked.budget is None else asked.budget.kind
    first = "trained" if kind == "trained" else "peak"
    rows = list(_rows(found, asked, first))
    headers = ["Side", "Loss", "Difference", first.capitalize(), "State", "Seconds", "Tokens",
               "Verdict"]  # fmt: skip
    if kind in (None, "seconds"):  # one column more than 80 have room for
        for gap, shown in (("", [0, 1, 2, 7]), ("\n", [0, 3, 4, 5, 6])):
            print(end=gap)
            cells = [[row[i] for i in shown] for row in rows]
            table([headers[i] for i in shown], [row for row in cells if any(row[1:])])
    else:  # every side has as many tokens
        for row in [headers, *rows]:
            del row[6]
        table(headers, rows)
    unequal = [f"{name} {why}." for name, why in asked.unequal.items()]
    for sentence in [*sentences(found), *unequal]:
        print(textwrap.fill(sentence, 80, break_long_words=False))
    best = folder / "best.yaml"
    if best.is_file():
        print(f"next:   modicum train {shlex.quote(str(best))}")


def show_report(report: Mapping[str, Any]) -> None:
    """What a protocol found: speed-ups in data over the reference, and over each side's defaults.

    A speed-up of 1.3 at some amount of data: the reference needs 1.3 times as much for that loss.
    """
    over = {"speedups": f"Over {report['reference']}", "over_default": "Over its defaults"}
    for name, title in over.items():
        rows = [
            (row["side"], f"{row['ratio']:g}", *_speedup_cells(row["speedup"]))
            for row in report[name]
        ]
        print()
        table(("Side", "Data", title, "95 %", ""), rows)
    said = [*report["notes"], *dict.fromkeys(map(_without_loss, report["failed"]))]
    if report["taken"]:
        taken = f"{report['taken']} trials were taken from other comparisons"
        said.append(f"{taken}, without their seconds.")
    for sentence in said:
        print(textwrap.fill(sentence, 80, break_long_words=False))


def _without_loss(row: Mapping[str, Any]) -> str:
    """A trial of a protocol that could not run, in a sentence."""
    why = f"{row['status'].replace('_', ' ')}, {row['message']}"
    return f"{row['side']} at {row['ratio']:g} of the tokens has no loss: {why}"


def _speedup_cells(speedup: Mapping[str, Any]) -> tuple[str, str, str]:
    """A speed-up, its interval, and what is to be said of it."""
    times = "" if speedup["speedup"] is None else f"{speedup['speedup']:.2f}x"
    ends = "" if not speedup["interval"] else "{:.2f} to {:.2f}".format(*speedup["interval"])
    beyond = "beyond the data of the curve" if speedup["extrapolated"] else ""
    return times, ends, speedup["problem"] or beyond


def _rows(found: Comparison, asked: Settled, first: str) -> Iterator[list[str]]:
    by_side: dict[str, list[Any]] = {}
    for trial in found.trials:
        if trial.job.part == "judge":
            by_side.setdefault(trial.job.side, []).append(trial.outcome)
    differences = {one.side: one for one in found.judgement.differences}
    for standing in found.judgement.standings:
        if found.side(standing.side).frozen is None:
            continue
        outcomes = by_side.get(standing.side, [])
        loss = standing.problem
        if standing.mean is not None:
            loss = f"{standing.mean:.4f}"
            loss += f" ± {standing.deviation:.4f}" if standing.deviation is not None else ""
        difference = differences.get(standing.side)
        against, verdict = "", "the least mean"
        if difference is not None and difference.mean is not None:
            against = f"{difference.mean:+.4f}"
            if difference.interval is not None:
                against += f" ± {difference.interval[1] - difference.mean:.4f}"
        if difference is not None:
            verdict = difference.verdict
        if standing.side in asked.unequal:
            verdict += ", not at the budget"
        peak, state = (_most(outcomes, kind) for kind in (first, "state"))
        seconds = [each.seconds for each in outcomes if each.seconds is not None]
        took = f"{sum(seconds) / len(seconds):.1f}" if seconds else ""
        tokens = [each.tokens for each in outcomes if each.tokens is not None]
        trained = short(sum(tokens) / len(tokens)) if tokens else ""
        yield [standing.side, loss, against, peak, state, took, trained, verdict]
    for side in found.sides:
        if side.frozen is None:
            yield [side.name, *[""] * 6, side.problem]


def _most(outcomes: Sequence[Any], kind: str) -> str:
    known = [each.bytes[kind] for each in outcomes if kind in each.bytes]
    return format_bytes(max(known)) if known else ""


def sentences(found: Comparison) -> list[str]:
    """What may be said of it, and what not."""
    from modicum.comparison.judgement import FEW, FEW_SEEDS

    count, said = len(found.judgement.seeds), []
    if found.winner is not None:
        said.append(f"{found.winner} is better than every other side, at 95 % over {count} seeds.")
    elif count < 2:
        said.append("One seed gives no interval: nothing is shown. --seeds 5 judges.")
    else:
        said.append(f"No side is shown to be better than all others, at 95 % over {count} seeds.")
    if 1 < count < FEW:
        said.append(f"{count} seeds are few: the intervals are wide. --seeds 5 adds to these.")
    for name, test in found.tests.items():
        winner = f"{test.winner} is" if test.winner else "no side is shown to be"
        said.append(f"On test data, which nothing was chosen by ({name}), {winner} better.")
    if any(not row["same"] for row in found.data.values()):
        said.append("The sides did not see the same rows in the same order: their data differ.")
    if found.taken:
        taken = f"{found.taken} of {len(found.trials)} trials"
        said.append(f"{taken} were taken from other comparisons, without their seconds.")
    reasons = {one.side: one.reason for one in found.judgement.differences}
    for name, why in reasons.items():
        if why not in ("", FEW_SEEDS):
            said.append(f"{why}." if why.startswith(f"{name} ") else f"{name}: {why}.")
    again = ("crashed", "out_of_memory", "refused")
    if any(row.outcome.status in again for row in found.trials):
        said.append("--retry runs again what crashed, ran out of memory or was refused.")
    for side in found.sides:
        said += [f"{side.name}: {note}." for note in side.notes]
    return said
