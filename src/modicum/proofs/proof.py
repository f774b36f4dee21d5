"""What a proof found: figures, criteria, and the verdict that follows from them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from modicum.core.contracts.method import (
    Against,
    AgainstResult,
    ClaimVerdict,
    Info,
    Verdict,
    verdict_of,
)

Part = Literal["claim", "check", "against"]
Relation = Literal["at most", "at least"]


@dataclass(frozen=True)
class Figure:
    """One quantity of the method and of its baseline; `claimed` is what the paper says of it."""

    name: str
    method: float
    baseline: float
    claimed: str = ""

    @property
    def ratio(self) -> float:
        """Method over baseline; no number, which passes no criterion, where the baseline is 0."""
        return self.method / self.baseline if self.baseline else math.nan

    def as_json(self) -> dict[str, Any]:
        """The figure as plain values, the ratio among them."""
        return {
            "name": self.name,
            "method": _finite(self.method),
            "baseline": _finite(self.baseline),
            "ratio": _finite(self.ratio),
            "claimed": self.claimed,
        }


@dataclass(frozen=True)
class Criterion:
    """What must be so: `figure` is `relation` `bar`; `null_is` would have to miss it.

    Args:
        part: of the verdict to which it belongs.
        spread: the standard deviation of the figure over seeds; None where there is but one.
        rival: of the part `against`, what the figure compares with: then it is the method's over
            the rival's, and less is better.
    """

    sentence: str
    figure: float
    relation: Relation
    bar: float
    null_is: str
    part: Part = "claim"
    spread: float | None = None
    rival: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is so; a figure that is no number passes nothing.

        Against a rival, equal passes: within the spread.
        """
        if self.part == "against":
            return self.result != "worse"
        if self.relation == "at most":
            return self.figure <= self.bar
        return self.figure >= self.bar

    @property
    def result(self) -> AgainstResult:
        """Against a rival: better or worse by more than the spread, or equal."""
        spread = self.spread or 0.0
        if self.figure + spread < self.bar:
            return "better"
        return "equal" if self.figure - spread <= self.bar else "worse"

    @property
    def narrowly_missed(self) -> bool:
        """Whether it is missed by less than the figure's own spread over seeds."""
        return not self.passed and abs(self.figure - self.bar) < (self.spread or 0.0)

    def as_json(self) -> dict[str, Any]:
        """The criterion as plain values."""
        finite = {"figure": _finite(self.figure), "passed": self.passed}
        return asdict(self) | finite | {"narrowly_missed": self.narrowly_missed}

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" (spread {self.spread:.2g})"
        said = f"{self.sentence}: {self.figure:.4g}{spread}"
        if self.part == "against":
            return f"{said}, {Against(self.result, self.rival)}"
        narrowly = ", missed by less than its spread over seeds" if self.narrowly_missed else ""
        return f"{said}, and the bar is {self.relation} {self.bar:.4g}{narrowly}"


@dataclass(frozen=True)
class SweptRates:
    """The learning rates at which an arm was tried, and the best of them."""

    arm: str
    best: float
    tried: tuple[float, ...]

    @property
    def at_edge(self) -> bool:
        """Whether the best is at an end of what was tried, so that a better one may be beyond."""
        return self.best in (self.tried[0], self.tried[-1])

    def as_json(self) -> dict[str, Any]:
        """The rates as plain values."""
        tried = list(self.tried)
        return {"arm": self.arm, "best": self.best, "tried": tried, "at_edge": self.at_edge}


def claim_verdict_of(criteria: Iterable[Criterion]) -> ClaimVerdict:
    """How far the claim was found: in full, in part, not at all, or not measured.

    A check that is missed lowers a claim that holds to one that does so in part.
    """
    claim, check = ([c.passed for c in criteria if c.part == part] for part in ("claim", "check"))
    if not claim:
        return "not shown here"
    if not any(claim):
        return "does not hold"
    return "holds" if all(claim) and all(check) else "in part"


def against_of(criteria: Iterable[Criterion]) -> Against:
    """How the method stood against its rival, where one was measured."""
    for criterion in criteria:
        if criterion.part == "against":
            return Against(criterion.result, criterion.rival)
    return Against()


@dataclass(frozen=True)
class Proof:
    """What a proof found, and where it was run.

    Args:
        info: the method's, with the verdict that it is known for.
        mode: `quick` has thresholds of its own; `full` is the experiment of record.
        null: whether the nulls stood in the method's place; what stood must then fall.
        planted: whether, as nothing stood, it was what the proof plants: it must be found.
        sweeps: the learning rates of each arm that has some of its own.
        reused: how many trainings of baselines were known from an earlier proof.
    """

    info: Info
    mode: Literal["quick", "full"]
    null: bool
    planted: bool
    figures: tuple[Figure, ...]
    criteria: tuple[Criterion, ...]
    seeds: tuple[int, ...]
    seconds: float
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    when: str
    sweeps: tuple[SweptRates, ...] = ()
    reused: int = 0

    @property
    def claim_verdict(self) -> ClaimVerdict:
        """The paper's headline, as far as this machine can show it."""
        return claim_verdict_of(self.criteria)

    @property
    def against(self) -> Against:
        """The method against the best simple alternative; that it is a baseline, its info says."""
        baseline = self.info.against.result == "baseline"
        return self.info.against if baseline else against_of(self.criteria)

    @property
    def verdict(self) -> Verdict:
        """Both parts in one word; in a null run, `holds` if there is any of the `defects`."""
        if self.null and not self.planted:
            return "holds" if self.defects else "does not hold"
        return verdict_of(self.claim_verdict, self.against)

    @property
    def undetected(self) -> tuple[str, ...]:
        """In a null run, the nulls that met all their criteria: each is a defect of the proof."""
        if not self.null or self.planted:
            return ()
        judged = [c for c in self.criteria if c.part != "against"]
        caught = {c.null_is for c in judged if not c.passed}
        return tuple(
            null for null in dict.fromkeys(c.null_is for c in judged) if null not in caught
        )

    @property
    def defects(self) -> tuple[str, ...]:
        """In a null run, what is wrong with the proof: it would say the same of anything."""
        if not self.null:
            return ()
        if self.planted:
            alone = self.claim_verdict == "not shown here" and self.against.result == "better"
            return () if alone or self.claim_verdict == "holds" else ("what was planted",)
        found = list(self.undetected)
        if _RANKS.index(self.claim_verdict) >= _RANKS.index(_stood(self.info)):
            found.append(f"that the claim should have fallen (it {_held(self.claim_verdict)})")
        if self.info.against.result == self.against.result == "better":
            found.append(f"that a null is not {self.against}")
        return tuple(found)

    @property
    def reason(self) -> str:
        """Why the verdict is what it is, in one sentence."""
        if self.defects:
            return f"a defect of this proof, it does not notice: {'; '.join(self.defects)}"
        reasons = [str(c) for c in self.criteria if not c.passed or c.part == "against"]
        if all(criterion.passed for criterion in self.criteria):
            reasons.insert(0, f"all {len(self.criteria)} criteria are met")
        if self.planted:
            reasons.insert(0, "what was planted is found")
        return "; ".join(reasons)

    def as_json(self) -> dict[str, Any]:
        """The proof as plain values, in the order in which a reader wants them."""
        return {
            "name": self.info.name,
            "room": self.info.room,
            "title": self.info.title,
            "verdict": self.verdict,
            "claim_verdict": self.claim_verdict,
            "against": asdict(self.against),
            "reason": self.reason,
            "mode": self.mode,
            "null": self.null,
            "planted": self.planted,
            "defects": list(self.defects),
            "paper": self.info.paper,
            "claim": self.info.claim,
            "figures": [figure.as_json() for figure in self.figures],
            "criteria": [criterion.as_json() for criterion in self.criteria],
            "sweeps": [swept.as_json() for swept in self.sweeps],
            "seeds": list(self.seeds),
            "reused": self.reused,
            "seconds": round(self.seconds, 2),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "when": self.when,
        }


def nothing_stands(info: Info) -> bool:
    """Whether a method's proof was run, and neither part of its verdict stands."""
    if info.claim_verdict in ("holds", "in part") or info.against.result == "better":
        return False
    return info.claim_verdict == "does not hold" or info.against.result in ("equal", "worse")


_RANKS: tuple[ClaimVerdict, ...] = get_args(ClaimVerdict)


def _stood(info: Info) -> ClaimVerdict:
    """What a null's claim must stay below: that of a method without a verdict, below `holds`."""
    return info.claim_verdict if info.claim_verdict in ("holds", "in part") else "holds"


def _held(claim_verdict: ClaimVerdict) -> str:
    return {"in part": "holds in part"}.get(claim_verdict, claim_verdict)


def _finite(number: float) -> float | None:
    """JSON has no word for a figure that is no number."""
    return number if math.isfinite(number) else None
