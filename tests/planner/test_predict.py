from __future__ import annotations

import pytest

from modicum.planner import plan
from modicum.planner.predict import Choice, Predictor, predict
from modicum.recipe import Recipe
from modicum.tasks.text import new_config
from modicum.trainer import train


@pytest.mark.expensive
@pytest.mark.parametrize(
    "training",
    [{}, {"micro_batch_size": 2}, {"recompute": "blocks"}, {"precision": "bf16"}],
    ids=["whole", "accumulated", "recomputed", "bf16"],
)
def test_the_forecast_of_tensor_bytes_comes_true_in_a_run(tmp_path, training):
    recipe = Recipe(
        data={"include": ["json/**"], "sequence_length": 96},
        model={"layers": 2, "width": 64, "vocabulary_size": 700},
        training={"steps": 3, "batch_size": 6, "recompute": "none", **training},
        samples={"count": 0},
    )
    run = train(plan(recipe), tmp_path / "run")
    peak = run["peak_bytes"]
    assert 0.98 * peak["measured"] <= peak["predicted"] <= 1.05 * peak["measured"]


def test_the_same_predictor_tells_recipes_apart():
    predictor, choice = Predictor(), Choice(2, 1, recompute=False)
    one = Recipe(model={"layers": 2, "width": 64})
    other = one.changed(training__precision="bf16")
    for recipe in (one, other, one):
        config = new_config(recipe)
        assert predictor(recipe, config, choice) == predict(recipe, config, choice)
    assert predict(other, config, choice).peak_bytes < predict(one, config, choice).peak_bytes


def test_every_choice_costs_what_its_arithmetic_says():
    recipe = Recipe(model={"layers": 4, "width": 64})
    config = new_config(recipe)
    whole = predict(recipe, config, Choice(8, 1, recompute=False))
    parts = predict(recipe, config, Choice(2, 4, recompute=False))
    again = predict(recipe, config, Choice(8, 1, recompute=True))
    assert whole.flops == parts.flops
    assert again.ledger.flops("forward") == whole.ledger.flops("forward")
    assert again.ledger.flops("backward") > whole.ledger.flops("backward")
    assert parts.peak_bytes < whole.peak_bytes
    assert again.peak_bytes < whole.peak_bytes
