"""Blocks and modules in them as sites: where adapters change what these give, not a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from modicum.adapters.sites import Site, survey
from modicum.core.errors import InputError
from modicum.core.layers.block_kinds import outermost_lists
from modicum.core.layers.plain_layers import plain_type
from modicum.core.layers.targets import named
from modicum.core.layers.wiring import BlockWires

ALL_BLOCKS = "all-blocks"
ALL_BRANCHES = "all-branches"


def block_sites(model: nn.Module) -> list[Site]:
    """Every block of a model: the modules of its outermost lists, where these are alike.

    `in_features` and `out_features` of a block are the width of the residual stream, as the block's
    first norm has it.

    >>> norm = lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    >>> [(site.name, site.out_features) for site in block_sites(nn.ModuleList([norm(), norm()]))]
    [('0', 4), ('1', 4)]
    """
    sites: list[Site] = []
    for name, module in outermost_lists(model).items():
        kinds = {plain_type(block) for block in module.children()}
        if len(kinds) != 1 or not any(True for _ in module.parameters()):
            continue
        for index, block in module.named_children():
            if (norm := first_norm(block)) is not None:
                own = f"{name}.{index}".lstrip(".")
                sites.append(Site(own, "block", norm[1], norm[1], dtype=_dtype(block)))
    return sites


def first_norm(block: nn.Module) -> tuple[str, int] | None:
    """The name in a block of its first norm, and the width of what that reads; None: it has none.

    >>> first_norm(nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 8)}))
    ('norm', 4)
    """
    for name, module in block.named_modules():
        weight = module._parameters.get("weight")
        if "norm" in type(module).__name__.lower() and weight is not None and weight.ndim == 1:
            return name, weight.shape[0]
    return None


def module_sites(model: nn.Module) -> list[Site]:
    """The modules in blocks that may map the stream's width to itself: mixers, MLPs.

    Such a module has a linear layer that reads as many features, and one that gives as many; that
    it does give as many is seen when it runs.

    >>> block = lambda: nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.Sequential(
    ...     nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))})
    >>> [site.name for site in module_sites(nn.ModuleList([block(), block()]))]
    ['0.mlp', '1.mlp']
    """
    sites: list[Site] = []
    for site in block_sites(model):
        block = model.get_submodule(site.name)
        layers = survey(block, ["linear"]).every
        for name, module in block.named_modules():
            lists = isinstance(module, nn.ModuleList | nn.ModuleDict)
            if not name or lists or "layers_by_adapter" in name.split("."):
                continue
            inside = [each for path, each in layers.items() if path.startswith(f"{name}.")]
            reads = any(each.in_features == site.in_features for each in inside)
            if reads and any(each.out_features == site.out_features for each in inside):
                sites.append(replace(site, name=f"{site.name}.{name}"))
    return sites


def branch_sites(model: nn.Module) -> list[Site]:
    """The modules of each block whose output is added to the residual stream: mixers, MLPs.

    Those are the outermost `module_sites` without a norm of the stream's width, since what holds
    one may add its residual itself.

    Raises:
        InputError: a linear layer of a block is in none of them, so where they end is not known.

    >>> block = lambda: nn.ModuleDict({"norm": nn.LayerNorm(4), "mlp": nn.Sequential(
    ...     nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))})
    >>> [site.name for site in branch_sites(nn.ModuleList([block(), block()]))]
    ['0.mlp', '1.mlp']
    """
    found: list[Site] = []
    for site in module_sites(model):
        norm = first_norm(model.get_submodule(site.name))
        inside = any(site.name.startswith(f"{other.name}.") for other in found)
        if not inside and (norm is None or norm[1] != site.in_features):
            found.append(site)
    for block in block_sites(model):
        for name in survey(model.get_submodule(block.name), ["linear"]).every:
            path = f"{block.name}.{name}"
            if not any(path.startswith(f"{branch.name}.") for branch in found):
                raise InputError(
                    f"{path} is in no module that surely ends where its block adds to the residual "
                    f"stream, so `{ALL_BRANCHES}` is not known here; name the modules",
                    field="targets",
                    value=ALL_BRANCHES,
                )
    return found


def choose_blocks(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()
) -> list[Site]:
    """The blocks, or modules in them, that `targets` name.

    A target is a full name, its last parts, a pattern, `all-blocks`, or `all-branches`
    (`branch_sites`); one that is a block's name means no module in it.

    Raises:
        InputError: the model has no blocks with a norm; a target matches none; none is left; or
            several streams run through a block.
    """
    blocks, modules = block_sites(model), module_sites(model)
    if not blocks:
        problem = "the model has no list of blocks with a norm each, after which this could work"
        raise InputError(problem, field="targets")
    chosen: set[str] = set()
    for target in targets:
        if target == ALL_BRANCHES:
            chosen |= {site.name for site in branch_sites(model)}
            continue
        found = [site.name for site in blocks if target == ALL_BLOCKS or named(site.name, [target])]
        found = found or [site.name for site in modules if named(site.name, [target])]
        if not found:
            names = [
                ALL_BLOCKS,
                ALL_BRANCHES,
                *(s.name for s in blocks),
                *sorted({s.suffix for s in modules}),
            ]
            raise InputError(
                "no block of the model, and no module in one that is as wide, has this name",
                field="targets",
                value=target,
                allowed=", ".join(names),
                candidates=names,
            )
        chosen |= {*found}
    kept = [s for s in (*blocks, *modules) if s.name in chosen and not named(s.name, exclude)]
    if not kept:
        raise InputError("every block that `targets` names is excluded again", field="exclude")
    for site in kept:
        wires = getattr(model.get_submodule(site.name), "wires", None)
        if isinstance(wires, BlockWires) and wires.several:
            problem = (
                "several streams run through this block, since branches leave others out, and what "
                "works after a block changes one"
            )
            raise InputError(problem, field="targets", value=site.name)
    return kept


def _dtype(block: nn.Module) -> torch.dtype:
    wide = any(parameter.dtype == torch.float64 for parameter in block.parameters())
    return torch.float64 if wide else torch.float32
