from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.ranks.layout import Layout
from modicum.models.config import ModelConfig
from modicum.models.traced_builds import decoder
from modicum.planner.predict import Choice, predict
from modicum.recipe import Recipe
from modicum.tasks.causal_lm import CausalLM
from modicum.tasks.text import new_config


def traced(
    task: CausalLM, config: ModelConfig, shape: ModelQuery, *, recompute: bool = False, **_: Any
) -> Ledger:
    known = {field.name: getattr(config, field.name) for field in fields(config)}
    half = shape.compute_bytes == 2
    model = decoder(known, shape.tokens, half=half, documents=shape.segments)
    return model.ledger(shape.sequences, micro_batches=shape.micro_batches, recompute=recompute)


@pytest.mark.parametrize(
    "choice",
    [
        Choice(4, 1, recompute=False),
        Choice(2, 2, recompute=False),
        Choice(4, 1, recompute=False, layout=Layout(replicas=2)),
        Choice(4, 1, recompute=False, layout=Layout(shards=4)),
    ],
    ids=["alone", "accumulated", "replicated", "sharded"],
)
def test_a_plan_made_of_traces_is_the_one_made_of_arithmetic(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(
        data={"sequence_length": 96},
        model={"layers": 5, "width": 64, "vocabulary_size": 700},
        training={"precision": "fp32"},
    )
    config = replace(new_config(recipe), context=96)
    by_arithmetic = predict(recipe, config, choice)
    monkeypatch.setattr(CausalLM, "ledger", traced)
    by_trace = predict(recipe, config, choice)
    assert by_trace.peak_bytes == pytest.approx(by_arithmetic.peak_bytes, rel=0.01)
    assert by_trace.flops == by_arithmetic.flops
