from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.contracts.ledger import Entry, Ledger
from modicum.core.heap import LARGEST
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.planner.predict import Predictor, predict
from modicum.planner.prediction import Choice, Prediction
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


def test_the_step_of_an_update_is_counted_once_whatever_its_micro_batches_are():
    recipe = Recipe(model={"layers": 2, "width": 64}, optimizer={"method": "muon"})
    config = new_config(recipe)
    made = [predict(recipe, config, Choice(8 // n, n, recompute=False)) for n in (1, 4)]
    assert made[0].flops == made[1].flops
    assert made[0].flops - made[0].ledger.flops("step") < made[0].flops


def test_a_checkpoint_at_the_end_alone_takes_no_copy_of_the_state():
    recipe = Recipe(model={"layers": 2, "width": 64}, training={"steps": 8})
    choice = Choice(2, 1, recompute=False, asynchronous=True)
    copied = {
        every: predict(recipe.changed(checkpoint__every=every), new_config(recipe), choice)
        for every in (7, 8, "8", "5m")
    }
    assert [each.host_bytes > 0 for each in copied.values()] == [True, False, False, True]
    best = recipe.changed(checkpoint__every=8, evaluation__keep_best=True)
    assert predict(best, new_config(recipe), choice).host_bytes == copied[7].host_bytes


def test_of_what_comes_and_goes_the_allocator_keeps_small_blocks_and_gives_large_ones_back():
    def process(large: int, kept: float, **more: bool) -> int:
        ledger = Ledger.of(
            Entry("weight", 100),
            Entry("activation", 40, ("forward", "loss")),
            Entry("activation", 70, ("backward",)),
            Entry("workspace", 500, ("loss",), large=large),
            Entry("host", 30, place="host"),
        )
        return Prediction(Choice(1, 1, False), ledger, 1, 1, 0, False).process_bytes(
            1000, kept, **more
        )

    # In one piece each: the pages of the backward pass stay, and the logits come on top.
    assert process(500, 0.1, staged=False) == 1000 + 100 + 70 + 7 + 500
    # Otherwise all of one phase is small, and of the largest one something is kept.
    assert process(0, 0.1, staged=False) == 1000 + 100 + 540 + 54
    assert process(500, 0.0) == process(500, 0.0, staged=False) + 30


def test_pages_of_small_blocks_stay_where_large_ones_hide_their_worst_moment():
    def process(rest: int | None) -> int:
        ledger = Ledger.of(
            Entry("weight", 100),
            Entry("workspace", 500, ("loss",), large=500, rest=rest),
        )
        return Prediction(Choice(1, 1, False), ledger, 1, 1, 0, False).process_bytes(1000, 0.5)

    assert process(None) == 1000 + 100 + 500
    assert process(80) == 1000 + 100 + 500 + 120


def test_a_large_tensor_is_one_that_is_mapped_on_its_own():
    config = ModelConfig(vocabulary_size=4096, width=64, layers=2, heads=4, context=2048)
    recipe = Recipe(model={"layers": 2, "width": 64}, data={"sequence_length": 2048})
    for rows in (1, 2):  # logits of 32 MiB, and of more
        ledger = predict(recipe, config, Choice(rows, 1, recompute=True)).ledger
        large = {entry.phases: entry.large for entry in ledger.entries if entry.large}
        logits = 4 * rows * 2048 * 4096
        assert logits >= LARGEST
        masks = 4 * rows * 2048**2
        assert large == {
            ("evaluation",): 2 * logits,
            ("forward",): 2 * logits,
            ("loss",): 3 * logits,
            **({("forward", "loss", "backward"): masks} if masks >= LARGEST else {}),
        }
    less = predict(recipe, replace(config, vocabulary_size=4095), Choice(1, 1, recompute=True))
    assert not any(entry.large for entry in less.ledger.entries)


@given(st.floats(0, 1), st.integers(1, 8))
def test_a_process_holds_at_least_its_tensors(kept, rows):
    recipe = Recipe(model={"layers": 2, "width": 64}, data={"sequence_length": 2048})
    config = ModelConfig(vocabulary_size=4096, width=64, layers=2, heads=4, context=2048)
    made = predict(recipe, config, Choice(rows, 1, recompute=True))
    assert made.process_bytes(7, kept) >= 7 + made.peak_bytes
    assert made.lasting_bytes + made.small_bytes <= made.peak_bytes
