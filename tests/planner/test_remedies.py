"""What would make a recipe fit, and what room could be spent on: tried, minimal, cheapest first."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.planner.conftest import RECORD

from modicum.core.errors import DoesNotFit, InputError
from modicum.models.config import ModelConfig
from modicum.planner import made_to_fit, plan, uses
from modicum.planner.choose import Room, with_headroom
from modicum.planner.knobs import EXACT, METHOD, NUMERICS, ROWS, loosening, tightening
from modicum.planner.planning import asked_of
from modicum.planner.prediction import Prediction
from modicum.planner.profiles import profile_of
from modicum.planner.question import changed
from modicum.planner.remedies import MOST_TRACED, Remedy, _Search, remedies
from modicum.planner.uses import uses_of_room
from modicum.recipe import Recipe, assign
from modicum.recipe_yaml import overridden, parse

SEVEN_BILLION = ModelConfig(
    vocabulary_size=32000, width=4096, layers=32, heads=32, mlp_width=11008, context=4096
)
SMALL = ModelConfig(
    vocabulary_size=300, width=64, layers=3, heads=2, mlp_width=128, tied_embeddings=True
)

TINY = {
    "name": "tiny",
    "device": "cpu",
    "memory": "300.1MB",
    "flops": {"fp32": 1e9},
    "efficiency": 0.5,
    "base": "300MB",
}


def applied(recipe: Recipe, words: str) -> Recipe:
    """The recipe with the settings of a line that a shell would read."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for override in shlex.split(words.replace("--set", "")):
        field, _, value = override.partition("=")
        assign(values, field, yaml.safe_load(value))
    return Recipe(**values)


@pytest.fixture
def adapted(hollow, text):
    def make(config: ModelConfig = SMALL, **sections) -> Recipe:
        data = {"path": str(text), "sequence_length": 128, **sections.pop("data", {})}
        return Recipe(model={"path": str(hollow(config))}, data=data, **sections)

    return make


@pytest.mark.expensive
def test_seven_billion_under_eight_gigabytes_are_answered_by_four_bits_and_an_adapter(adapted):
    recipe = adapted(SEVEN_BILLION, budget={"memory": "8GB"}, training={"batch_size": 4})
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe)
    first = caught.value.changes[0].split(" (needs")[0]
    assert any(f"linear.method={form}" in first for form in ("nf4", "tiles"))
    assert "adapter.method=lora" in first
    made = plan(applied(recipe, first))
    assert made.process_bytes < 8 * 10**9
    # Of the change in YAML comes the same plan.
    values = recipe.model_dump(mode="json", exclude_unset=True)
    for section, fields in yaml.safe_load(caught.value.yaml).items():
        values[section] = {**values.get(section, {}), **fields}
    assert plan(Recipe(**values)).prediction == made.prediction


@pytest.fixture
def qwen(tmp_path: Path, text: Path) -> Callable[..., Recipe]:
    """A model of transformers, of which the config.json alone is here: it is traced."""

    def make(sizes: dict[str, int], **sections: Any) -> Recipe:
        folder = tmp_path / "qwen3"
        folder.mkdir()
        raw = {"model_type": "qwen3", "num_attention_heads": 32, "num_key_value_heads": 8, **sizes}
        (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16", **raw}))
        data = {"path": str(text), "sequence_length": 128}
        return Recipe(model={"path": str(folder)}, data=data, **sections)

    return make


@pytest.mark.expensive
def test_a_model_of_transformers_gets_the_same_answer_by_few_traces(qwen, traced_here):
    sizes = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    recipe = qwen(sizes, budget={"tensors": "8GB"}, training={"batch_size": 4})
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe)
    assert len(traced_here) <= 1 + MOST_TRACED
    first = caught.value.changes[0].split(" (needs")[0]
    assert "linear.method=nf4" in first
    assert "adapter.method=lora" in first
    made = plan(applied(recipe, first))
    assert made.prediction.traced
    assert made.prediction.peak_bytes <= 8 * 10**9


@pytest.mark.expensive
@pytest.mark.parametrize("part", [0.3, 0.8])
def test_every_remedy_fits_and_none_of_its_changes_is_idle(adapted, part):
    recipe = adapted(training={"batch_size": 4})
    made = plan(recipe)
    budget = made.process_base + int(part * made.prediction.peak_bytes)
    tight = recipe.changed(budget__memory=budget)
    asked = asked_of(tight)
    found = list(islice(remedies(asked), 8))
    assert found
    search = _Search(asked)
    for remedy in found:
        assert len(remedy.change) <= 3
        assert remedy.needs <= budget
        assert plan(applied(tight, remedy.words)).budget == budget
        for field in remedy.change if len(remedy.change) > 1 else ():
            others = {name: value for name, value in remedy.change.items() if name != field}
            spent = search.spent(others)
            assert spent is None or spent.needed > budget
    fields = [frozenset(remedy.change) for remedy in found]
    assert len(set(fields)) == len(fields)


@pytest.mark.expensive
def test_a_recipe_is_made_to_fit_by_the_first_remedy(adapted):
    recipe = adapted(training={"batch_size": 4}, budget={"tensors": "100MB"})
    assert made_to_fit(recipe) == (recipe, None)
    least = recipe.changed(training__micro_batch_size=1, training__recompute="blocks")
    tensors = plan(least).prediction.peak_bytes // 2
    fitting, remedy = made_to_fit(recipe.changed(budget__tensors=tensors))
    assert remedy.change
    made = plan(fitting)
    assert made.prediction.peak_bytes <= tensors == fitting.budget.tensors
    with pytest.raises(DoesNotFit):
        made_to_fit(recipe.changed(budget__memory="1MB"))


@pytest.mark.expensive
def test_remedies_come_by_what_they_touch(adapted):
    training = {"batch_size": 8, "micro_batch_size": 8, "recompute": "none", "precision": "fp32"}
    recipe = adapted(training=training, adapter={"method": "lora"})
    costs = {knob.field: knob.cost for knob in tightening(asked_of(recipe).recipe)}
    assert costs["training.micro_batch_size"] == costs["training.recompute"] == EXACT
    assert costs["training.precision"] == NUMERICS
    assert costs["adapter.rank"] == costs["optimizer.method"] == METHOD
    assert costs["data.sequence_length"] == ROWS
    least = asked_of(recipe)
    budget = least.room.needed(least.frugal(changed(recipe, {"training.recompute": "blocks"})))
    found = remedies(asked_of(recipe.changed(budget__memory=budget)))
    order = [max(costs.get(field, NUMERICS) for field in each.change) for each in islice(found, 5)]
    assert order == sorted(order)
    assert order[0] == EXACT


def test_what_compiled_blocks_hold_is_given_up_first(new, monkeypatch):
    compiled = replace(RECORD, compiled_bytes=90_000_000)
    monkeypatch.setattr("modicum.planner.planning.machine_record", lambda device: compiled)
    recipe = new(training={"compile": "blocks", "batch_size": 4, "micro_batch_size": 1})
    asked = asked_of(recipe)
    needed = asked.room.needed(asked.frugal(asked.recipe))
    tight = recipe.changed(budget__memory=needed - 80_000_000)
    with pytest.raises(DoesNotFit) as caught:
        plan(tight)
    said = caught.value.changes[0].partition(" (needs")[0]
    assert said == "--set training.compile=none"
    first = next(remedies(asked_of(tight)))
    assert first.needs == needed - 90_000_000
    made = plan(applied(tight, said))
    assert with_headroom(made.process_bytes, made.process_base) <= tight.budget.memory
    # Of a budget of tensors alone it is no part.
    beyond = asked_of(recipe.changed(budget__tensors=needed - asked.room.base - 1))
    assert not any("training.compile" in each.change for each in islice(remedies(beyond), 2))


SHRUNK: list[tuple[dict[str, Any], int]] = [
    (
        {
            "model": {"layers": 2, "width": 64, "heads": 4, "mlp_width": 128, "kv_heads": 4,
                      "vocabulary_size": 600, "tied_embeddings": False},
            "optimizer": {"method": "sgd"},
        },
        1,
    ),
    ({"parallel": {"strategy": "ddp"}, "comm": {"method": "powersgd"}}, 2),
    ({"linear": {"method": "monarch"}, "optimizer": {"method": "galore"}}, 1),
    ({"task": {"method": "images", "images": 64, "held_out": 8, "widths": [16, 8]}}, 1),
]  # fmt: skip


@pytest.mark.expensive
@pytest.mark.parametrize(("sections", "ranks"), SHRUNK)
def test_each_change_that_saves_is_a_recipe_with_a_plan_of_as_much(
    sections: dict[str, Any], ranks: int, text: Path
) -> None:
    training = {"batch_size": 8, "micro_batch_size": 2, "recompute": "none"}
    data = {"path": str(text), "sequence_length": 64}
    shared = {"training": training} if "task" in sections else {"training": training, "data": data}
    recipe = Recipe(**shared, **sections, budget={"tensors": "1GB"})
    asked = asked_of(recipe, ranks=ranks).without_traces()
    before, saving = asked.room.needed(asked.frugal(asked.recipe)), set()
    for knob in tightening(asked.recipe, ranks):
        for value in knob.values:
            if (other := asked.changed({knob.field: value})) is None:
                continue
            try:
                found = asked.frugal(other)
            except InputError:  # of a change that is not offered
                continue
            if asked.room.needed(found) >= before:
                continue
            saving.add(knob.field)
            written = applied(recipe, Remedy({knob.field: value}, 1).words)
            choice = found.choice
            made = plan(
                written.changed(
                    training__micro_batch_size=choice.micro_batch_size,
                    training__recompute="blocks" if choice.recompute else "none",
                    checkpoint__asynchronous=choice.asynchronous,
                ),
                ranks=ranks,
            )
            assert made.prediction.peak_bytes == found.peak_bytes
    assert len(saving) > 1  # on images a batch and a method


def test_methods_come_from_the_catalog_and_leave_out_what_they_do_not_know(new):
    recipe = new(optimizer={"method": "adamw", "betas": [0.9, 0.99]})
    knobs = {knob.field: knob.values for knob in tightening(recipe)}
    assert {"method": "sgd"} in knobs["optimizer"]
    assert "galore" in knobs["optimizer.method"]
    assert "sgd" not in knobs["optimizer.method"]
    spelled = Remedy({"optimizer": {"method": "sgd"}, "adapter.targets": ["q_proj", "o_proj"]}, 1)
    assert shlex.split(spelled.words)[1] == "optimizer={method: sgd}"
    assert yaml.safe_load(spelled.yaml) == {
        "optimizer": {"method": "sgd"},
        "adapter": {"targets": ["q_proj", "o_proj"]},
    }


@pytest.mark.parametrize(
    "word",
    ["q_proj", "model/x-1.y", "12MB", "*q_proj", "12", "1e3", "-1", "null", "No", "true", "~", "",
     "it's", 'say "so"', "a: b # c", "[x, y]", "a,b", "é", "$HOME", "line\nbreak"],
)  # fmt: skip
def test_a_change_is_read_as_it_was_meant_by_a_shell_and_by_yaml(word: str) -> None:
    optimizer = {"method": "sgd", "rule": word}
    spelled = Remedy({"optimizer": optimizer, "adapter.targets": [word, "v"], "data.path": word}, 1)
    given = shlex.split(spelled.words)
    assert given[::2] == ["--set"] * 3
    assert overridden(given[1::2]) == spelled.change
    values, _ = parse(spelled.yaml, "recipe.yaml")
    adapter, data = {"targets": [word, "v"]}, {"path": word}
    assert values == {"optimizer": optimizer, "adapter": adapter, "data": data}


def test_what_needs_no_quotes_has_none() -> None:
    change = {"adapter.method": "lora", "budget.memory": "12MB", "adapter.targets": ["q", "o_proj"]}
    said = "--set adapter.method=lora --set budget.memory=12MB --set 'adapter.targets=[q, o_proj]'"
    assert Remedy(change, 1).words == said


def test_a_search_ends(new, monkeypatch):
    monkeypatch.setattr("modicum.planner.remedies.MOST_TRIED", 3)
    recipe = new(budget={"tensors": "1MB"})
    tried = []
    asked = asked_of(recipe)
    original = type(asked).frugal

    def frugal(self, recipe, ranks=None):
        tried.append(recipe)
        return original(self, recipe, ranks)

    monkeypatch.setattr(type(asked), "frugal", frugal)
    assert list(remedies(asked)) == []
    assert len(tried) <= 4


@pytest.mark.expensive
def test_where_nothing_is_enough_that_is_said(adapted):
    with pytest.raises(DoesNotFit, match="No five changes together are enough") as caught:
        plan(adapted(budget={"memory": "1MB", "tensors": "1MB"}, training={"batch_size": 1}),
             machine=profile_of(TINY, "tiny.yaml"))  # fmt: skip
    assert (caught.value.changes, caught.value.yaml) == ([], "")


@pytest.mark.parametrize("name", ["images", "sequences"])
def test_models_without_layers_of_another_form_are_refused_with_remedies_too(name):
    training = {"steps": 2, "batch_size": 64, "micro_batch_size": 64}
    recipe = Recipe(task={"method": name}, training=training, samples={"count": 0})
    needed = plan(recipe).prediction.peak_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan(recipe.changed(budget__tensors=needed // 2))
    assert any("micro_batch_size" in change for change in caught.value.changes)


# Room


def test_room_is_spent_on_what_fits_and_each_use_was_tried(new):
    recipe = new(training={"batch_size": 4, "recompute": "blocks"}, budget={"tensors": "1GB"})
    made = plan(recipe, advise=True)
    uses = {use["set"]: use for use in made.row()["room"]}
    assert uses["--set training.recompute=none"]["work"] < 1
    assert any("data.sequence_length" in words for words in uses)
    for words, use in uses.items():
        tried = plan(applied(recipe, words))
        assert tried.prediction.trainable == use["trainable"]
        assert use["needs_bytes"] <= made.budget
    assert "room" not in plan(recipe).row()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_a_use_needs_what_the_plan_of_the_recipe_with_it_needs(
    hollow: Callable[..., Path], text: Path, dtype: str
) -> None:
    recipe = Recipe(
        model={"path": str(hollow(SMALL, dtype))},
        data={"path": str(text), "sequence_length": 128},
        adapter={"method": "lora", "rank": 2},
        training={"batch_size": 4},
        budget={"tensors": "1GB"},
    )
    room, made = asked_of(recipe).room, plan(recipe, advise=True)
    found = {use["set"]: use["needs_bytes"] for use in made.row()["room"]}
    assert {"--set adapter=null", "--set adapter.rank=16"} <= found.keys()
    # Weights in fp16 have a form that the files decide; no other recipe would change that.
    assert not any("linear" in words for words in found)
    for words, needs in found.items():
        assert room.needed(plan(applied(recipe, words)).prediction) == needs


def test_room_of_an_adapter_goes_into_its_rank_and_the_form_of_its_base(adapted):
    recipe = adapted(
        adapter={"method": "lora", "rank": 2}, linear={"method": "nf4"}, budget={"tensors": "1GB"}
    )
    knobs = {knob.field: knob.values for knob in loosening(recipe, 1, 256)}
    assert knobs["adapter.rank"] == (4, 8, 16)
    assert knobs["linear"] == ({"method": "tiles"}, {"method": "int8"}, {"method": "fp16"}, None)
    assert knobs["data.sequence_length"] == (256,)
    asked = asked_of(recipe)
    found = {field: value for use in uses_of_room(asked, asked.fitting(asked.recipe))
             for field, value in use.remedy.change.items()}  # fmt: skip
    assert found["adapter.rank"] == 16
    assert found["linear"] is None


def test_room_is_not_tried_with_blocks_that_run_again_where_the_plan_has_none(monkeypatch):
    model = {"layers": 2, "width": 64, "heads": 2, "vocabulary_size": 300}
    recipe = Recipe(model=model, data={"include": ["json/**"]}, budget={"tensors": "60MB"})
    asked = asked_of(recipe)
    made = asked.fitting(asked.recipe)
    assert made is not None
    assert not made.choice.recompute
    tried: list[tuple[bool, bool]] = []
    holds = Room.holds

    def heard(room: Room, prediction: Prediction) -> bool:
        tried.append((prediction.choice.recompute, holds(room, prediction)))
        return tried[-1][1]

    monkeypatch.setattr(Room, "holds", heard)
    assert list(uses_of_room(asked, made))
    assert (False, False) in tried  # too lavish, so that recomputing would be the next choice
    assert not any(recompute for recompute, _ in tried)


def test_room_of_a_model_of_transformers_is_spent_by_few_traces(qwen, traced_here):
    adapter = {"method": "lora", "rank": 2}
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"head_dim": 16, "vocab_size": 512}
    recipe = qwen(sizes, budget={"tensors": "1GB"}, adapter=adapter, training={"precision": "bf16"})
    found = {use["set"]: use for use in plan(recipe, advise=True).row()["room"]}
    assert len(traced_here) <= 2 * (1 + uses.MOST_TRACED)  # kept, and run again
    assert {"--set adapter.rank=16", "--set training.precision=fp32"} <= set(found)
    more = found["--set adapter.rank=16"]
    tried = plan(recipe.changed(adapter={**adapter, "rank": 16}))
    assert tried.prediction.trainable == more["trainable"] == 8 * plan(recipe).prediction.trainable


def test_where_there_is_no_room_nothing_is_offered(new, needs):
    recipe = new(training={"batch_size": 1, "micro_batch_size": 1, "recompute": "none"})
    made = plan(recipe)
    tight = plan(recipe.changed(budget__memory=needs(made)), advise=True)
    assert not any("sequence_length" in use["set"] for use in tight.row().get("room", ()))


def test_fields_that_are_of_no_use_to_the_task_are_not_offered():
    task = {"method": "images", "images": 96, "held_out": 16, "widths": [6, 6]}
    recipe = Recipe(task=task, training={"batch_size": 8}, budget={"tensors": "1GB"})
    assert "room" not in plan(recipe, advise=True).row()
