"""Adapters on files in bf16 or fp16: what weights are held in, by the plan, at work, afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file, save_file
from tests.trainer.conftest import full, lora, losses, outcome, run
from tests.trainer.test_ranks import column, trains

import modicum
from modicum.core.errors import InputError
from modicum.models.huggingface import load
from modicum.planner.precision import EXPORT, PRECISION, settled
from modicum.recipe import Recipe
from modicum.recipe_yaml import dump
from modicum.tasks import CausalLM
from modicum.trainer import continued, train


def in_dtype(finished: Path, folder: Path, dtype: torch.dtype) -> Path:
    """The finished model's folder with all its tensors in a dtype."""
    shutil.copytree(finished / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    halved = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def half(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model whose files are bf16."""
    return in_dtype(finished, tmp_path_factory.mktemp("half") / "model", torch.bfloat16)


def choice(plan: modicum.Plan) -> dict[str, Any]:
    return next((row for row in plan.choices if row["field"] == PRECISION), {})


@pytest.mark.parametrize(
    ("dtypes", "adapted", "precision", "why"),
    [
        ({"BF16"}, True, "bf16", "stay bf16, as the files hold them"),
        ({"BF16"}, False, "fp32", "all weights are trained"),
        ({"F16", "F32"}, True, "fp32", "need a loss scaler"),
        ({"BF16", "F32"}, True, "fp32", "nothing is rounded unasked"),
        ({"F32"}, True, "fp32", None),
        ((), False, "fp32", None),
    ],
)
def test_auto_rounds_nothing(
    dtypes: set[str], adapted: bool, precision: str, why: str | None
) -> None:
    extra: dict[str, Any] = {"adapter": {"method": "lora"}} if adapted else {}
    recipe = Recipe(model={"path": "a folder"}, **extra)
    made, rows = settled(recipe, dtypes)
    assert made.training.precision == precision
    assert [why in row["why"] for row in rows] == ([] if why is None else [True])
    said = recipe.changed(training__precision="fp32")
    assert settled(said, dtypes) == (said, [])


@pytest.mark.expensive
def test_a_frozen_base_in_bf16_stays_what_it_is(dataset, half, tmp_path):
    values = lora(half, dataset)
    plan = modicum.plan(Recipe(**values))
    assert choice(plan)["value"] == plan.recipe.training.precision == "bf16"
    content = train(plan, tmp_path / "run", listener=lambda _: None)
    total, trained = content["parameters"]["total"], content["parameters"]["trainable"]
    weights = 2 * (total - trained) + 4 * trained
    assert content["measured_by_kind"]["weight"] == weights
    assert plan.prediction.ledger.bytes("weight") == weights
    traced = modicum.plan(Recipe(**values | {"budget": {"ledger": "traced"}}))
    assert traced.prediction.traced
    assert traced.prediction.ledger.bytes("weight") == weights
    # At this size kernels' scalars count.
    assert traced.prediction.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=0.03)
    said = lora(half, dataset, training={"precision": "bf16"})
    assert modicum.plan(Recipe(**said)).prediction.peak_bytes == plan.prediction.peak_bytes
    kept = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float32}


def test_full_training_of_files_in_bf16_is_fp32(dataset, half):
    plan = modicum.plan(Recipe(**full(dataset) | {"model": {"path": str(half)}}))
    assert (choice(plan)["value"], plan.prediction.half) == ("fp32", False)
    assert modicum.plan(Recipe(**full(dataset))).choices == tuple(
        row for row in plan.choices if row["field"] not in (PRECISION, EXPORT)
    )


@pytest.fixture(scope="session")
def fp16(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model whose files are fp16."""
    return in_dtype(finished, tmp_path_factory.mktemp("fp16") / "model", torch.float16)


def test_a_frozen_base_in_fp16_stays_what_it_is(dataset, fp16, tmp_path):
    values = lora(fp16, dataset, training={"steps": 6})
    plan = modicum.plan(Recipe(**values))
    assert [row["value"] for row in plan.choices[:2]] == ["fp32", "fp16"]
    content = train(plan, tmp_path / "run", listener=lambda _: None)
    assert plan.prediction.ledger.bytes("weight") == content["measured_by_kind"]["weight"]
    plain = Recipe(**values | {"linear": {"method": "dense"}})
    dense = modicum.plan(plain)
    held = dense.prediction.ledger.bytes("weight") - plan.prediction.ledger.bytes("weight")
    matrices = [t for n, t in load_file(fp16 / "model.safetensors").items() if "proj" in n]
    assert held == sum(2 * tensor.numel() for tensor in matrices)
    train(dense, tmp_path / "dense", listener=lambda _: None)
    assert losses(tmp_path / "run") == losses(tmp_path / "dense")
    assert outcome(tmp_path / "run")["weights"] == outcome(tmp_path / "dense")["weights"]


@pytest.mark.expensive
def test_fp16_resumes_to_the_bit_though_no_recipe_names_it(dataset, fp16, tmp_path):
    constant = {"schedule": "constant"}
    for steps in (4, 8):
        recipe = Recipe(**lora(fp16, dataset, training=constant | {"steps": steps}))
        plan = continued(recipe, tmp_path / "parts")
        assert (plan.recipe.linear or {})["method"] == "fp16"
        train(plan, tmp_path / "parts", listener=lambda _: None)
    run(lora(fp16, dataset, training=constant | {"steps": 8}), tmp_path / "straight")
    assert outcome(tmp_path / "parts")["weights"] == outcome(tmp_path / "straight")["weights"]


def test_a_run_of_fp16_files_in_fp32_stays_as_it_began(dataset, fp16, tmp_path):
    folder, short = tmp_path / "run", {"steps": 2, "schedule": "constant", "precision": "fp32"}
    run(lora(fp16, dataset, training=short), folder)
    recipe = Recipe(**lora(fp16, dataset, training={"steps": 4, "schedule": "constant"}))
    assert continued(recipe, folder).recipe.linear is None


@pytest.mark.parametrize(
    ("more", "form"),
    [
        ({"adapter": {"method": "pissa"}}, None),
        ({"adapter": {"method": "lora"}, "linear": {"method": "nf4"}}, "nf4"),
        ({"adapter": {"method": "lora"}, "linear": {"method": "dense"}}, "dense"),
        ({}, None),
    ],
)
def test_where_fp16_is_not_chosen(more: dict[str, Any], form: str | None) -> None:
    made, _ = settled(Recipe(model={"path": "a folder"}, **more), {"F16"})
    assert (made.linear or {}).get("method") == form


@pytest.mark.expensive
def test_it_resumes_to_the_bit_and_by_other_words(dataset, half, tmp_path):
    straight, parts = tmp_path / "straight", tmp_path / "parts"
    run(lora(half, dataset), straight)
    for steps in (7, 20):
        recipe = Recipe(**lora(half, dataset, training={"steps": steps, "schedule": "constant"}))
        plan = continued(recipe, parts)
        assert choice(plan)["value"] == "bf16"
        train(plan, parts, listener=lambda _: None)
    other = tmp_path / "other"
    run(lora(half, dataset, training={"schedule": "constant"}), other)
    assert losses(parts) == losses(other)
    assert outcome(parts)["weights"] == outcome(other)["weights"]
    assert "precision: bf16" in (straight / "recipe.yaml").read_text()
    said = Recipe(**lora(half, dataset, training={"precision": "bf16"}))
    left_open = Recipe(**lora(half, dataset))
    assert continued(said, straight).recipe == continued(left_open, straight).recipe


def test_a_run_of_before_stays_fp32(dataset, half, tmp_path):
    """Its recipe.yaml has the default of then, and the user's file says nothing."""
    folder = tmp_path / "run"
    short = {"steps": 5, "schedule": "constant"}
    run(lora(half, dataset, training=short | {"precision": "fp32"}), folder)
    plan = continued(Recipe(**lora(half, dataset, training=short | {"steps": 10})), folder)
    assert plan.recipe.training.precision == "fp32"
    assert "fp32" in dump(plan.recipe)
    train(plan, folder, listener=lambda _: None)
    run(
        lora(half, dataset, training=short | {"steps": 10, "precision": "fp32"}),
        tmp_path / "straight",
    )
    assert losses(folder) == losses(tmp_path / "straight")
    with pytest.raises(InputError, match=r"training\.precision: 'fp32' -> 'bf16'"):
        continued(Recipe(**lora(half, dataset, training=short | {"precision": "bf16"})), folder)


def test_begun_anew_it_has_the_precision_that_it_had(dataset, half, tmp_path):
    folder, short = tmp_path / "run", {"steps": 3}
    run(lora(half, dataset, training=short | {"precision": "fp32"}), folder)
    plan = continued(Recipe(**lora(half, dataset, training=short)), folder, restart=True)
    assert plan.recipe.training.precision == "fp32"


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_quantized_base_of_files_in_bf16(dataset, half, tmp_path, form):
    values = lora(half, dataset, training={"steps": 3}) | {"linear": {"method": form}}
    plan = modicum.plan(Recipe(**values))
    content = train(plan, tmp_path / "run", listener=lambda _: None)
    assert plan.prediction.ledger.bytes("weight") == content["measured_by_kind"]["weight"]
    model = load(half, dtype=torch.bfloat16, linear=form)
    held = {id(p): p.nbytes for p in model.parameters()}
    trained = content["parameters"]["trainable"]
    assert content["measured_by_kind"]["weight"] == sum(held.values()) + 4 * trained


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero"])
def test_ranks_hold_it_too(pool: Pool, dataset, half, tmp_path, strategy):
    values = lora(half, dataset, training={"steps": 6}, adapter={"method": "lora", "rank": 4})
    run(values, tmp_path / "alone")
    values["parallel"] = {"strategy": strategy}
    assert pool.run(trains, values, tmp_path / "run") == ["done"] * 2
    expected = column(tmp_path / "alone", "loss")
    assert column(tmp_path / "run", "loss") == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluations_are_rehearsed_in_the_run_s_precision(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    seen: list[bool] = []
    evaluate = CausalLM.evaluate

    def spied(task: CausalLM, model: Any, batch: Any) -> dict[str, float]:
        seen.append(torch.is_autocast_enabled("cpu"))
        return evaluate(task, model, batch)

    monkeypatch.setattr(CausalLM, "evaluate", spied)
    run(full(dataset, training={"steps": 1, "precision": precision}), tmp_path / "run")
    # Rehearsed, before the first update, and after the last.
    assert len(seen) >= 3
    assert set(seen) == {precision == "bf16"}
