"""Why a field has its value, and two plans next to each other."""

from __future__ import annotations

import json

import pytest

from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.planner.auto_exchange import PLAIN
from modicum.planner.compared import compared
from modicum.planner.planning import asked_of, plan_anyway
from modicum.planner.why import fields_of, why
from modicum.recipe import Recipe

SMALL = ModelConfig(vocabulary_size=300, width=32, layers=1, heads=2, context=64)


def test_a_choice_is_shown_with_all_its_candidates(new, needs):
    recipe = new(training={"batch_size": 8})
    smaller = plan(recipe.changed(training__micro_batch_size=2))
    tight = recipe.changed(budget__memory=needs(smaller))
    asked, made = asked_of(tight), plan(tight)
    row = why(asked, made, "training.micro_batch_size")
    assert (row["by"], row["value"]) == ("the planner", made.prediction.choice.micro_batch_size)
    taken = [each for each in row["candidates"] if each["chosen"]]
    assert len(taken) == 1
    before = row["candidates"][: row["candidates"].index(taken[0])]
    assert before
    assert not any(each["fits"] for each in before)
    assert taken[0]["fits"]
    assert taken[0]["needs_bytes"] <= tight.budget.memory
    # What `modicum plan` says of the process, next to the budget that keeps it.
    assert taken[0]["process_bytes"] == made.process_bytes
    assert taken[0]["peak_bytes"] == made.prediction.peak_bytes
    assert taken[0]["needs_bytes"] > taken[0]["process_bytes"]
    assert json.loads(json.dumps(row)) == row


def test_what_was_not_chosen_is_the_user_s_or_a_default(new):
    recipe = new(training={"batch_size": 8})
    asked, made = asked_of(recipe), plan(recipe)
    assert why(asked, made, "training.batch_size", "r.yaml:3")["why"] == "written in r.yaml:3"
    default = why(asked, made, "optimizer.weight_decay")
    assert (default["by"], default["value"]) == ("default", 0.0)
    assert "candidates" not in why(asked, made, "training.device")
    with pytest.raises(InputError, match=r"Did you mean 'training\.batch_size'") as caught:
        why(asked, made, "training.batch_sise")
    assert caught.value.field == "--why"
    assert fields_of(recipe)["model.layers"] == 4


def test_a_remark_on_a_value_does_not_say_that_the_planner_chose_it(new):
    model = {"heads": 4, "kv_heads": 1}
    recipe = new(model=model, optimizer={"method": "galore", "rank": 20})
    row = why(asked_of(recipe), plan(recipe), "optimizer.rank", "r.yaml:3")
    assert (row["by"], row["value"], row["why"]) == ("you", 20, "written in r.yaml:3")
    assert row["note"].startswith("above the smaller width of model.layers.0.self_attn.")
    recipe = new(model=model, optimizer={"method": "galore"})
    row = why(asked_of(recipe), plan(recipe), "optimizer.rank")
    assert row["by"] == "default"
    assert "rank 16 fits all" in row["note"]
    assert "note" not in why(asked_of(recipe), plan(recipe), "optimizer.method", "r.yaml:2")


def test_what_a_plan_shows_of_a_section_answers_for_its_method(new, hollow, text):
    recipe = new(comm="auto")
    for field in ("comm", "comm.method"):
        row = why(asked_of(recipe), plan(recipe), field, "r.yaml:1")
        assert (row["by"], row["value"]) == ("the planner", PLAIN)
    recipe = Recipe(
        model={"path": str(hollow(SMALL, "F16"))},
        data={"path": str(text), "sequence_length": 32},
        adapter={"method": "lora"},
    )
    for field in ("linear", "linear.method"):
        row = why(asked_of(recipe), plan(recipe), field)
        assert (row["by"], row["value"]) == ("the planner", "fp16")
        assert row["why"] == "frozen weights stay as the files hold them"


def test_two_plans_are_compared_by_part_and_phase_also_where_one_does_not_fit(new):
    recipe = new(training={"batch_size": 4})
    other = recipe.changed(training__precision="bf16", budget__tensors="1MB")
    (one, fits), (two, other_fits) = plan_anyway(recipe), plan_anyway(other)
    assert (fits, other_fits) == (True, False)
    found = compared(one, two, (fits, other_fits))
    assert "training.precision: 'fp32' -> 'bf16'" in found["recipes"]
    assert found["costs"]["peak_bytes"] == [made.prediction.peak_bytes for made in (one, two)]
    for phase, pair in found["by_phase"].items():
        assert pair == [made.prediction.ledger.bytes(phase=phase) for made in (one, two)]
    weights = [row["bytes"] for row in found["by_part"] if row["what"] == "model"]
    assert sum(pair[0] for pair in weights) == one.prediction.ledger.bytes("weight", "load")
    same = compared(one, one, (True, True))
    assert same["recipes"] == []
    assert json.loads(json.dumps(found)) == found


def test_what_the_plan_settles_is_not_said_to_be_yours_or_a_default(new):
    recipe = new(training={"precision": "auto"})
    row = why(asked_of(recipe), plan(recipe), "training.precision", "r.yaml:5")
    assert (row["by"], row["value"]) == ("the planner", "fp32")
    fixed = new(training={"precision": "fp32"})
    row = why(asked_of(fixed), plan(fixed), "training.precision", "r.yaml:5")
    assert (row["by"], row["why"]) == ("you", "written in r.yaml:5")
