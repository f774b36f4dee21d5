"""Why a field has its value, and two plans next to each other."""

from __future__ import annotations

import json

import pytest

from modicum.core.errors import InputError
from modicum.planner import plan
from modicum.planner.compared import compared
from modicum.planner.planning import asked_of, plan_anyway
from modicum.planner.why import fields_of, why


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
