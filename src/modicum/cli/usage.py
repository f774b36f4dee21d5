"""What is wrong with a word of the command line, as one message of modicum's own."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError

from modicum.core.contracts.method import describe, own_words
from modicum.core.errors import InputError

# How typer lists the words of a choice.
_CHOICE = re.compile(r"'?(?P<word>.*?)'? is not one of (?P<words>.+?)\.?$")

_NO_COMMAND = re.compile(r"No such command '([^']+)'")


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


def as_field(error: Any) -> InputError | None:
    """What to say of an option that there is not, where a recipe has a field of its name.

    Args:
        error: typer's `UsageError`; None is given of any but an unknown option of a command that
            takes `--set`.
    """
    name, context = getattr(error, "option_name", None), error.ctx
    if name is None or context is None:
        return None
    command = context.command
    if not any("--set" in param.opts for param in command.params):
        return None
    word = name.lstrip("-").replace("-", "_")
    found = [
        field for field in _fields() if word == field.rpartition(".")[2] or field == f"{word}.path"
    ]
    if not found:
        return None
    said = " or ".join(f"--set {field}=VALUE" for field in found)
    problem = f"`modicum {command.name}` has no such option; a field of the recipe is set by {said}"
    return InputError(problem, field=name)


def elsewhere(error: Any) -> InputError | None:
    """What to say of a command that there is not, where one of its name is at another place.

    Args:
        error: typer's `UsageError`; None is given of any but an unknown command.
    """
    unknown = _NO_COMMAND.search(str(getattr(error, "message", "")))
    if unknown is None or error.ctx is None:
        return None
    root, here = error.ctx.find_root(), error.ctx
    groups = {"modicum": root.command} | {
        f"modicum {name}": each
        for name, each in root.command.commands.items()
        if hasattr(each, "commands")
    }
    found = [
        f"`{path} {unknown[1]}`" for path, each in groups.items() if unknown[1] in each.commands
    ]
    if not found:
        return None
    called = " ".join(["modicum", *here.command_path.split()[1:]])
    problem = f"`{called}` has no such command; {' or '.join(found)} is one"
    return InputError(problem, value=unknown[1])


def _fields() -> list[str]:
    """The fields of a recipe, dotted."""
    from modicum.recipe import Recipe

    found = ["adapter.method", "adapter.rank", "optimizer.method"]
    for section, values in Recipe().plain().items():
        if isinstance(values, dict):
            found += [f"{section}.{name}" for name in values]
    return list(dict.fromkeys(found))


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
