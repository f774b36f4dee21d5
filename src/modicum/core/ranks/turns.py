"""Work that ranks share name by name: each is done by one of them, and all have what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import WIRE
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks, peer_errors


def by_turns(
    names: Sequence[str],
    make: Callable[[str, Any], Mapping[str, Tensor]],
    ranks: Ranks,
    *,
    read: Callable[[str, bool], Any] = lambda name, mine: None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Of each name what `make` gives, made by one rank and sent to all: so they have the same bits.

    As many names as there are ranks are worked on at a time.

    Args:
        make: `make(name, what was read)`, called by one rank alone.
        read: `read(name, whether this rank makes it)`, called by every rank for every name in the
            same order: what it exchanges with others, it may.

    Raises:
        InputError: a rank's `make` raised it; every rank does then.

    >>> dict(by_turns(["a"], lambda name, _: {"twice": torch.ones(2) * 2}, Ranks()))
    {'a': {'twice': tensor([2., 2.])}}
    """
    for start in range(0, len(names), ranks.size):
        together = names[start : start + ranks.size]
        inputs = [read(name, owner == ranks.rank) for owner, name in enumerate(together)]
        made: dict[str, Tensor] = {}
        error: InputError | None = None
        if ranks.rank < len(together):
            own = together[ranks.rank]
            try:
                found = make(own, inputs[ranks.rank])
                made = {key: value.contiguous() for key, value in found.items()}
            except InputError as raised:
                error = raised
        kinds = [[key, str(t.dtype), list(t.shape), t.device.type] for key, t in made.items()]
        said = ranks.gather({"kinds": kinds, "error": None if error is None else str(error)})
        if error is not None:
            raise error
        for other in said:
            if other["error"] is not None:
                raise InputError(f"another rank has failed: {other['error']}")
        for owner, name in enumerate(together):
            yield name, _sent(made, said[owner]["kinds"], owner, ranks)


def _sent(
    made: dict[str, Tensor], kinds: Sequence[Sequence[Any]], owner: int, ranks: Ranks
) -> dict[str, Tensor]:
    """What one rank made, at every rank."""
    if ranks.alone:
        return made
    found: dict[str, Tensor] = {}
    for key, dtype, shape, device in kinds:
        kind = getattr(torch, dtype.removeprefix("torch."))
        value = made[key] if owner == ranks.rank else torch.empty(shape, dtype=kind, device=device)
        with ranks.clock(WIRE), peer_errors():
            dist.broadcast(value, owner)
        found[key] = value
    return found
