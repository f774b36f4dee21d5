"""A word of the command line that an option does not take, as one message of modicum's own."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from modicum.core.contracts.method import describe, own_words
from modicum.core.errors import InputError

# How typer lists the words of a choice.
_CHOICE = re.compile(r"'?(?P<word>.*?)'? is not one of (?P<words>.+?)\.?$")


def refused(error: Any) -> InputError:
    """What is wrong with an option's or argument's value, what it takes, and what it is.

    Args:
        error: typer's `BadParameter`.
    """
    param, cause = error.param, error.__cause__
    name = _name(param) or getattr(error, "param_hint", None)
    what = _what(param)
    message = own_words(error.message)
    choice = _CHOICE.match(message)
    if choice is not None:
        words = re.findall(r"'([^']*)'", choice["words"])
        return InputError(
            "no such choice",
            field=name,
            value=choice["word"],
            allowed=", ".join(words) + what,
            candidates=words,
        )
    if isinstance(cause, ValidationError):
        found = describe(cause, (), prefix="")
        allowed = found.allowed and found.allowed + what
        return InputError(found.problem, field=name, value=found.value, allowed=allowed)
    return InputError(message.rstrip("."), field=name)


def _name(param: Any) -> str | None:
    """The option's long spelling, or the argument's name."""
    if param is None:
        return None
    options = [word for word in param.opts if word.startswith("-")]
    return str(max(options, key=len)) if options else str(param.metavar or param.name).upper()


def _what(param: Any) -> str:
    """What the option is, in brackets, by its help."""
    said = (getattr(param, "help", None) or "").rstrip(".")
    return f" ({said[:1].lower()}{said[1:]})" if said else ""
