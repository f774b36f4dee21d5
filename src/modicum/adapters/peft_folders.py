"""What PEFT's folders of adapters that are no LoRAs have in common, both ways."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.names import plain_model, plain_name
from modicum.adapters.native_files import read_json, read_tensors
from modicum.adapters.peft_config import HARMLESS, check_names
from modicum.adapters.peft_copies import PREFIX
from modicum.adapters.peft_files import CONFIG, WEIGHTS, target_modules
from modicum.adapters.peft_task import task_fields, unreadable
from modicum.adapters.sites import Site, all_sites
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json

_READ = (
    *("peft_type", "r", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern"),
)


def write_folder(
    attached: Attachment,
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    base_model: str | None,
    **fields: Any,
) -> None:
    """Write a folder of PEFT's atomically.

    Args:
        tensors: by their names there.
        fields: what its configuration says, of this kind of adapter alone.
    """
    sites = attached.sites.values()
    config = {
        **task_fields(plain_model(attached.model), [plain_name(site.name) for site in sites]),
        "base_model_name_or_path": base_model,
        "target_modules": target_modules(attached),
        "fan_in_fan_out": any(site.transposed for site in sites),
        "modules_to_save": None,
        "inference_mode": True,
        **fields,
    }
    with publish_folder(folder) as temporary:
        save_file(dict(tensors), temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def why_not_whole(attached: Attachment) -> str | None:
    """Why such a folder cannot hold all of an adapter, or PEFT not put it on the model; or None."""
    if attached.copied:
        return "copies of base parameters are trained in addition"
    names = [plain_name(name) for name in attached.sites]
    strange = unreadable(plain_model(attached.model), names)
    return None if strange is None else f"{strange[1]} ({strange[0]})"


def read_folder(
    folder: Path, check: Callable[[Mapping[str, Any]], None]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a folder's configuration says, and its tensors by plain names.

    Args:
        check: raises `InputError` where the configuration says more than is read.

    Raises:
        InputError: a file cannot be read, or by `check`.
    """
    config = read_json(folder / CONFIG)
    try:
        check(config)
    except InputError as error:
        raise error.located(file=folder / CONFIG) from None
    tensors = read_tensors(folder / WEIGHTS)
    return config, {plain_name(key): tensor for key, tensor in tensors.items()}


def check_config(config: Mapping[str, Any], *, name: str, read: Collection[str]) -> None:
    """Make sure that a configuration says nothing but what is read.

    Args:
        name: of the method, for messages.
        read: the keys that are, or say how training started, next to those of every kind.

    Raises:
        InputError: it does, or its rank or layers are none.
    """
    for key, value in config.items():
        off = value is None or value is False or value in ("", [], {})
        if key in _READ or key in read or key in HARMLESS or off:
            continue
        if key == "bias" and value == "none":
            continue
        problem = f"trains more than {name} does, or is not known"
        raise InputError(problem, field=key, value=value)
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise InputError("must be an integer above zero", field="r", value=rank)
    check_names(config)


def of_layers(
    model: nn.Module, tensors: Mapping[str, Tensor], ends: Mapping[str, str], folder: Path
) -> dict[str, tuple[Site, dict[str, Tensor]]]:
    """By the names of layers, each layer and its tensors.

    Args:
        tensors: by plain names, all of them a layer's.
        ends: by what a tensor is called here, how its name there ends.

    Raises:
        InputError: there is none; or one is of no layer of the model, or ends otherwise.
    """
    sites = {PREFIX + plain_name(site.name): site for site in all_sites(model)}
    factors = {end: factor for factor, end in ends.items()}
    found: dict[str, tuple[Site, dict[str, Tensor]]] = {}
    for key, tensor in tensors.items():
        owner, _, leaf = key.rpartition(".")
        if leaf not in factors or owner not in sites:
            problem = "the adapter is for another model, or this is no tensor of such an adapter"
            raise InputError(problem, file=folder / WEIGHTS, value=key.removeprefix(PREFIX))
        site = sites[owner]
        found.setdefault(site.name, (site, {}))[1][factors[leaf]] = tensor
    if not found:
        raise InputError("it has no factors", file=folder / WEIGHTS)
    return found
