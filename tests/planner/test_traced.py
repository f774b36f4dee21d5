from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import config_json

from modicum import recipe_yaml
from modicum.core.contracts.ledger import PHASES
from modicum.core.errors import InputError
from modicum.core.heap import LARGEST
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.layout import Layout
from modicum.models.config import ModelConfig
from modicum.planner import plan, traced
from modicum.planner.choose import strategy_of
from modicum.planner.planning import asked_of
from modicum.planner.predict import predict
from modicum.planner.prediction import Choice, Prediction
from modicum.recipe import Recipe
from modicum.tasks import task_of
from modicum.tasks.causal_lm import CausalLM
from modicum.tasks.text import new_config

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def asked(traced_here: list[str]) -> list[str]:
    return traced_here


def small(**sections: dict[str, Any]) -> tuple[Recipe, ModelConfig]:
    recipe = Recipe(
        data={"sequence_length": 96},
        model={"layers": 5, "width": 64, "vocabulary_size": 700},
        **sections,
    )
    return recipe, replace(new_config(recipe), context=96)


def both(recipe: Recipe, config: Any, choice: Choice) -> tuple[Prediction, Prediction]:
    """The prediction by arithmetic and the one by traces."""
    found = predict(recipe, config, choice)
    traced = predict(recipe.changed(budget__ledger="traced"), config, choice)
    assert (found.traced, traced.traced) == (False, True)
    return found, traced


def assert_alike(found: Prediction, traced: Prediction) -> None:
    expected, by_phase = found.ledger.by_phase(), traced.ledger.by_phase()
    for phase in PHASES:
        assert by_phase[phase] == pytest.approx(expected[phase], rel=0.01), phase
    assert traced.flops == pytest.approx(found.flops, rel=0.002)
    assert (traced.total, traced.trainable) == (found.total, found.trainable)


@pytest.mark.expensive
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", ["demo-pretrain", "demo-adapt"])
def test_plans_of_the_demos_are_the_same_by_both(name: str, recompute: bool) -> None:
    shape = recipe_yaml.load(str(RECIPES / "demo-pretrain.yaml"))
    recipe = recipe_yaml.load(str(RECIPES / f"{name}.yaml"))
    assert_alike(*both(recipe, new_config(shape), Choice(16, 1, recompute)))


@pytest.mark.expensive
@pytest.mark.parametrize(
    "choice",
    [
        Choice(2, 2, recompute=False),
        Choice(4, 1, recompute=False, layout=Layout(replicas=2)),
        Choice(4, 1, recompute=False, layout=Layout(shards=4)),
    ],
    ids=["accumulated", "replicated", "sharded"],
)
def test_a_plan_made_of_traces_is_the_one_made_of_arithmetic(choice: Choice) -> None:
    recipe, config = small()
    found, traced = both(recipe, config, choice)
    assert traced.peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    assert traced.flops == found.flops


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_large_tensors_are_the_same_by_both(recompute: bool) -> None:
    recipe, config = small()
    # Logits of a little more than 32 MiB, and nothing else of that size.
    found, traced = both(recipe, config, Choice(128, 1, recompute))
    assert LARGEST < 4 * 96 * 700 * 128
    at = {"evaluation", "forward", "loss"}
    for one in (found, traced):
        assert {p for e in one.ledger.entries if e.large for p in e.phases} == at
    mapped = [one.process_bytes(0, 0.0) - one.lasting_bytes for one in (found, traced)]
    assert mapped[1] == pytest.approx(mapped[0], rel=0.03)
    assert traced.small_bytes == pytest.approx(found.small_bytes, rel=0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here CUDA's own operations are traced")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_without_cuda_a_processor_s_operations_are_traced(precision: str) -> None:
    recipe, config = small(training={"precision": precision})
    choice = Choice(4, 1, recompute=False)
    found = predict(recipe, config, choice, "cuda")
    stands = predict(recipe.changed(budget__ledger="traced"), config, choice, "cuda")
    assert stands.traced
    assert stands.peak_bytes == pytest.approx(found.peak_bytes, rel=0.1)


def test_images_are_planned_by_traces_too() -> None:
    recipe = Recipe(task={"method": "images", "widths": [8, 8, 16, 16]})
    config = task_of(recipe).look(recipe).config
    found, traced = both(recipe, config, Choice(32, 1, recompute=False))
    assert_alike(found, traced)


def test_a_task_without_arithmetic_is_traced(asked, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = small()
    known = predict(recipe, config, Choice(4, 1, recompute=False))
    assert not asked
    monkeypatch.setattr(CausalLM, "ledger", lambda *_, **__: None)
    traced = predict(recipe, config, Choice(4, 1, recompute=False))
    assert traced.traced
    assert traced.peak_bytes == pytest.approx(known.peak_bytes, rel=0.01)


@pytest.mark.expensive
def test_a_plan_traces_once_and_says_so(new, asked, capsys: pytest.CaptureFixture[str]) -> None:
    traced._say_once.cache_clear()  # which is said once in a process
    made = plan(new(budget={"ledger": "traced", "tensors": "1GB"}))
    row = made.row()["prediction"]
    assert row["ledger"] == "traced"
    assert row["table"]
    assert len(asked) == 1
    assert capsys.readouterr().err.count("Tracing") == 1
    assert plan(new()).row()["prediction"]["ledger"] == "arithmetic"


def test_a_model_that_cannot_be_traced_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config = small(budget={"ledger": "traced"})
    outputs = CausalLM.outputs

    def reads(task: CausalLM, model: Any, batch: Any) -> Any:
        logits = outputs(task, model, batch)
        return logits if logits.sum().item() > 0 else -logits

    monkeypatch.setattr(CausalLM, "outputs", reads)
    with pytest.raises(InputError, match="data decides what runs") as caught:
        predict(recipe, config, Choice(4, 1, recompute=False))
    assert caught.value.field == "budget.ledger"
    assert "test_traced.py" in str(caught.value)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(CausalLM, "ledger", lambda *_, **__: None)
    with pytest.raises(InputError, match="no ledger of its own") as caught:
        predict(small()[0], config, Choice(4, 1, recompute=False))
    assert caught.value.field == "task.method"


@pytest.mark.parametrize("norm", ["none", "group"])
def test_a_policy_on_activations_is_traced_by_its_shares(norm: str, asked) -> None:
    asks = {"method": "images", "widths": [8, 8, 16], "norm": norm}
    recipe = Recipe(task=asks, memory={"method": "comet"})
    config = task_of(recipe).look(recipe).config
    traced = Recipe(task=asks, memory={"method": "comet"}, budget={"ledger": "traced"})
    seen = Shares(0.05, 0.03, 29, 20, 1 << 17)
    for shares in (None, seen):
        choice = Choice(48, 1, recompute=False, shares=shares)
        known, found = predict(recipe, config, choice), predict(traced, config, choice)
        assert found.traced
        assert found.peak_bytes == pytest.approx(known.peak_bytes, rel=0.02)
    assert len(asked) == 2  # what was measured is another trace
    plain = predict(
        Recipe(task=asks, budget={"ledger": "traced"}), config, replace(choice, shares=None)
    )
    kept = [each.ledger.bytes("activation", "loss") for each in (found, known, plain)]
    assert kept[0] == pytest.approx(kept[1], rel=0.02)
    assert kept[0] < 0.8 * kept[2]


def test_sharded_weights_are_not_chosen_where_documents_are_computed_one_at_a_time(
    text: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bloom"
    shutil.copytree(tokenizer_folder, folder)
    (folder / "config.json").write_text(json.dumps(config_json("bloom")))
    recipe = Recipe(model={"path": str(folder)}, data={"path": str(text), "sequence_length": 32})
    with pytest.raises(InputError, match=r"data\.boundaries: this model computes") as caught:
        plan(recipe.changed(parallel__strategy="fsdp"), ranks=2)
    assert "sharded weights do not go with" in str(caught.value)
    asked = asked_of(recipe, ranks=2)
    assert {strategy_of(each.layout) for each in asked.choices(asked.recipe)} == {"ddp"}
    apart = plan(recipe, ranks=2)
    assert apart.row()["layout"]["name"] == "ddp"
    together = recipe.changed(data__boundaries=False, parallel__strategy="fsdp")
    assert plan(together, ranks=2).row()["layout"]["name"] == "fsdp"
