"""Whether layers still hold what a merge has put into them, so that it can be undone."""

from __future__ import annotations

import torch
from torch import Tensor

from modicum.adapters import base_weights
from modicum.adapters.attachment import Attachment
from modicum.adapters.merged import Merged
from modicum.adapters.merging_patches import own_entries
from modicum.adapters.patching_layer import PatchingLayer
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part

_SAME = 1e-6  # of a tensor's norm: another adapter that came and went leaves the rounding of sums


def mark(attached: Attachment, merged: Merged) -> None:
    """Note what layers hold now of which a merge keeps what they held before."""
    merged.marks = {name: _sums(attached, merged, name) for name in merged.kept()}


def check_unchanged(attached: Attachment, merged: Merged) -> None:
    """Make sure that putting back what layers held before a merge loses nothing that came later.

    Raises:
        InputError: another adapter was merged into one since, or somebody else has written into it.
    """
    for name, before in merged.marks.items():
        now = _sums(attached, merged, name)
        pairs = zip(now, before, strict=True)
        if any(abs(one - other) > _SAME * size for (one, _), (other, size) in pairs):
            raise InputError(
                "its weight has changed since the adapter was merged into it, and what it was "
                "before that cannot be put back without losing the change; unmerge what was "
                "merged later, in reverse order",
                value=name,
            )


def _sums(attached: Attachment, merged: Merged, name: str) -> list[tuple[float, float]]:
    """Of each tensor that unmerging would replace in a layer its sum and its norm, each with the
    norm: fp64."""
    base = attached.model.get_submodule(name)
    if name in merged.slices:
        return _sums_of(base_weights.read(base, attached.sites[name]))
    found = []
    if name in merged.patches:
        patch = next(layer for site, layer in attached.layers() if site == name)
        assert isinstance(patch, PatchingLayer)
        found = _sums_of(own_entries(base, patch).read())
    keys = {*merged.tensors.get(name, ()), *merged.copied.get(name, ())}
    own = dict(base.named_parameters(recurse=False))
    replaced = own if name in merged.layers else {key: own[key] for key in sorted(keys)}
    each = (_sums_of(own_part(tensor)[0]) for tensor in replaced.values())
    return [*found, *(pair for pairs in each for pair in pairs)]


def _sums_of(tensor: Tensor) -> list[tuple[float, float]]:
    total = float(tensor.detach().sum(dtype=torch.float64))
    if not tensor.is_floating_point():
        return [(total, 0.0)]
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    return [(total, norm), (norm, norm)]
