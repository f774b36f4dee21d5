"""What is said of a run's events, in a line each: the same words on a terminal and in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.units import format_bytes, format_count, format_duration
from modicum.report.numbers import number, percent, quantity

EventRecord = Mapping[str, Any]
TRAINED = "training loss of the last step"  # what a run's final loss is


class Gauge:
    """The figures of the step line, kept in a few microseconds a step."""

    def __init__(self) -> None:
        self.budget: float | None = None
        self.base: float | None = None
        self.last: EventRecord = {}
        self._loss = self._weight = 0.0
        self._seldom = -math.inf

    def plan(self, event: EventRecord) -> None:
        """Take the budget from a plan, and what of it Python and torch hold."""
        prediction = event.get("prediction") or {}
        self.budget = number(prediction.get("budget_bytes"))
        self.base = number(prediction.get("process_base"))

    def step(self, event: EventRecord) -> None:
        """Take a step's row."""
        self.last = event
        loss = number(event.get("loss"))
        if loss is not None and not event.get("skipped"):
            self._loss = 0.9 * self._loss + loss
            self._weight = 0.9 * self._weight + 1

    def seldom(self, seconds: float = 30) -> bool:
        """True at most once in so many seconds: for what may happen often and matters little."""
        now = time.monotonic()
        if now - self._seldom < seconds:
            return False
        self._seldom = now
        return True

    @property
    def loss(self) -> float | None:
        """The loss averaged over about the last ten steps; nats per token."""
        return self._loss / self._weight if self._weight else None

    @property
    def share(self) -> float | None:
        """The share of the steps that is done."""
        step, total = number(self.last.get("step")), number(self.last.get("steps"))
        return min(step / total, 1.0) if step is not None and total else None

    def words(self, *, narrow: bool = False) -> list[str]:
        """Step, loss, tokens/s, memory, time left: those that are known.

        Args:
            narrow: leave out what of the memory Python and torch hold, for short lines.
        """
        row = self.last
        total = number(row.get("steps"))
        words = [f"step {row.get('step')}" + (f"/{total}" if total else "")]
        if self.loss is not None:
            words.append(f"training loss {self.loss:.3f}")
        if (rate := number(row.get("tokens_per_second"))) is not None:
            words.append(quantity(rate, "tokens/s"))
        if (size := number(row.get("bytes"))) is not None:
            limit = f" of {format_bytes(self.budget)}" if self.budget else ""
            base = None if narrow else self.base
            own = f" ({format_bytes(base)} Python and torch)" if base else ""
            words.append(format_bytes(size) + limit + own)
        if (left := number(row.get("seconds_left"))) is not None:
            words.append(f"{format_duration(left)} left")
        return words


def phase(event: EventRecord) -> tuple[str, str]:
    """A phase's name, and how far it is and how long it will still take, where that is known.

    A `unit` counts in its own words, which come first: names are long there. `about` says that the
    total is an estimate.

    >>> phase({"name": "tokenizing", "done": 3, "total": 8})
    ('tokenizing', '38 %')
    >>> phase({"name": "seed 2", "done": 3, "total": 8, "unit": "run", "about": True})
    ('run 3 of about 8', 'seed 2')
    """
    name = str(event.get("name"))
    far = "  ".join(_how_far(event))
    return (far, name) if event.get("unit") else (name, far)


def _how_far(event: EventRecord) -> list[str]:
    done, total = number(event.get("done")), number(event.get("total"))
    words = []
    if done and (unit := event.get("unit")):
        of = f" of {'about ' if event.get('about') else ''}{total:,}" if total else ""
        words.append(f"{unit} {done:,}{of}")
    elif done:
        words.append(percent(min(done / total, 1.0)) if total else f"{done:,}")
    if (left := number(event.get("seconds_left"))) is not None:
        words.append(f"about {format_duration(left)} left")
    elif (spent := number(event.get("seconds"))) is not None:
        words.append(f"{format_duration(spent)} so far")
    return words


def pace(event: EventRecord) -> str:
    """What a proof will take, in a line.

    >>> pace({"name": "lora", "mode": "quick", "runs": 35, "seconds": 27, "known_by": "record"})
    'lora: a quick proof, about 35 runs in about 27 s by record'
    """
    begin = f"{event.get('name')}: a {event.get('mode')} proof"
    runs, seconds = number(event.get("runs")), number(event.get("seconds"))
    if seconds is None:
        least = "twenty minutes" if event.get("mode") == "full" else "a minute"
        return f"{begin}; how long it takes is not known before its first time, most take {least}"
    count = f"about {runs:,} run{'s' * (runs != 1)} in " if runs else ""
    return f"{begin}, {count}about {format_duration(seconds)} by {event.get('known_by')}"


def evaluation(event: EventRecord) -> str:
    """An evaluation, or the test, in a line."""
    loss = quantity(event.get("loss"), "nats")
    step = event.get("step")
    others = (
        f", {name.replace('_', ' ')} {value:.4g}"
        for name, value in event.items()
        if isinstance(value, float) and name not in ("loss", "seconds")
    )
    when = "before training" if step == 0 else f"after step {step}"
    part = "test" if event.get("event") == "test" else "validation"
    return f"{part} loss {loss}{''.join(others)} {when}"


def sample(event: EventRecord, width: int = 72) -> str:
    """A sample's beginning, in a line."""
    text = str(event.get("text", "")).removeprefix(str(event.get("prompt", "")))
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    line = line if len(line) <= width else line[: width - 3] + "..."
    return f"sample after step {event.get('step')}: {line}"


def checkpoint(event: EventRecord) -> str:
    """A checkpoint, in a line: how long training stood still and, if longer, how long it took."""
    words = f"checkpoint {Path(str(event.get('path', ''))).name} saved"
    stall, written = number(event.get("seconds")), number(event.get("written_seconds"))
    if (size := number(event.get("bytes"))) is not None:
        words += f", {format_bytes(size)}"
    if written is not None:
        words += f" in {quantity(written, 'seconds')}"
        return words if stall is None else f"{words}; training waited {quantity(stall, 'seconds')}"
    return words if stall is None else f"{words} in {quantity(stall, 'seconds')}"


def message(event: EventRecord) -> str:
    """A sentence that an event brings along, in a line."""
    name, text = str(event.get("event")), " ".join(str(event.get("message", "")).split())
    return f"{name}: {text}"


def finished(event: EventRecord) -> str:
    """How a run ended, in a line; `event` is what run.json holds."""
    status, steps = event.get("status", "finished"), number(event.get("steps"))
    parts = [
        f"{status}" + (f" after {format_count(int(steps), 'step')}" if steps is not None else "")
    ]
    if (seconds := number(event.get("seconds"))) is not None:
        parts[0] += f" in {quantity(seconds, 'seconds')}"
    final, peak = event.get("final") or {}, event.get("peak_bytes") or {}
    for name, found in (
        (TRAINED, final.get("loss")),
        ("validation loss", final.get("validation_loss")),
        ("test loss", (final.get("test") or {}).get("loss")),
    ):
        if (loss := number(found)) is not None:
            parts.append(f"{name} {loss:.4f}")
    if (rate := number(event.get("tokens_per_second"))) is not None:
        parts.append(quantity(rate, "tokens/s"))
    # A budget is of tensors on an accelerator, and of the process elsewhere.
    counted = "measured" if (event.get("machine") or {}).get("accelerator") else "process"
    if (used := number(peak.get(counted))) is not None:
        budget = number(peak.get("budget"))
        limit = f" of {format_bytes(budget)}" if budget is not None else ""
        over = ", above the budget" if budget is not None and used > budget else ""
        parts.append(f"peak memory {format_bytes(used)}{limit}{over}")
    if status == "interrupted":
        parts.append("the same command resumes from here")
    if event.get("error"):
        parts.append(str(event["error"]))
    return "; ".join(parts)
