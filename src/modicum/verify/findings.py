"""What a check found, as plain values: what, where, what was expected, and what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wanting:
    """One thing that is not as it should be.

    Args:
        what: the name of the check that failed.
        where: the recipe's field, or the file or folder.
        expected: what would have passed, in words.
        found: what is there, in words.
    """

    what: str
    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: {self.where}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Verification:
    """How a verification came out.

    Args:
        checks: a row for each check, also for those that passed; `check` is its name.
        findings: what did not pass.

    >>> bad = Wanting("duplicates", "data.path", "at most 5 %", "12 % (3 of 25)")
    >>> Verification([{"check": "duplicates"}], [bad]).passed
    False
    """

    checks: Sequence[dict[str, Any]] = field(default_factory=list)
    findings: Sequence[Wanting] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {
            "passed": self.passed,
            "findings": [asdict(finding) for finding in self.findings],
            "checks": list(self.checks),
        }
