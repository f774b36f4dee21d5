"""Blocks with an adapter on them are compiled once, not one by one."""

from __future__ import annotations

import pytest
import torch

from modicum.adapters import MoS, PiSSA
from modicum.adapters.base import Adapter
from modicum.proofs.contracts.adapters.subjects import distance, llama, stir, tokens

# LoRA's graphs are counted where the trainer compiles.
METHODS: list[Adapter] = [
    PiSSA(rank=2),
    MoS(rank=4, equivalent_rank=3, private_rank=1, shards=4),
]


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)
def test_compiled_blocks_share_one_graph(value: Adapter) -> None:
    from torch._dynamo.utils import counters  # slow to import

    model, ids = llama(layers=5), tokens()
    stir(value.attach(model))
    expected = model(ids)
    torch._dynamo.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    assert distance(model(ids), expected) < 1e-5
    # The first block's input takes no gradient, those of all others do.
    assert counters["stats"]["unique_graphs"] == 2
