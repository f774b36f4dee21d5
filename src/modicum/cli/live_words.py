"""What is said of a run's events, in a line each: the same words on a terminal and in a log."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.units import format_bytes, format_duration
from modicum.report.numbers import number, quantity, short

EventRecord = Mapping[str, Any]


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

    def words(self) -> list[str]:
        """Step, loss, tokens/s, memory, time left: those that are known."""
        row = self.last
        total = number(row.get("steps"))
        words = [f"step {row.get('step')}" + (f"/{total}" if total else "")]
        if self.loss is not None:
            words.append(f"loss {self.loss:.3f}")
        if (rate := number(row.get("tokens_per_second"))) is not None:
            words.append(f"{short(rate)} tokens/s")
        if (size := number(row.get("bytes"))) is not None:
            limit = f" of {format_bytes(self.budget)}" if self.budget else ""
            own = f" ({format_bytes(self.base)} Python and torch)" if self.base else ""
            words.append(format_bytes(size) + limit + own)
        if (left := number(row.get("seconds_left"))) is not None:
            words.append(f"{format_duration(left)} left")
        return words


def evaluation(event: EventRecord) -> str:
    """An evaluation, in a line."""
    loss = quantity(event.get("loss"), "nats")
    step = event.get("step")
    others = (
        f", {name.replace('_', ' ')} {value:.4g}"
        for name, value in event.items()
        if isinstance(value, float) and name not in ("loss", "seconds")
    )
    when = "before training" if step == 0 else f"after step {step}"
    return f"validation loss {loss}{''.join(others)} {when}"


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
    parts = [f"{status}" + (f" after {steps:,} steps" if steps is not None else "")]
    if (seconds := number(event.get("seconds"))) is not None:
        parts[0] += f" in {quantity(seconds, 'seconds')}"
    final, peak = event.get("final") or {}, event.get("peak_bytes") or {}
    for name, key in (("loss of the last step", "loss"), ("validation loss", "validation_loss")):
        if (loss := number(final.get(key))) is not None:
            parts.append(f"{name} {loss:.4f}")
    if (rate := number(event.get("tokens_per_second"))) is not None:
        parts.append(f"{short(rate)} tokens/s")
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
