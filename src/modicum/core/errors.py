"""The handful of errors that modicum raises, each with the exit code of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

_MISSING = object()


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate closest in spelling to `word`, else the shortest that begins with it.

    Capitals count as small letters, and hyphens as underscores.

    >>> nearest("rnak", ["rank", "alpha"]), nearest("r", ["rank", "rank_stabilized"])
    ('rank', 'rank')
    >>> nearest("LoRA-XS", ["lora", "lora_xs"])
    'lora_xs'
    """
    word = _folded(str(word))
    known = {_folded(one): one for one in reversed(list(candidates))}
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.55)
    begun = sorted((one for one in known if word and one.startswith(word)), key=len)
    return next((known[one] for one in [*close, *begun]), None)


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")


def clipped(text: str, most: int = 300) -> str:
    """The text, or its beginning and how long it is.

    >>> clipped("9" * 1000, 12)
    '999999999999... (1000 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _one_line(text: str) -> str:
    """A message without ends of lines and codes of terminals, which names of files may hold."""
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )


class ModicumError(Exception):
    """Anything that modicum itself has to say. `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1


class InputError(ModicumError):
    """The input was wrong, or a lock, the disk or a changed recipe stands in the way.

    Args:
        problem: one sentence, with the fix in it.
        file: the file at fault; `line` is 1-based.
        field: the recipe's field, dotted (`adapter.rank`), or a column's name.
        value: what was found there.
        allowed: what would be allowed, in words.
        candidates: known names, from which the nearest match to `value` (or `word`) is offered.
    """

    exit_code = 2

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        value: object = _MISSING,
        allowed: str | None = None,
        candidates: Iterable[str] = (),
        word: str | None = None,
    ) -> None:
        self.problem, self.file, self.line = problem, file, line
        self.field, self.allowed = field, allowed
        self.value = None if value is _MISSING else value
        self._told: dict[str, Any] = {"value": value, "candidates": tuple(candidates), "word": word}
        where = str(file) if file else ""
        if line is not None:
            where += f":{line}" if where else f"line {line}"
        text = ": ".join([clipped(part) for part in (where, field) if part] + [problem])
        if value is not _MISSING:
            text += f" (found: {clipped(repr(value))})"
        if allowed:
            text += f"; allowed: {allowed}"
        wanted = word if word is not None else (value if isinstance(value, str) else None)
        self.suggestion = nearest(wanted, self._told["candidates"]) if wanted is not None else None
        if self.suggestion:
            text += f". Did you mean {self.suggestion!r}?"
        super().__init__(_one_line(text))

    def located(
        self,
        *,
        file: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
    ) -> InputError:
        """The same error with its place filled in where it was not known."""
        return InputError(
            self.problem,
            file=self.file or file,
            line=self.line if self.line is not None else line,
            field=self.field or field,
            allowed=self.allowed,
            **self._told,
        )

    def fixed_by(self, fix: str) -> InputError:
        """The same error with another fix in its sentence.

        >>> str(InputError("there is no such file; look again").fixed_by("`make data` makes it"))
        'there is no such file; `make data` makes it'
        """
        return InputError(
            f"{self.problem.partition(';')[0]}; {fix}",
            file=self.file,
            line=self.line,
            field=self.field,
            allowed=self.allowed,
            **self._told,
        )

    def within(self, section: str) -> InputError:
        """The same error with its field in a section of a recipe: `rank` in `adapter.rank`."""
        return InputError(
            self.problem,
            file=self.file,
            line=self.line,
            field=f"{section}.{self.field}" if self.field else section,
            allowed=self.allowed,
            **self._told,
        )


class DoesNotFit(ModicumError):
    """No plan keeps the budget. `changes` are the cheapest changes that would.

    Args:
        yaml: the first of them as lines of a recipe.
    """

    exit_code = 3

    def __init__(self, problem: str, changes: Iterable[str] = (), *, yaml: str = "") -> None:
        self.changes, self.yaml = list(changes), yaml
        lines = [problem, *(f"  - {change}" for change in self.changes)]
        if yaml:
            lines += ["The first in the recipe:", *(f"    {line}" for line in yaml.splitlines())]
        super().__init__("\n".join(lines))


class Interrupted(ModicumError):
    """The run was asked to stop; its state is saved and the same command continues it."""

    exit_code = 4


class FoundWanting(ModicumError):
    """Something was checked and did not pass (`check`, `verify`, `reproduce`, ...)."""

    exit_code = 5


class Restart(Interrupted):
    """A rank cannot continue, and all of them can, begun anew: whoever started them does that.

    Seen from outside it is `Interrupted`; the ranks' supervisor alone knows the other exit code.
    """

    exit_code = 75  # sysexits.h: a temporary failure
