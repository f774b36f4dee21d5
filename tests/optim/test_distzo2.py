"""Values of DistZO2 that the battery's own choice leaves out, and what a plan counts."""

from __future__ import annotations

import pytest

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.draws import SCRATCH_BYTES
from modicum.models import ModelConfig, create
from modicum.optim import DistZO2
from modicum.proofs import run_battery


@pytest.mark.parametrize("value", [DistZO2(stream=True), DistZO2(snapshot=True, draw="rademacher")])
def test_values_pass_the_battery(value: DistZO2) -> None:
    results = run_battery(value, cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []
    assert sum(not result.skipped for result in results) >= 7


def test_a_plan_counts_three_blocks_and_copies_of_what_stays() -> None:
    config = ModelConfig(vocabulary_size=19, width=12, layers=4, heads=2, mlp_width=20, context=8)
    model = create(config, seed=0)
    at = OptimizerQuery(trained_shapes(model))
    sizes = {name: 4 * value.numel() for name, value in model.named_parameters()}
    block = sum(size for name, size in sizes.items() if ".layers.0." in name)
    outside = sum(size for name, size in sizes.items() if ".layers." not in name)
    counted = [
        DistZO2(**fields).ledger(at).bytes("workspace")
        for fields in ({}, {"snapshot": True}, {"stream": True})
    ]
    assert counted == [
        SCRATCH_BYTES,
        SCRATCH_BYTES + sum(sizes.values()),
        SCRATCH_BYTES + 3 * block + outside,
    ]
    assert DistZO2().ledger(at).bytes("optimizer") == 0
