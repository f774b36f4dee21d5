"""SHiRA as PEFT keeps it: `peft_type: SHIRA`, both ways.

A mask there is the rows and columns of its entries, in the file, whatever chose them: PEFT draws a
mask from a seed and then takes that of the file in its place. Its layers are `nn.Linear` alone.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.adapters.attachment import Attachment
from modicum.adapters.names import plain_name
from modicum.adapters.native_files import StoredAdapter
from modicum.adapters.patch_places import check_indices
from modicum.adapters.patching_layer import INDICES, VALUES, Patching, PatchingLayer
from modicum.adapters.peft_copies import PREFIX, as_kept
from modicum.adapters.peft_files import CONFIG, WEIGHTS, check_choice
from modicum.adapters.peft_folders import (
    check_config,
    of_layers,
    read_folder,
    why_not_whole,
    write_folder,
)
from modicum.adapters.shira import SHiRA
from modicum.adapters.sites import Site
from modicum.core.errors import InputError

PEFT_TYPE = "SHIRA"
_ENDS = {VALUES: "shira_weight", INDICES: "shira_indices"}
_READ = ("init_weights", "mask_type", "random_seed")


def save(attached: Attachment, folder: Path, *, base_model: str | None, write: bool = True) -> None:
    """Write the adapter as a PEFT SHiRA folder atomically; without `write`, help only.

    Raises:
        InputError: PEFT could not read it on this model.
    """
    if (why := why_not(attached)) is not None:
        raise InputError(f'{why}; use form="modicum", or merge it and save the model')
    tensors: dict[str, Tensor] = {}
    for name, layer in attached.layers():
        assert isinstance(layer, PatchingLayer)
        key = PREFIX + plain_name(name)
        tensors[f"{key}.{_ENDS[VALUES]}"] = as_kept(layer.values)
        places = torch.stack(layer.places().rows_and_columns())
        tensors[f"{key}.{_ENDS[INDICES]}"] = places.int().contiguous().cpu()
    if write:
        rank = attached.method.model_dump()["rank"]
        kind = {"peft_type": PEFT_TYPE, "mask_type": "random", "random_seed": None}
        write_folder(attached, folder, tensors, base_model=base_model, r=rank, **kind)


def why_not(attached: Attachment) -> str | None:
    """Why PEFT's format cannot hold an adapter; None: it holds it exactly."""
    if not isinstance(attached.method, Patching):
        return f"{attached.method.info.name} is no patch of entries"
    strange = next((site.name for site in attached.sites.values() if site.transposed), None)
    if strange is not None:
        return f"PEFT has SHiRA on nn.Linear alone, and {plain_name(strange)} is none"
    return why_not_whole(attached)


def read(folder: Path, model: nn.Module) -> StoredAdapter:
    """The adapter of a PEFT SHiRA folder, for a model; errors are those of `files.load`."""
    config, tensors = read_folder(folder, lambda c: check_config(c, name="SHiRA", read=_READ))
    chosen = of_layers(model, tensors, _ENDS, folder)
    state: dict[str, Tensor] = {}
    for site, own in chosen.values():
        try:
            flat = _flat(own.get(INDICES), site)
        except InputError as error:
            raise error.located(file=folder / WEIGHTS) from None
        state[f"{plain_name(site.name)}.{INDICES}"] = flat
        if VALUES in own:
            state[f"{plain_name(site.name)}.{VALUES}"] = own[VALUES]
    check_choice(model, config, tuple(chosen), folder / CONFIG, start="init_weights")
    targets = tuple(plain_name(name) for name in chosen)
    value = SHiRA(rank=int(config["r"]), mask="stored", targets=targets)
    return StoredAdapter(value, state, folder / WEIGHTS)


def _flat(places: Tensor | None, site: Site) -> Tensor:
    """Rows and columns [2, k] as places row x in + column, int32.

    Raises:
        InputError: they are none of the weight, or not in ascending order.
    """
    name = plain_name(site.name)
    if places is None:
        raise InputError("it lacks the indices of a layer", field=_ENDS[INDICES], value=name)
    if places.ndim != 2 or len(places) != 2 or places.is_complex():
        problem = "the indices are no rows and columns, [2, k]"
        raise InputError(problem, field=_ENDS[INDICES], value=name)
    # On Windows PEFT writes them as floating-point numbers.
    real = places.is_floating_point()
    numbers = places.double().nan_to_num(-1.0).long() if real else places.long()
    if real and not torch.equal(numbers.double(), places.double()):
        problem = "the indices are no integers"
        raise InputError(problem, field=_ENDS[INDICES], value=name)
    for each, limit in zip(numbers, (site.out_features, site.in_features), strict=True):
        check_indices(each.unique(), limit, field=_ENDS[INDICES], name=name)
    flat = numbers[0] * site.in_features + numbers[1]
    check_indices(flat, site.elements, field=_ENDS[INDICES], name=name)
    return flat.int()
