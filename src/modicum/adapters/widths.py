"""Widths of layers: what a method's parts must divide, and which ranks they have room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from modicum.adapters.sites import Site
from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter

_NAMED = 3


def check_divides(field: str, parts: int, widths: Mapping[str, int]) -> None:
    """Make sure that layers can be divided into equal parts.

    Args:
        field: of the method, which says how many.
        widths: of the layers, by name.

    Raises:
        InputError: some cannot; with these layers, and the nearest number that divides them all.

    >>> check_divides("parts", 3, {"up": 12, "down": 18})
    """
    if undivided := {name: width for name, width in widths.items() if width % parts}:
        fits = [
            n for n in range(1, min(widths.values()) + 1) if not any(w % n for w in widths.values())
        ]
        nearest = min(fits, key=lambda n: (abs(n - parts), n))
        named = ", ".join(f"{name} ({width})" for name, width in list(undivided.items())[:3])
        more = f" and {len(undivided) - 3} more" if len(undivided) > 3 else ""
        problem = f"does not divide {named}{more}; the nearest that divides all is"
        raise InputError(f"{problem} {nearest}", field=field, value=parts)


def narrow_layers(method: Adapter, sites: Sequence[Site]) -> dict[str, int]:
    """The layers whose change would have more directions than their matrix, as a LoRA's may.

    Returns:
        The largest rank that fits, by a layer's widths and name.
    """
    rank, found = getattr(method, "rank", None), {}
    for site in sites:
        made = method.factors(site)
        if not isinstance(rank, int) or not {"A", "B"} <= made.keys():
            continue
        (rows, reads), outputs = made["A"].shape, made["B"].shape[0]
        if rows > (most := min(reads, outputs)):
            found[f"{site.name} ({site.in_features} x {site.out_features})"] = rank * most // rows
    return found


def check_rank_fits(method: Adapter, sites: Sequence[Site]) -> None:
    """Make sure that a new adapter's rank fits half of its layers at least.

    A few narrower ones among them, as gates and heads are, have a change of full rank with more
    numbers than it needs, as in PEFT; a plan names them. Files of any rank load.

    Raises:
        InputError: it fits fewer; with the narrow layers and the largest rank that fits them.
    """
    found = narrow_layers(method, sites)
    if 2 * len(found) > len(sites):
        problem = f"above the smaller width of {listed(found)}; the largest rank that fits is"
        rank = getattr(method, "rank", None)
        raise InputError(f"{problem} {min(found.values())}", field="rank", value=rank)


def listed(names: Mapping[str, float]) -> str:
    """The first few of the names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(list(names)[:_NAMED])}{more}"


def linear_only(site: Site, why: str) -> None:
    """Make sure that a layer is no embedding.

    Args:
        why: what makes no sense there.

    Raises:
        InputError: it is one.
    """
    if site.kind == "embedding":
        raise InputError(f"{why}; leave it out with `exclude`", field="targets", value=site.name)


def check_directions(rank: int, there: int, which: str, also: str = "") -> None:
    """Make sure that a matrix has as many directions as are asked for.

    Args:
        there: how many it has.
        which: matrix, in words; `also` what else a user may do, in words that follow "lower it, ".

    Raises:
        InputError: it has fewer.
    """
    if there < rank:
        problem = f"above {there}, the {which}; lower it, {also}or exclude the layer"
        raise InputError(problem, field="rank", value=rank)


def check_rank(rank: int, site: Site, field: str = "rank") -> int:
    """The rank, if a layer's matrix can have as many directions.

    Raises:
        InputError: it is above the layer's smaller width.
    """
    if rank <= (most := min(site.in_features, site.out_features)):
        return rank
    problem = f"above {most}, the smaller width of the layer {site.name}; lower it, or exclude that"
    raise InputError(f"{problem} layer", field=field, value=rank)
