"""Completion in shells: typer's own scripts, and the names that commands offer to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from modicum.core.errors import ModicumError

VARIABLE = "_MODICUM_COMPLETE"


def script(shell: str) -> str:
    """The script that teaches a shell (bash, zsh, fish) to complete `modicum`."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    made: str = get_completion_script(prog_name="modicum", complete_var=VARIABLE, shell=shell)
    return made


def begin_if_asked() -> None:
    """Let typer answer where a shell's script calls this process; costs nothing elsewhere."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()


def method_names(incomplete: str) -> Iterator[str]:
    """The methods whose names begin so."""
    from modicum.core.contracts.catalog import catalog

    yield from _beginning(incomplete, lambda: list(catalog()))


def room_names(incomplete: str) -> Iterator[str]:
    """The rooms whose names begin so."""
    from modicum.core.contracts.catalog import ROOMS

    yield from _beginning(incomplete, lambda: list(ROOMS))


def _beginning(incomplete: str, names: Callable[[], list[str]]) -> Iterator[str]:
    try:
        found = names()
    except ModicumError:  # a message here would stand in the middle of what is typed
        return
    yield from (name for name in found if name.startswith(incomplete))
