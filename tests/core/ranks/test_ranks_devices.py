"""Where numbers for people are while they travel: on a processor, where the group knows one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.distributed_c10d import BackendConfig

from modicum.core.ranks import ranks as module
from modicum.core.ranks.ranks import Ranks


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl,cpu:gloo", "cpu"),
        ("cpu:gloo", "cpu"),
        ("cuda:nccl", "cuda"),
        (str(BackendConfig(dist.Backend("gloo"))), "cpu"),
        (str(BackendConfig(dist.Backend("nccl"))), "cuda"),
        (str(BackendConfig(dist.Backend("cpu:gloo,cuda:nccl"))), "cpu"),
    ],
)
def test_a_group_that_knows_no_processor_sends_from_its_device(
    monkeypatch: pytest.MonkeyPatch, config: str, kind: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert module._on() == torch.device(kind)


def where(ranks: Ranks) -> tuple[str, list[float]]:
    return str(module._on()), ranks.sum(float(ranks.rank + 1))


@pytest.mark.ranks
def test_ranks_on_gloo_send_from_a_processor(pool: Pool) -> None:
    assert pool.run(where) == [("cpu", [3.0])] * 2
