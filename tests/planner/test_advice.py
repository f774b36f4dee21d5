"""A plan says which other adapter its figures speak for, and changes nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from classifiers import base_folder, rows, write_rows

from modicum.core.contracts.catalog import catalog
from modicum.core.errors import InputError
from modicum.models.config import ModelConfig
from modicum.planner import plan
from modicum.planner.advice import ANSWERS, advice
from modicum.planner.planning import asked_of
from modicum.recipe import Recipe
from modicum.recipe.slots import methods_for

BROAD = ModelConfig(
    vocabulary_size=300, width=256, layers=2, heads=4, mlp_width=704, tied_embeddings=True
)


@pytest.fixture(name="adapted")
def _adapted(hollow, text):
    folder = str(hollow(BROAD))

    def make(adapter: str = "lora", *, rows: int, **sections) -> Recipe:
        return Recipe(
            model={"path": folder},
            data={"path": str(text), "sequence_length": 16 * rows},
            adapter={"method": adapter},
            training={"batch_size": rows, "micro_batch_size": rows, "recompute": "none"},
            **sections,
        )

    return make


def tried(recipe: Recipe) -> list[str]:
    return [each["try"] for each in plan(recipe, advise=True).row().get("advice", ())]


def test_many_activations_speak_for_one_that_keeps_no_inputs(adapted):
    assert tried(adapted(rows=16)) == ["adapter: {method: lora_fa}"]
    assert tried(adapted("lora_fa", rows=16)) == []


def test_a_large_base_speaks_for_fewer_bits_or_a_pruned_one(adapted):
    assert tried(adapted(rows=1)) == ["linear: {method: nf4}, or adapter: {method: loram}"]
    with pytest.raises(InputError, match="does not combine"):
        adapted("shira", rows=1, linear={"method": "nf4"})
    assert tried(adapted("shira", rows=1)) == []


def test_merging_into_few_bits_speaks_for_tiles(adapted):
    recipe = adapted(rows=1, linear={"method": "nf4"})
    assert "linear: {method: tiles} and adapter: {method: qa_hira}" in tried(recipe)
    assert "linear: {method: tiles} and adapter: {method: qa_hira}" not in tried(adapted(rows=1))


def test_advice_is_of_who_asks_and_changes_nothing(adapted):
    recipe = adapted(rows=16)
    asked, made = plan(recipe, advise=True), plan(recipe)
    assert "advice" not in made.row()
    assert asked.recipe == made.recipe
    assert asked.prediction == made.prediction


def test_nothing_is_advised_to_who_starts_from_an_adapter(adapted):
    asked = asked_of(adapted(rows=16))
    made = asked.fitting(asked.recipe)
    assert list(advice(asked, made))
    begun = replace(asked, recipe=asked.recipe.changed(model__adapter="adapter"))
    assert list(advice(begun, made)) == []


def test_an_adapter_that_the_task_refuses_is_not_advised(adapted):
    asked = asked_of(adapted(rows=16))
    made = asked.fitting(asked.recipe)
    tried = []

    def refuse(_, recipe):
        tried.append(recipe.adapter["method"])
        raise InputError("no other adapter goes with it", field="adapter.method")

    task = SimpleNamespace(reconfigured=refuse)
    assert list(advice(replace(asked, task=task, _configs={}), made)) == []
    assert tried == ["lora_fa"]


def test_a_classifier_of_texts_is_not_advised_what_it_does_not_take(
    tmp_path, traced_here, monkeypatch
):
    monkeypatch.setattr("modicum.planner.planning.uses_of_room", lambda *_: ())
    data = write_rows(tmp_path / "d.jsonl", rows(40))
    recipe = Recipe(
        task={"method": "text_classes"},
        model={"path": str(base_folder(tmp_path / "base", "bert"))},
        data={"path": str(data), "sequence_length": 12},
        adapter={"method": "lora"},
        training={"batch_size": 32, "micro_batch_size": 32, "recompute": "none"},
    )
    made = plan(recipe, advise=True)
    because = [a.reason(recipe, recipe.method("adapter"), made.prediction)
               for a in ANSWERS if a.reason]  # fmt: skip
    assert any(because)
    assert made.advice == ()


def test_what_is_advised_is_there():
    assert {name for answer in ANSWERS for name in answer.methods} <= set(methods_for("adapter"))
    for answer in ANSWERS:
        parts = re.findall(r"\w+: \{method: (\w+)\}", answer.take)
        assert set(answer.methods) <= set(parts) <= set(catalog())
