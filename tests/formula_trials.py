"""Trials that are formulas: a bowl over the learning rate, with noise by names."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.comparison import Outcome, Settings, Side, TrialPart, TrialRange

RATE = TrialRange(1e-4, 1e-1, default=1e-3)


def noise(*key: object) -> float:
    """A standard normal number of this name."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    first, second = (int.from_bytes(digest[i : i + 6], "little") for i in (0, 6))
    return math.sqrt(-2 * math.log((first + 1) / 2**48)) * math.cos(2 * math.pi * second / 2**48)


class Bowl:
    """Losses with their least at `optimum`; every call is noted, and may be a file's line.

    Args:
        gains: what each side's loss is less by.
        ends: outcomes other than losses, by side and seed (None: any seed).
    """

    def __init__(
        self,
        optimum: float = 10**-2.4,
        gains: Mapping[str, float] | None = None,
        ends: Mapping[tuple[str, int | None], Any] | None = None,
        log: Path | None = None,
        deviation: float = 0.01,
    ) -> None:
        self.optimum, self.gains, self.ends = optimum, gains or {}, ends or {}
        self.log, self.deviation = log, deviation
        self.calls: list[tuple[str, str, int, TrialPart]] = []

    def __call__(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        self.calls.append((side, repr(sorted(settings.items())), seed, part))
        end = self.ends.get((side, seed), self.ends.get((side, None)))
        if isinstance(end, BaseException):
            raise end
        if end is not None:
            return Outcome(end, message=f"{side} is {end}")
        loss = 2 + 0.1 * math.log10(settings["rate"] / self.optimum) ** 2 - self.gains.get(side, 0)
        loss += self.deviation * noise("seed", seed) * 0.7
        loss += self.deviation * noise(side, seed, sorted(settings.items())) * 0.7
        test = {"held out": loss + 0.1} if part == "judge" else {}
        return Outcome(
            "finished",
            loss,
            test,
            tokens=1000,
            seconds=1.0,
            bytes={"peak": 7},
            data_hash=f"d{seed}",
        )


def sides(*names: str, rate: TrialRange = RATE) -> list[Side]:
    """A side of each name, with the same range."""
    return [Side(name, {"rate": rate}, {"method": name}) for name in names]
