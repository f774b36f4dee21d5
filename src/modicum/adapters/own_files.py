"""Adapters as modicum keeps them: a JSON that says which, and their own tensors in safetensors.

Every method can be kept so. Where a method has rewritten a quantized base, the base's tensors are
kept too, since the original weight, which could be rewritten again, is not there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters.base import Adapter, check_state
from modicum.adapters.names import exactly, plain_name
from modicum.adapters.rewriting import restore, rewriting
from modicum.adapters.sites import all_sites
from modicum.adapters.wearing import undone_on_failure
from modicum.adapters.weights import is_exact
from modicum.core import files
from modicum.core.catalog import find
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, write_json
from modicum.core.method import Strings
from modicum.core.sharding import own_part, whole

if TYPE_CHECKING:
    from modicum.adapters.attached import AttachedAdapter

CONFIG, WEIGHTS = "modicum_adapter.json", "adapter.safetensors"
_BASE = "base:"  # before the names of a base layer's tensors


def save(
    attached: AttachedAdapter, folder: Path, *, base_model: str | None, write: bool = True
) -> None:
    """Write the adapter, whole or not at all; without `write`, help only."""
    tensors = {plain_name(key): value for key, value in attached.state_dict().items()}
    for name, layer in rewriting(attached).items():
        base = attached.model.get_submodule(name)
        if layer.rewrote and not is_exact(base):
            named = {
                plain_name(f"{name}.{key}"): p for key, p in base.named_parameters(recurse=False)
            }
            tensors |= {f"{_BASE}{key}": p for key, p in named.items()}
    gathered = {key: whole(value.detach()).contiguous().cpu() for key, value in tensors.items()}
    if not write:
        return
    targets = [plain_name(name) for name in attached.sites]
    config = {
        "method": attached.method.info.name,
        "fields": attached.method.model_dump() | {"targets": targets, "exclude": []},
        "seed": attached.seed,
        "base_model": base_model,
    }
    with publish_folder(folder) as temporary:
        save_file(gathered, temporary / WEIGHTS, metadata={"format": "pt"})
        write_json(temporary / CONFIG, config)


def load(
    model: nn.Module, folder: Path, *, name: str, plugins: Iterable[str | Path] = ()
) -> AttachedAdapter:
    """Attach the adapter that a folder of modicum's holds; errors are those of `files.load`."""
    config, tensors = read_json(folder / CONFIG), read_tensors(folder / WEIGHTS)
    value = described(config, plugins, folder / CONFIG)
    try:
        seed = int(config["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"does not describe an adapter: {error!r}", file=folder / CONFIG) from None
    base = {key.removeprefix(_BASE): t for key, t in tensors.items() if key.startswith(_BASE)}
    state = {key: t for key, t in tensors.items() if not key.startswith(_BASE)}
    return attached_with(model, value, state, base, name=name, seed=seed, file=folder / WEIGHTS)


def described(config: Mapping[str, Any], plugins: Iterable[str | Path], file: Path) -> Adapter:
    """The value that a description names: a method and its fields.

    Raises:
        InputError: there is no such method, or it has no such fields.
    """
    try:
        value = find(config["method"], plugins, room="adapters").load()(**config["fields"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"does not describe an adapter: {error!r}", file=file) from None
    except InputError as error:
        raise error.located(file=file) from None
    assert isinstance(value, Adapter)
    return value


def attached_with(
    model: nn.Module,
    value: Adapter,
    state: dict[str, Tensor],
    base: dict[str, Tensor],
    *,
    name: str,
    seed: int,
    file: Path,
) -> AttachedAdapter:
    """Attach an adapter to the layers that its targets name in full, with these tensors.

    Raises:
        InputError: they are not this adapter's, or it does not fit the model.
    """
    from modicum.adapters.attached import AttachedAdapter

    try:
        value = value.with_fields(**_exactly_named(model, value.targets))
        with undone_on_failure(model, name):
            attached = AttachedAdapter(model, value, name=name, seed=seed, start=False)
            try:
                _put(attached, state, base)
            except BaseException:
                restore(attached)
                raise
    except InputError as error:
        raise InputError(f"does not fit the model: {error}", file=file) from None
    return attached


def _put(attached: AttachedAdapter, state: dict[str, Tensor], base: dict[str, Tensor]) -> None:
    """The adapter's tensors into it; the base is rewritten by them, or is what the folder holds."""
    own = {plain_name(key): key for key in attached.state_dict()}
    state = {own.get(key, key): tensor for key, tensor in state.items()}
    check_state(attached.state_dict(), state)
    kept = {attached.model_name(key): tensor for key, tensor in state.items()}
    if not base:
        attached.initialise(kept=kept)
    else:
        layers = rewriting(attached)
        held = {
            plain_name(f"{name}.{key}"): parameter
            for name in layers
            if not is_exact(attached.model.get_submodule(name))
            for key, parameter in attached.model.get_submodule(name).named_parameters(recurse=False)
        }
        if held.keys() != base.keys() or any(held[k].shape != t.shape for k, t in base.items()):
            raise InputError("its base is quantized, and the model's weights are kept otherwise")
        for key, parameter in held.items():
            part, before = own_part(parameter.detach())
            part.copy_(base[key][before : before + part.shape[0]])
        for name, layer in layers.items():
            layer.put({key: state[f"{name}.{key}"] for key, _ in layer.named_buffers()})
            layer.rewrote = True
    attached.load_state_dict(state)


def _exactly_named(model: nn.Module, names: Strings) -> dict[str, Strings]:
    """The fields that choose the layers of these plain names, as the model calls them."""
    sites = {plain_name(site.name): site.name for site in all_sites(model)}
    return exactly(model, [sites.get(plain_name(name), name) for name in names])


def base_model_of(folder: str | Path) -> str | None:
    """What a folder with an adapter, in either format, says of the model that it is for.

    Raises:
        InputError: there is no adapter in the folder.
    """
    path = Path(folder)
    own = (path / CONFIG).exists()
    config = read_json(path / (CONFIG if own else "adapter_config.json"))
    found = config.get("base_model" if own else "base_model_name_or_path")
    return None if found is None else str(found)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of an adapter's folder.

    Raises:
        InputError: it is missing, cannot be read, or is no JSON object.
    """
    if not os.path.lexists(path):
        raise InputError(f"not an adapter: no {path.name} in this folder", file=path.parent)
    content = files.read_json(path)
    if not isinstance(content, dict):
        raise InputError("this is no JSON object", file=path)
    return content


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of an adapter's folder.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    if not os.path.lexists(path):
        raise InputError("the adapter's weights are missing", file=path)
    if not path.is_file():
        raise InputError("this is no regular file", file=path)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", file=path) from None
