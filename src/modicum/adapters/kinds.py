"""Layers of one kind, over all blocks: those that may share tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from modicum.adapters.names import plain_name
from modicum.adapters.sites import Site


@functools.lru_cache(maxsize=4096)
def pool_names(site: Site) -> tuple[str, str]:
    """The names of what layers of this one's kind share for their A and for their B.

    A kind is one last name, where numbers are no names, and one shape.

    >>> pool_names(Site("blocks.3.q_proj", "linear", 16, 8))
    ('q_proj_8x16_A', 'q_proj_8x16_B')
    """
    named = (part for part in reversed(plain_name(site.name).split(".")) if not part.isdigit())
    kind = f"{next(named, 'layer')}_{site.out_features}x{site.in_features}"
    return f"{kind}_A", f"{kind}_B"


def peers(site: Site, sites: Sequence[Site]) -> list[Site]:
    """The layers of the same kind as this one, itself among them, in the model's order."""
    own = pool_names(site)
    return [other for other in sites if pool_names(other) == own]
