"""What compressors share: ranks by arithmetic, a calibration's length, what factors inherit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.compress import FWSVD
from modicum.compress.base import CompressorQuery
from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.parameters import ParameterMetadata, describe_parameter, metadata
from modicum.core.layers.layer_sites import Site


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def test_it_looks_at_as_many_examples_as_it_says() -> None:
    model, batches = nn.Sequential(nn.Linear(9, 6)), list(torch.ones(3, 16, 9))
    assert FWSVD(examples=20).calibrate(model, batches, loss).examples == 32
    assert FWSVD().calibrate(model, batches, loss).examples == 48


def test_factors_have_the_metadata_of_their_weight_and_the_bias_stays() -> None:
    model = nn.Sequential(nn.Linear(9, 12))
    bias = model[0].bias
    describe_parameter(model[0].weight, ParameterMetadata(learning_rate_multiplier=3.0))
    value = FWSVD(rank=3)
    value.fit(model, value.calibrate(model, [torch.ones(2, 9)], loss))
    for factor in (model[0].down, model[0].up):
        assert metadata(factor).learning_rate_multiplier == 3.0
    assert model[0].bias is bias


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.05, 0.95), st.integers(1, 40))
def test_the_plan_keeps_the_share_and_never_adds(
    ins: int, outs: int, share: float, rank: int
) -> None:
    layer = Site("x", "linear", ins, outs)
    by_share, by_rank = FWSVD(share=share), FWSVD(rank=rank)
    for value in (by_share, by_rank):
        planned = value.form_of(layer)
        assert (planned is None) == (value.trained(layer) == ins * outs)
        assert value.trained(layer) <= ins * outs
        ledger = value.ledger(CompressorQuery(layer, ModelQuery(2, 5)))
        assert ledger.bytes("weight") == 4 * (value.trained(layer) - ins * outs)
        assert (ledger == Ledger()) == (planned is None)
    if by_share.rank_of(layer) not in (None, 1):
        assert by_share.trained(layer) <= share * ins * outs
