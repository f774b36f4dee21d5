"""Training that starts from an adapter which is there already, ours or PEFT's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.adapter_layer import check_state
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.adapters.names import exactly, plain_name
from modicum.adapters.native_files import StoredAdapter, taken_as
from modicum.adapters.sites import slices_at
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part

# What may be another when training continues: it is no part of what the adapter computes.
_FREE = ("dropout",)
_WHERE = ("targets", "exclude")
_ALSO = "also"


def fields_of(
    stored: StoredAdapter, model: nn.Module, asked: Adapter, said: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of an adapter that continues a stored one: its own, but for what may be another.

    Args:
        model: the base model, on meta or not, without the adapter; afterwards it has one.
        asked: the value that was asked for, with defaults.
        said: the fields that somebody has stated.

    Raises:
        InputError: the stored adapter is of another method, of other sizes or of other layers than
            was asked for; does not fit the model; or cannot be continued.
    """
    _check_kind(stored)
    stored = taken_as(stored, type(asked))
    own = stored.method
    for field in said:
        if field in (*_FREE, *_WHERE, _ALSO) or getattr(asked, field) == getattr(own, field):
            continue
        raise InputError(
            "the adapter that training starts from has another; leave it out, or give that",
            field=field,
            value=getattr(asked, field),
            allowed=str(getattr(own, field)),
        )
    sites = [*own.candidates(model), *slices_at(model, own.targets)]
    known = {plain_name(site.name): site.name for site in sites}
    strange = next((name for name in own.targets if plain_name(name) not in known), None)
    if strange is not None:
        problem = "is for another model: this one has no such layer"
        raise InputError(problem, file=stored.file, value=strange)
    names = {known[plain_name(name)] for name in own.targets}
    where = {field: said[field] for field in (*_WHERE, _ALSO) if field in said}
    if _ALSO in said and asked.copied(model) != own.copied(model):
        problem = "the adapter that training starts from has copies of others; leave this out"
        raise InputError(problem, field=_ALSO)
    asked = asked.with_fields(also=own.also)
    stated = set(where) & set(_WHERE)
    places = _asked_places(asked, model, names) if stated else _places(own, model, names)
    value = own.with_fields(**places)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is left out, which is said when it is attached
        try:
            _matching(value.attach(model), stored)
        except InputError as error:
            raise InputError(f"does not fit the model: {error}", file=stored.file) from None
    free = {field: said[field] for field in _FREE if field in said}
    return own.model_dump(mode="json") | places | where | free


def start_from(
    attached: AttachedAdapter,
    stored: StoredAdapter,
    *,
    weights: Callable[[str], Tensor] | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Give an adapter that was attached on meta the stored one's tensors; it may be sharded.

    Args:
        weights: as of `AttachedAdapter.initialise`.

    Raises:
        InputError: they are not this adapter's.
    """
    state = _matching(attached, taken_as(stored, type(attached.method)))
    kept = {attached.model_name(key): tensor for key, tensor in state.items()}
    attached.initialise(weights=weights, kept=kept, ranks=ranks)
    with torch.no_grad():
        for name, tensor in attached.state_dict().items():
            part, before = own_part(tensor)
            rows = slice(before, before + len(part)) if part.ndim else ...
            part.copy_(state[name][rows])


def _check_kind(stored: StoredAdapter) -> None:
    name = stored.method.info.name
    if stored.base:
        raise InputError(
            "it keeps a quantized base that it has rewritten, so it cannot be started from; train "
            "from the run that made it (--fork)",
            file=stored.file,
        )
    if any(stored.prepared.values()) and "prepares_from_data" not in stored.method.traits:
        raise InputError(
            "its layers have ranks of their own, and an adapter that training starts from has one; "
            "merge it into the model, and train from there",
            file=stored.file,
        )
    if "prepares_from_data" in stored.method.traits:
        raise InputError(f"{name} begins by looking at data, not from a folder", file=stored.file)


def _matching(attached: AttachedAdapter, stored: StoredAdapter) -> dict[str, Tensor]:
    """The stored tensors by this adapter's names.

    Raises:
        InputError: names or shapes are others.
    """
    own = {plain_name(key): key for key in attached.state_dict()}
    state = {own.get(key, key): tensor for key, tensor in stored.state.items()}
    check_state(attached.state_dict(), state)
    return state


def _asked_places(asked: Adapter, model: nn.Module, names: set[str]) -> dict[str, Any]:
    """Where the adapter was asked to be, which must be where it is."""
    apart = sorted({site.name for site in asked.sites(model)} ^ names)
    if apart:
        problem = "the adapter that training starts from is on other layers; leave this out"
        raise InputError(f"{problem} (they differ in {apart[0]})", field="targets")
    return {field: list(getattr(asked, field)) for field in _WHERE}


def _places(own: Adapter, model: nn.Module, names: set[str]) -> dict[str, Any]:
    """The shortest targets that mean just these layers."""
    last = sorted({name.rpartition(".")[2] for name in names})
    for targets in (["all-linear"], last):
        places = {"targets": targets, "exclude": []}
        try:
            if {site.name for site in own.with_fields(**places).sites(model)} == names:
                return places
        except InputError:  # such targets would name layers that take no adapter
            continue
    found = exactly((site.name for site in own.candidates(model)), sorted(names))
    return {field: list(value) for field, value in found.items()}
