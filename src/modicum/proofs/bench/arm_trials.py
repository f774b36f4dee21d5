"""A proof's trainings as trials of the engine of comparisons: an arm, a rate and a seed, in this
process. What several proofs ask for alike is trained once; what it came to is kept as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from modicum.comparison.cache import SharedTrials
from modicum.comparison.outcome import Outcome, Settings, TrialPart
from modicum.core.errors import InputError
from modicum.core.known_outcomes import described

A = TypeVar("A")
T = TypeVar("T")
_RATE, _RESULT = "rate", "result"


class ArmTrials(SharedTrials, Generic[A, T]):
    """Trials of arms; those that other proofs ask for too are taken, never their times.

    Args:
        train: an arm at a rate from a seed.
        score: of what it came to, less is better.
        facts: of an arm, all that decides what it comes to next to rate, seed, sources, versions
            and machine; None: nothing is shared.
        kind: the class of what arms come to, where some are shared.
        fresh: train also what is known.
    """

    def __init__(
        self,
        train: Callable[[A, float, int], T],
        score: Callable[[T], float],
        *,
        facts: Callable[[A], Mapping[str, Any]] | None = None,
        kind: type[T] | None = None,
        fresh: bool = False,
    ) -> None:
        super().__init__(self._trained, self._recipe, fresh=fresh)
        self._train, self._score, self._facts, self._kind = train, score, facts, kind
        self._arms: dict[str, A] = {}
        self._latest: list[T] = []

    def result(self, arm: A, rate: float, seed: int, *, shared: bool) -> tuple[T, bool]:
        """What an arm comes to, and whether that was known.

        Args:
            shared: whether other proofs train it too.
        """
        side, settings = described(arm), {_RATE: rate}
        self._arms[side] = arm
        if shared and self._facts is not None and self._kind is not None:
            taken = self(side, settings, seed, "tune").taken
        else:
            taken = self._trained(side, settings, seed, "tune").taken
        return self._latest[-1], taken

    def kept(self, outcome: Outcome) -> dict[str, Any]:
        """The outcome, and what the arm came to."""
        result = self._adapter.dump_python(self._latest[-1], mode="json")
        return {**super().kept(outcome), _RESULT: result}

    def taken(self, values: Mapping[str, Any], name: str) -> Outcome:
        """The outcome that was kept, and with it what the arm came to.

        Raises:
            InputError: it is none.
        """
        own = dict(values)
        try:
            self._latest = [self._adapter.validate_python(own.pop(_RESULT))]
        except (KeyError, ValidationError) as error:
            raise InputError(f"this is nothing that an arm comes to: {error}") from None
        return super().taken(own, name)

    @property
    def _adapter(self) -> TypeAdapter[T]:
        assert self._kind is not None
        return TypeAdapter(self._kind)

    def _trained(self, side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        self._latest = [self._train(self._arms[side], settings[_RATE], seed)]
        return Outcome("finished", loss=float(self._score(self._latest[-1])))

    def _recipe(
        self, side: str, settings: Settings, seed: int, part: TrialPart
    ) -> Mapping[str, Any]:
        assert self._facts is not None
        assert self._kind is not None
        facts = {"kind": self._kind.__qualname__, **self._facts(self._arms[side])}
        return {**facts, **settings, "seed": seed}
