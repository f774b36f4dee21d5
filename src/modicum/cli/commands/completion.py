"""`modicum completion`: the script that teaches a shell to complete commands and options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
) -> None:
    """Print what lets a shell complete commands, options and names.

    In .bashrc: eval "$(modicum completion bash)". In .zshrc, after compinit: eval "$(modicum
    completion zsh)". In fish: modicum completion fish | source.
    """
    from modicum.cli.completion import script

    print(script(shell))
