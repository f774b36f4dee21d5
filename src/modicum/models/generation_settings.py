"""What a folder says of how its model writes: its ends and how tokens are drawn.

A model that was read from a folder knows it, so that the folder that it is saved to says it too.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.files import read_json

if TYPE_CHECKING:
    from torch import nn

GENERATION = "generation_config.json"
_NOTE = "_generation_settings"
_ENDS = "eos_token_id"
_FROM_CONFIG = "_from_model_config"


def note_generation(model: nn.Module, folder: Path) -> None:
    """Have a model know what the folder that it was read from says.

    Raises:
        InputError: the file there is damaged.
    """
    file = folder / GENERATION
    said = read_json(file) if file.is_file() else None
    model.__dict__[_NOTE] = dict(said) if isinstance(said, dict) else {}


def generation_settings(
    model: nn.Module, tokens: Mapping[str, Any], end: int | None = None
) -> dict[str, Any]:
    """What a folder says of a model: as the one that it was read from, with all known ends.

    Args:
        tokens: what its config.json says of them; an end there is one of generation too.
        end: the token that ended the texts of its training, which is one of generation too.
    """
    own = {name: token for name, token in tokens.items() if token is not None}
    said = dict(model.__dict__.get(_NOTE) or {})
    ends = list(dict.fromkeys([*_listed(said.get(_ENDS)), *_listed(own.get(_ENDS))]))
    if end is not None and end not in ends:
        ends.append(end)
        said.pop(_FROM_CONFIG, None)  # else transformers takes the ends of config.json alone
    elif not said:
        return {_FROM_CONFIG: True, **own}
    known: dict[str, Any] = {_ENDS: ends[0] if len(ends) == 1 else ends} if ends else {}
    return {**own, **said, **known}


def _listed(ends: Any) -> list[Any]:
    return list(ends) if isinstance(ends, list | tuple) else [] if ends is None else [ends]
