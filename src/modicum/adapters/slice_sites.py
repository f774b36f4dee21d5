"""Which slices of fused layers a model has, by its map, and which of them names choose.

Slices have the names that the separate layers have in other models: `q_proj`, `k_proj`, `v_proj`,
`gate_proj` and `up_proj`, after the fused layer's; `q` is short for `q_proj`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from modicum.adapters.maps import mapped_parts
from modicum.adapters.slices import layer_name
from modicum.core.errors import InputError
from modicum.core.layers.layer_sites import Site, Survey
from modicum.core.layers.map import MappedSlice
from modicum.core.layers.targets import named

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter

# Of an attention and of an MLP in the map, by the name of the slice.
_PARTS = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "gate_proj": "gate",
    "up_proj": "up",
}
_SHORT = {name.removesuffix("_proj"): name for name in _PARTS}
Found = dict[str, tuple[int, dict[str, MappedSlice]]]


def may_name_a_slice(target: str) -> bool:
    """Whether a target ends as names of slices do.

    >>> may_name_a_slice("h.0.attn.c_attn.q"), may_name_a_slice("c_attn")
    (True, False)
    """
    last = target.rpartition(".")[2]
    return last in _PARTS or last in _SHORT


def names_slice(target: str, name: str) -> bool:
    """Whether a target chooses a slice by its name, in full or short.

    >>> names_slice("attn.c_attn.q", "h.0.attn.c_attn.q_proj"), names_slice("q", "h.0.q.v_proj")
    (True, False)
    """
    path, dot, last = target.rpartition(".")
    return named(name, [f"{path}{dot}{_SHORT.get(last, last)}"])


def slices_of(model: nn.Module, found: Survey) -> dict[str, Site]:
    """The slices of fused linear layers that a model has, by name; none where it has no map.

    Args:
        found: the layers of the model. Those of other sizes than its configuration says have none.
    """
    sites: dict[str, Site] = {}
    for layer, (outputs, parts) in _mapped(model).items():
        site = found.sites.get(layer)
        if site is None or site.kind != "linear" or site.out_features != outputs:
            continue
        for last, rows in parts.items():
            name, width = f"{layer}.{last}", rows.length
            sites[name] = replace(
                site, name=name, out_features=width, rows=rows, names=(), dense=False
            )
    return sites


def _mapped(model: nn.Module) -> Found:
    """By layer, how many outputs it has, and by their last names the slices of these in the map."""
    found: Found = {}
    for part in mapped_parts(model):
        parts = [*part.map.all_attentions(), *part.map.all_mlps()]
        for last, field in _PARTS.items():
            for piece in (p for each in parts for p in getattr(each, field, ())):
                layer, _, leaf = piece.tensor.rpartition(".")
                site = part.layers.get(layer)
                if site is None or leaf != "weight" or piece.dim != int(site.transposed):
                    continue
                if piece.length < site.out_features:
                    known = found.setdefault(part.name(layer), (site.out_features, {}))[1]
                    known.setdefault(last, replace(piece, tensor="weight", dim=0))
    return found


def choose_slices(
    model: nn.Module, found: Survey, targets: Sequence[str], exclude: Sequence[str] = ()
) -> tuple[list[str], dict[str, Site]]:
    """The targets that are for layers, and the slices that the others name, by name.

    A target that names a layer never means a slice.

    Raises:
        InputError: a target names no layer, and none of the slices that there are; or all that are
            named are excluded.

    >>> choose_slices(nn.Linear(2, 2), Survey({}, {}), ["c_attn"])
    (['c_attn'], {})
    """
    asked = [
        target
        for target in targets
        if may_name_a_slice(target) and not any(named(name, [target]) for name in found.every)
    ]
    known = slices_of(model, found) if asked else {}
    if not known:
        return list(targets), {}
    chosen = {n: s for n, s in known.items() if any(names_slice(t, n) for t in asked)}
    for target in asked:
        if not any(names_slice(target, name) for name in chosen):
            names = sorted({name.rpartition(".")[2] for name in [*found.every, *known]})
            raise InputError(
                "no layer of the model, and no slice of a fused one, has this name",
                field="targets",
                value=target,
                allowed=", ".join(names),
                candidates=names,
            )
    kept = {
        name: site
        for name, site in chosen.items()
        if not any(names_slice(p, name) or named(layer_name(site), [p]) for p in exclude)
    }
    others = [target for target in targets if target not in asked]
    if not kept and not others:
        raise InputError("every slice that `targets` names is excluded again", field="exclude")
    return others, kept


def check_takes_slices(method: Adapter, sites: Sequence[Site]) -> None:
    """Make sure that a method can be on slices, and that none is of a layer that it is on too.

    Raises:
        InputError: it cannot, or one is.
    """
    slices = {site.name: site for site in sites if site.rows is not None}
    layers = {site.name for site in sites}
    for name, site in slices.items():
        if (why := _why_not(method.traits)) is not None:
            raise InputError(
                f"{method.info.name} {why}, and a slice of a fused layer has none of its own; name "
                f"the layer, {layer_name(site)}, or take LoRA",
                field="targets",
                value=name,
            )
        if layer_name(site) in layers:
            problem = "`targets` names this slice and the layer that it is of; leave one out"
            raise InputError(problem, field="targets", value=name)


def _why_not(traits: Collection[str]) -> str | None:
    if "reads_base" in traits:
        return "computes its change with the output of the layer that it is on"
    if "rewrites_base" in traits:
        return "takes a part out of the layer's weight"
    if "writes_base" in traits:
        return "writes into the layer's own weight"
    if "prepares_from_data" in traits:
        return "looks at the inputs and gradients of the layer that it is on"
    return None
