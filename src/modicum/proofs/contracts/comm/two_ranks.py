"""A value of a method at two ranks, which are started once for all checks of a kind."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any, TypeVar

from modicum.core.contracts.catalog import of_value, read_file
from modicum.core.contracts.method import Method
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.ranks import at_ranks

RankFinding = dict[str, Any]
M = TypeVar("M", bound=Method)


def on_two_ranks(look: Callable[[Ranks, M], RankFinding], value: M) -> list[RankFinding]:
    """What `look`, a function of some module, finds at each of two ranks; asked again, the same."""
    record = of_value(value)
    told = {
        "look": [look.__module__, look.__name__],
        "file": str(record.file),
        "module": record.module,
        "kind": record.class_name,
        "fields": value.model_dump(),
    }
    return _found(json.dumps(told))


@functools.lru_cache(maxsize=16)
def _found(told: str) -> list[RankFinding]:
    return at_ranks(f"{__name__}:call", 2, json.loads(told))


def call(
    ranks: Ranks,
    *,
    look: tuple[str, str],
    file: str,
    module: str | None,
    kind: str,
    fields: dict[str, Any],
) -> RankFinding:
    """At a rank: the method of that class in that file, with these fields, looked at."""
    (record,) = (each for each in read_file(file, module=module) if each.class_name == kind)
    there, name = look
    finding: RankFinding = getattr(importlib.import_module(there), name)(
        ranks, record.load()(**fields)
    )
    return finding
