"""Folders of the small models that are modicum's own: config.json and model.safetensors.

The configuration of such a model is a dataclass that knows the shape of each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.files import disk_errors, json_object, publish_folder, write_json
from modicum.core.ranks.sharding import own_part, whole
from modicum.models.safetensors_file import read_entries

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class OwnConfig(Protocol):
    """What a configuration says of its model."""

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in the order of the model's own."""


C = TypeVar("C", bound=OwnConfig)
M = TypeVar("M", bound=nn.Module)


def save_own(
    model: nn.Module,
    config: DataclassInstance,
    model_type: str,
    folder: str | Path,
    *,
    write: bool = True,
) -> Path:
    """Write `model` to `folder` as config.json and model.safetensors atomically.

    A folder that is already there is replaced.

    Args:
        write: of a model that is sharded over ranks every rank calls this, so that its tensors can
            be gathered, and one rank writes.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    weights = {name: whole(tensor.detach()) for name, tensor in model.named_parameters()}
    if write:
        with publish_folder(target) as temporary, disk_errors(target):
            save_file({name: w.cpu().contiguous() for name, w in weights.items()},
                      temporary / WEIGHTS, {"format": "pt"})  # fmt: skip
            write_json(temporary / CONFIG, {"model_type": model_type, **asdict(config)})
    return target


def read_own_config(
    folder: str | Path, model_type: str, kind: str, make: Callable[[dict[str, Any]], C]
) -> C:
    """The configuration of a folder that `save_own` wrote.

    Args:
        kind: the model's name in a message.
        make: of the file's values; what it raises of a wrong one is an `InputError` of this.

    Raises:
        InputError: it is missing, cannot be read, or is another model's.
    """
    file = Path(folder) / CONFIG
    raw = json_object(file)
    found = raw.pop("model_type", None)
    if found != model_type:
        raise InputError(
            "this is another kind of model", file=file, field="model_type", value=found,
            allowed=model_type,
        )  # fmt: skip
    try:
        return make(raw)
    except (KeyError, TypeError) as error:
        raise InputError(f"is no configuration of a {kind}: {error}", file=file) from None
    except InputError as error:
        raise error.located(file=file) from None


def fill_own(model: M, config: OwnConfig, folder: str | Path, skip: Collection[str] = ()) -> M:
    """Read the weights of a folder into a model that has memory; a rank, its part of each.

    Args:
        skip: parameters that are left as they are, as are those of adapters.

    Raises:
        InputError: the file is damaged, or its tensors are not those of the model.
    """
    from safetensors import safe_open

    file = Path(folder) / WEIGHTS
    found = {name: entry.shape for name, entry in read_entries(file).items()}
    _refuse_others(config.parameter_shapes(), found, file)
    with safe_open(file, "pt") as tensors, torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in skip or name not in found:
                continue
            part, before = own_part(parameter)
            part.copy_(tensors.get_slice(name)[before : before + len(part)])
    return model


def _refuse_others(
    wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], file: Path
) -> None:
    """Refuse a file whose tensors are not those of the configuration next to it.

    Raises:
        InputError: one has another shape, or is in one of the two alone.
    """
    for name in [*wanted, *found]:
        if wanted.get(name) != found.get(name):
            raise InputError(
                "the weights are not those of the model in config.json",
                file=file,
                field=name,
                value=found.get(name),
                allowed=str(wanted.get(name)),
            )
