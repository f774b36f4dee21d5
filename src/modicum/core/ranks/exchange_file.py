"""What an exchange keeps between updates, in a file a rank, for checkpoints that are not modicum's.

A file names the trained weights next to which it was written, so it is not taken for another's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.core.contracts.parameters import trainable
from modicum.core.digest import tensors_digest
from modicum.core.errors import InputError
from modicum.core.files import publish_file
from modicum.core.ranks.matrix_exchange import MatrixExchange

_NOTE = "modicum"
_ALIKE = ("ranks", "weights")  # in the files of all ranks


def save_exchange(exchange: MatrixExchange, model: nn.Module, folder: Path) -> None:
    """Write this rank's file, after an update; every rank calls this.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for view in exchange.views():
        values[view.name] = {}
        for key, value in view.read().items():
            if isinstance(value, Tensor):
                tensors[f"{view.name}/{key}"] = value.detach().cpu().contiguous()
            else:
                values[view.name][key] = value
    note = {"ranks": exchange.ranks.size, "weights": _weights(model), "values": values}
    with publish_file(_file(folder, exchange.ranks.rank)) as temporary:
        save_file(tensors, temporary, metadata={_NOTE: json.dumps(note)})


def load_exchange(exchange: MatrixExchange, model: nn.Module, folder: Path) -> bool:
    """Take up what was written next to the model's weights; every rank calls this.

    Where ranks are fewer or more than then, each needs the files of all.

    Returns:
        Whether every rank has; if not, none has.

    Raises:
        InputError: some rank's file is damaged.
    """
    ranks, same, problem = exchange.ranks, True, None
    saved: list[dict[str, dict[str, Any]]] = []
    try:
        saved, same = _saved(folder, ranks.rank, ranks.size, _weights(model))
    except InputError as error:
        problem = str(error)
    told = ranks.gather([bool(saved), problem])
    if problems := [said for _, said in told if said]:
        raise InputError(problems[0])
    if not all(there for there, _ in told):
        return False
    for view in exchange.views():
        states = [state.get(view.name, {}) for state in saved]
        if not same and view.per_rank and view.regroup is not None:
            view.write(view.regroup(states))
        else:
            view.write(states[0])
    return True


def saved_exchanges(folder: Path) -> list[Path]:
    """The files of ranks in a checkpoint."""
    return sorted(folder.glob("modicum_exchange_*.safetensors"))


def _saved(
    folder: Path, rank: int, size: int, weights: str
) -> tuple[list[dict[str, dict[str, Any]]], bool]:
    """States by view: one's own, or those of all ranks that wrote; nothing where some lack.

    And whether as many ranks wrote as there are.
    """
    # More ranks may have left files of other weights in the folder.
    own, zeroth = (
        found if found is not None and found["weights"] == weights else None
        for found in (_read(_file(folder, each)) for each in (rank, 0))
    )
    if (first := own or zeroth) is None:
        return [], True
    if first["ranks"] == size:
        return ([] if own is None else [own["states"]]), True
    states = []
    for each in range(first["ranks"]):  # which may be any number, so the first that lacks ends it
        found = _read(_file(folder, each))
        if found is None or any(found[key] != first[key] for key in _ALIKE):
            return [], False
        states.append(found["states"])
    return states, False


def _read(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        with safe_open(file, "pt") as tensors:
            note = json.loads(tensors.metadata()[_NOTE])
            states: dict[str, dict[str, Any]] = {
                view: dict(values) for view, values in note["values"].items()
            }
            for name in tensors.keys():  # noqa: SIM118
                view, _, key = name.partition("/")
                states[view][key] = tensors.get_tensor(name)
        return {"ranks": int(note["ranks"]), "weights": str(note["weights"]), "states": states}
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise InputError(
            f"damaged: {error}; without it training continues, and what is owed begins at nothing",
            file=file,
        ) from None


def _weights(model: nn.Module) -> str:
    return tensors_digest(trainable(model))


def _file(folder: Path, rank: int) -> Path:
    return folder / f"modicum_exchange_{rank}.safetensors"
