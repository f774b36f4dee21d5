"""A battery is a list of checks that every method of a room must pass.

A check is a function of the method's class (or of one of its values) that raises `AssertionError`
with one clear sentence, or `NotApplicable` with the reason why it says nothing of this method.
`modicum check FILE.py` runs the battery on a user's own methods, and the project's tests run it on
every method of the catalog.
"""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modicum.core.contracts.catalog import MethodRecord
from modicum.core.contracts.method import Method
from modicum.core.contracts.traits import TRAITS
from modicum.core.errors import InputError

# The rooms that have a battery, and the package in which importing it registers its checks.
BATTERIES = {
    "adapters": "modicum.proofs.contracts.adapters",
    "comm": "modicum.proofs.contracts.comm",
    "compress": "modicum.proofs.contracts.compress",
    "linears": "modicum.proofs.contracts.linears",
    "memory": "modicum.proofs.contracts.memory",
    "optim": "modicum.proofs.contracts.optim",
}
# What enters the checks of all rooms.
COMMON = "modicum.proofs.contracts.search_tables"

_CHECKS: dict[str, list[Check]] = {room: [] for room in BATTERIES}


class NotApplicable(Exception):
    """A check says nothing of this method, or needs a library that is not there; it says which."""


@dataclass(frozen=True)
class Check:
    """One promise of a room: `sentence` for people, `expensive` when it takes seconds.

    `slot` is that of the methods that it is for, where a room has methods of several; `proves` the
    column of the table of combinations that it proves. It says something of methods that have all
    traits of `needs` and none of `unless`, and of which `refuses` gives no reason.
    """

    name: str
    sentence: str
    run: Callable[[Any], None]
    expensive: bool
    slot: str = ""
    proves: str = ""
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    refuses: Callable[[Any], str | None] = lambda subject: None

    def why_not(self, subject: Any) -> str | None:
        """Why it says nothing of a method; None: it does, as far as traits tell."""
        if (reason := self.refuses(subject)) is not None:
            return reason
        traits = subject.traits if isinstance(subject, Method) else subject.tiny().traits
        for trait in self.needs:
            if trait not in traits:
                return f"the method does not claim `{trait}`: {TRAITS[trait]}"
        for trait in self.unless:
            if trait in traits:
                return f"the method says `{trait}`: {TRAITS[trait]}"
        return None


@dataclass(frozen=True)
class CheckResult:
    """How a method did in one check.

    Args:
        message: what is wrong, or why the check was skipped; else empty.
        skipped: passed because the check says nothing of this method.
    """

    name: str
    passed: bool
    message: str
    seconds: float
    skipped: bool = False


def check(
    room: str,
    *,
    slot: str = "",
    expensive: bool = False,
    proves: str = "",
    needs: tuple[str, ...] = (),
    unless: tuple[str, ...] = (),
    refuses: Callable[[Any], str | None] = lambda subject: None,
) -> Callable[[Callable[[Any], None]], Any]:
    """Enter a function into a room's battery; its docstring's first line is the promise."""

    def enter(function: Callable[[Any], None]) -> Callable[[Any], None]:
        sentence = (function.__doc__ or "").strip().split("\n")[0]
        name = function.__name__.removeprefix("check_")

        @functools.wraps(function)
        def guarded(subject: Any) -> None:
            if (reason := entry.why_not(subject)) is not None:
                raise NotApplicable(reason)
            function(subject)

        entry = Check(name, sentence, guarded, expensive, slot, proves, needs, unless, refuses)
        _CHECKS[room].append(entry)
        return guarded

    return enter


def checks(room: str, *, slot: str = "", cheap_only: bool = False) -> list[Check]:
    """The battery of a room, for its methods of one slot, in the order in which it is written.

    Raises:
        InputError: the room has no battery.
    """
    if room not in BATTERIES:
        raise InputError(
            "this room has no battery of checks yet", value=room, allowed=", ".join(BATTERIES)
        )
    for package in (BATTERIES[room], COMMON):
        importlib.import_module(package)
    ours = [entry for entry in _CHECKS[room] if entry.slot == slot]
    return [entry for entry in ours if not (cheap_only and entry.expensive)]


def skipped_by_traits(subject: type[Method] | Method) -> dict[str, str]:
    """The checks of its room that say nothing of a method, with the reason; known before any runs.

    Raises:
        InputError: the room has no battery.
    """
    battery = checks(subject.info.room, slot=subject.info.slot)
    reasons = {entry.name: entry.why_not(subject) for entry in battery}
    return {name: why for name, why in reasons.items() if why is not None}


def run_battery(
    method: MethodRecord | type[Method] | Method,
    *,
    cheap_only: bool = False,
    listener: Callable[[CheckResult], None] | None = None,
) -> list[CheckResult]:
    """Run a room's battery on a method and say how it did; `listener` is called with each result.

    Raises:
        InputError: the method's room has no battery.
    """
    subject = method.load() if isinstance(method, MethodRecord) else method
    results = []
    info = subject.info
    for entry in checks(info.room, slot=info.slot, cheap_only=cheap_only):
        results.append(_run(entry, subject))
        if listener is not None:
            listener(results[-1])
    return results


def _run(entry: Check, subject: type[Method] | Method) -> CheckResult:
    started, passed, skipped, message = time.perf_counter(), True, False, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry.run(subject)
    except NotApplicable as reason:
        skipped, message = True, str(reason)
    except AssertionError as error:
        passed, message = False, str(error)
    except Exception as error:  # whatever a stranger's method raises is a finding, not our end
        passed, message = False, f"it raised {type(error).__name__}: {error}"
    return CheckResult(entry.name, passed, message, time.perf_counter() - started, skipped)
