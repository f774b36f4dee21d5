"""Whether all ranks are about to exchange the same, asked where an exchange begins.

The trainer compares recipes. In a loop of one's own nobody does, and a rank with another exchange
or another model would not fail: what it sends has some other meaning at the ranks that receive it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.environment import met_store
from modicum.core.ranks.ranks import Ranks

_NAMED = 3


def same_terms(ranks: Ranks, what: str, terms: Mapping[str, Any]) -> None:
    """Make sure that every rank has rank 0's terms; all ranks call this.

    They are compared through the store by which ranks met, so the backend does not matter: first
    by digests, and only where these differ by what they are of.

    Args:
        what: the terms are of, for people.
        terms: of JSON.

    Raises:
        InputError: one has not; with what differs, on every rank.

    >>> same_terms(Ranks(), "exchange", {"rank": 4})
    """
    if ranks.alone:
        return
    store = met_store()
    turn = store.add(f"terms of {ranks.rank}", 1)
    asked = dist.PrefixStore(f"terms/{turn}", store)
    said = json.dumps([what, dict(terms)])
    if len(set(_of_all(asked, ranks, "digest", hashlib.sha256(said.encode()).hexdigest()))) == 1:
        return
    everybody = [json.loads(other) for other in _of_all(asked, ranks, "terms", said)]
    first, theirs = everybody[0]
    for rank, (other, its) in enumerate(everybody):
        if other != first:
            raise InputError(f"rank {rank} is about to compare its {other}, and rank 0 its {first}")
        if its != theirs:
            difference = differing(theirs, its)
            raise InputError(f"rank {rank} has another {what} than rank 0: {difference}")


def same_model(ranks: Ranks, model: nn.Module) -> None:
    """Make sure that every rank trains parameters of rank 0's names, shapes and dtypes, in order.

    Raises:
        InputError: one does not; with the first that differ, on every rank.
    """
    same_terms(ranks, "model", shape_terms(trainable(model)))


def shape_terms(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Terms of these parameters, by name: dtypes, shapes, and their order.

    >>> shape_terms([("weight", nn.Linear(2, 3).weight)])
    {'weight': 'float32 [3, 2], number 0'}
    """
    return {
        name: f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}, "
        f"number {number}"
        for number, (name, parameter) in enumerate(parameters)
    }


def differing(
    one: Mapping[str, Any], other: Mapping[str, Any], there: str = "there", here: str = "here"
) -> str:
    """What two ranks, or times, do not have alike.

    >>> differing({"rank": 4, "seed": 0}, {"rank": 8, "seed": 0})
    'rank is 4 there and 8 here'
    """
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    said = [f"{n} is {_value(one, n)} {there} and {_value(other, n)} {here}" for n in names]
    more = [f"{len(said) - _NAMED} more differ"] if len(said) > _NAMED else []
    return "; ".join([*said[:_NAMED], *more])


def _value(terms: Mapping[str, Any], name: str) -> Any:
    return terms.get(name, "not")


def _of_all(store: dist.Store, ranks: Ranks, what: str, own: str) -> list[str]:
    """What every rank says, in their order; all ranks ask."""
    store.set(f"{what} {ranks.rank}", own)
    return [store.get(f"{what} {rank}").decode() for rank in range(ranks.size)]
