"""What is said where there is one rank: once, at the caller's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import modicum.comm
from modicum.comm import C4, DeAR, PowerSGD
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.one_rank import NOBODY_WAITS, NOTHING_TRAVELS


def reduced(_: Path) -> None:
    model, exchange = nn.Linear(4, 3), PowerSGD().bind(ExchangeContext())
    for _step in range(3):
        model(torch.ones(4)).sum().backward()
        exchange.reduce(model)


def hooked(folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=0, world_size=1
    )
    try:
        PowerSGD().ddp_hook(DistributedDataParallel(nn.Linear(4, 3)))
    finally:
        dist.destroy_process_group()


def wrapped(method: Any) -> Callable[[Path], None]:
    def wrap(_: Path) -> None:
        model = nn.Linear(4, 3)
        method.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return wrap


@pytest.mark.parametrize(
    ("called", "said"),
    [
        (reduced, NOTHING_TRAVELS),
        (hooked, NOTHING_TRAVELS),
        (wrapped(DeAR()), NOTHING_TRAVELS),
        (wrapped(PowerSGD()), NOTHING_TRAVELS),
        (lambda _: modicum.comm.watch(), NOBODY_WAITS),
        (lambda _: C4().watch(), NOBODY_WAITS),
    ],
    ids=["reduce", "ddp_hook", "DeAR.wrap", "PowerSGD.wrap", "watch", "C4.watch"],
)
def test_it_is_said_once_where_it_was_called(
    tmp_path: Path, called: Callable[[Path], Any], said: str
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        called(tmp_path)
    (one,) = [each for each in warned if "there is one rank" in str(each.message)]
    assert (str(one.message), one.filename) == (said, __file__)
