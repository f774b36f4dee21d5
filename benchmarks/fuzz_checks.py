"""What must hold of every command, whatever it was given."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from fuzz_cases import Case
from fuzz_zygote import Ended

_OWN = re.compile(r"^modicum: ", re.MULTILINE)
_USAGE = re.compile(r"^Error: ", re.MULTILINE)
_HELP = re.compile(r"^\s*Usage: modicum", re.MULTILINE)  # of a command group without a command
_WARNING = re.compile(r"^.*\b\w*Warning: .*$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def faults(case: Case, ended: Ended, changed: Sequence[str]) -> list[str]:
    """What is wrong, in short words that are the same for the same fault; nothing else.

    Args:
        changed: the files and folders of the world that the command made, changed or removed.
    """
    found = []
    if "Traceback (most recent call last)" in ended.err:
        found.append(f"a stack trace: {_place(ended.err)}")
    if ended.code is None:
        found.append("no end in time")
    elif ended.code < 0:
        found.append(f"ended by signal {-ended.code}")
    elif ended.code not in case.codes and not found:
        found.append(f"exit code {ended.code}")
    if ended.code in (2, 3) and not found:
        messages = len(_OWN.findall(ended.err)) + len(_USAGE.findall(ended.err))
        if messages != 1 and not (messages == 0 and _HELP.search(ended.out + ended.err)):
            found.append(f"{messages} messages")
        elif ended.code == 2 and _lines(ended.err) > 1:
            found.append("a message of several lines")
    if (warning := _WARNING.search(ended.err)) is not None and not found:
        found.append(f"a library's warning: {warning[0][:120]}")
    outside = [name for name in changed if not _inside(name, case.outputs)]
    if outside:
        found.append(f"changed outside of its output: {re.sub('[0-9]+', '0', outside[0])}")
    if (
        ended.code == 0
        and "--json" in case.words
        and case.output == "out"
        and "-h" not in case.words
    ):
        found += _not_json(ended.out)
    return found


def _not_json(text: str) -> list[str]:
    if not text.startswith(("{", "[")):
        return []  # help, a version: another option had the last word
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        return ["no strict JSON on standard output"]
    return []


def _lines(err: str) -> int:
    """How many lines there are from our message on."""
    own = _OWN.search(err)
    return 0 if own is None else err.count("\n", own.start())


def _refuse(word: str) -> None:
    raise ValueError(word)


def _inside(name: str, outputs: Sequence[str]) -> bool:
    """Whether a name is one of the outputs, in one, or a folder that one had to have."""
    tidy = [output.strip("/").removeprefix("./") for output in outputs]
    return any(
        name == output or name.startswith(f"{output}/") or f"{output}/".startswith(f"{name}/")
        for output in tidy
    )


def _place(err: str) -> str:
    """The last line of modicum's own in a stack trace, and the error."""
    frames = [frame for frame in _FRAME.findall(err) if "/modicum/" in frame[0]]
    at = ""
    if frames:
        path, line, function = frames[-1]
        at = f"{path.rpartition('/modicum/')[2]}:{line} {function}: "
    last = [line for line in err.rstrip().splitlines() if line and not line.startswith(" ")][-1:]
    return at + re.sub("[0-9]+", "0", last[0] if last else "")[:100]
