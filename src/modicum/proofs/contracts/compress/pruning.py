"""What pruners keep: the numbers that were there, at places that the plan counts."""

from __future__ import annotations

import copy

import torch

from modicum.compress.pruned_model import PrunedModel
from modicum.compress.unit_pruner import UnitPruner
from modicum.core.errors import InputError
from modicum.core.layers.map import silence
from modicum.models.blocks import Block
from modicum.models.llama import Llama
from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.compress.subjects import (
    CompressSubject,
    assert_close,
    compress_check,
    compressed,
    llama,
    shapes,
    small,
    tokens,
)


@compress_check()
def check_kept_units_are_as_they_were(subject: CompressSubject) -> None:
    """What a pruner keeps has its numbers to the bit, and nothing else of the model changes."""
    for kv_heads in (2, 4):
        full = llama(kv_heads=kv_heads, attention_bias=True, mlp_bias=True)
        handle = _pruned(subject, copy.deepcopy(full))
        assert handle.reduction is not None, "fitting does not say what was kept"
        before = full.state_dict()
        for name, tensor in handle.model.state_dict().items():
            kept = handle.reduction.reduced(name, before[name])
            assert torch.equal(tensor, kept), f"{name} is not what is kept of it"


@compress_check()
def check_removed_units_are_as_if_silenced(subject: CompressSubject) -> None:
    """The small model computes what the full one does with the removed units at zero, to 1e-5."""
    for kv_heads in (2, 4):
        full = llama(kv_heads=kv_heads, attention_bias=True, mlp_bias=True)
        handle = _pruned(subject, copy.deepcopy(full))
        assert handle.reduction is not None
        dense = full(tokens())
        for part in handle.reduction.parts:
            silence(full, part.units, part.removed)
        small_outputs = handle.model(tokens())
        assert_close(small_outputs, full(tokens()), 1e-5, "removed units leave something behind")
        assert not torch.allclose(small_outputs, dense), "what was removed did nothing"


@compress_check()
def check_units_part(subject: CompressSubject) -> None:
    """Kept and removed units part all that there are, and are as many as the plan says."""
    handle = _pruned(subject, llama())
    assert handle.reduction is not None
    counts = {(part.units.name, part.units.kind): part.keep for part in handle.parts}
    for part in handle.reduction.parts:
        both = sorted((*part.kept, *part.removed))
        assert both == list(range(part.units.count)), f"{part.units.name}: {both}"
        planned = counts[part.units.name, part.units.kind]
        assert len(part.kept) == planned, f"{part.units.name} keeps {len(part.kept)}, not {planned}"
    model = handle.model
    assert isinstance(model, Llama)
    for name, block in zip(model.config.block_prefixes(), model.blocks, strict=True):
        assert isinstance(block, Block)
        own = handle.plan.block(name.removesuffix(".")).widths
        there = {key: value for key, value in block.widths().items() if key in own}
        assert there == own, f"{name} has {there}, the plan says {own}"


@compress_check()
def check_blocks_at_the_ends_stay(subject: CompressSubject) -> None:
    """Blocks left out at the model's ends keep their shapes; to leave out all is refused."""
    full = shapes(llama())
    for fields, stays in (({"first_blocks": 1}, "layers.0."), ({"last_blocks": 1}, "layers.1.")):
        handle = _pruned(subject, llama(), **fields)
        changed = {name for name, shape in shapes(handle.model).items() if shape != full[name]}
        assert changed, "nothing has become smaller"
        assert not any(stays in name for name in changed), f"{fields} did not keep {stays}"
    wrongs: tuple[dict[str, object], ...] = ({"first_blocks": 2}, {"neurons": 0.0, "groups": 0.0})
    for wrong in wrongs:
        try:
            small(subject, **wrong).plan(llama("meta"))
        except InputError:
            continue
        raise AssertionError(f"{wrong} was not refused")


@compress_check()
def check_more_is_removed_at_a_larger_share(subject: CompressSubject) -> None:
    """As more neurons go, what stays at a larger share is a part of what stays at a smaller one."""
    kept: list[set[int]] = []
    for share in (0.25, 0.5, 0.75):
        handle = _pruned(subject, llama(), neurons=share, groups=0.0, multiple=1)
        assert handle.reduction is not None
        kept.append(set(handle.reduction.parts[0].kept))
    assert kept[0] > kept[1] > kept[2], f"{[len(each) for each in kept]} neurons stay"


def _pruned(subject: CompressSubject, model: torch.nn.Module, **fields: object) -> PrunedModel:
    if not isinstance(small(subject), UnitPruner):
        raise NotApplicable("the method takes no units out of blocks")
    value = small(subject, **fields)
    handle = compressed(value, model)
    assert isinstance(handle, PrunedModel)
    return handle
