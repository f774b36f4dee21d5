"""What the environment says of ranks, in torchrun's variables; read and checked without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import Store

_WHERE = "the environment"
_START = "start ranks with `--ranks N` or torchrun, which set it"
_hosts: ContextVar[int] = ContextVar("hosts", default=1)


def rank_and_size(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """This process's rank and how many there are: 0 and 1 where no ranks are named.

    Raises:
        InputError: one of the two is missing or no integer, or there is no such rank.

    >>> rank_and_size({"RANK": "1", "WORLD_SIZE": "2"}), rank_and_size({})
    ((1, 2), (0, 1))
    """
    if "RANK" not in environment and environment.get("WORLD_SIZE", "1") == "1":
        return 0, 1
    size = _number(environment, "WORLD_SIZE", least=1)
    return _number(environment, "RANK", below=size), size


def local_rank_and_size(size: int, environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """The same among the ranks on this host, of `size` in all.

    Raises:
        InputError: as `rank_and_size`.
    """
    local_size = size
    if "LOCAL_WORLD_SIZE" in environment:
        local_size = _number(environment, "LOCAL_WORLD_SIZE", least=1, below=size + 1)
    return _number(environment, "LOCAL_RANK", below=local_size), local_size


@contextmanager
def planned_on(hosts: int, ranks: int) -> Iterator[None]:
    """Within the block, ranks that do not run yet are planned to be on so many hosts.

    Raises:
        InputError: not every host would have as many.

    >>> with planned_on(2, 8):
    ...     ranks_on_a_host(8)
    4
    """
    if ranks % hosts:
        problem = f"{ranks} ranks cannot be on {hosts} hosts, as many on each"
        raise InputError(problem, field="--hosts", value=hosts)
    token = _hosts.set(hosts)
    try:
        yield
    finally:
        _hosts.reset(token)


def ranks_on_a_host(size: int) -> int:
    """How many of `size` ranks this host has; where they do not run yet, as `planned_on` says.

    >>> ranks_on_a_host(4), ranks_on_a_host(1)
    (4, 1)
    """
    if size > 1 and rank_and_size()[1] == size:
        return local_rank_and_size(size)[1]
    return -(-size // _hosts.get())


def meeting_place(environment: Mapping[str, str] = os.environ) -> str:
    """The address and port at which rank 0 waits for the others.

    Raises:
        InputError: one of them is missing, or the port is none.
    """
    address = environment.get("MASTER_ADDR", "")
    if not address.strip():
        raise InputError(f"is missing; {_START}", file=_WHERE, field="MASTER_ADDR")
    return f"{address}:{_number(environment, 'MASTER_PORT', least=1, below=1 << 16)}"


def _number(
    environment: Mapping[str, str], name: str, *, least: int = 0, below: int | None = None
) -> int:
    text = environment.get(name, "").strip()
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (below is not None and number >= below):
        problem = "is not possible" if text else "is missing"
        raise InputError(
            f"{problem}; {_START}",
            file=_WHERE,
            field=name,
            value=text,
            allowed=f"{least} or more" if below is None else f"{least} to {below - 1}",
        )
    return number


def met_store() -> Store:
    """The part of the store by which ranks met that belongs to this start of them.

    torchrun's store outlives ranks that are started again, and these count their turns anew.
    """
    import torch.distributed as dist

    from modicum.core.torch_private import default_store

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"modicum/{attempt}", default_store())
