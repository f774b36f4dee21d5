"""The benchmark of plans: what it draws, what it sums up, how it resumes, and the page of it."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.errors import InputError
from modicum.recipe import SLOTS, Recipe, methods_for


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("cases", "models", "one", "peer")
    found = {name: importlib.import_module(f"plan_truth_{name}") for name in names}
    return SimpleNamespace(main=importlib.import_module("plan_truth"), **found)


def row(name: str, error: float, refused: bool = False, held: float = 0.9) -> dict[str, Any]:
    """What a recipe that ran leaves behind, all its forecasts being off by `error`."""
    pair = {"predicted": 1e9 * (1 + error), "measured": 1e9, "error": error}
    return {
        "name": name, "words": ["text"], "ranks": 1, "refused": refused, "held_of_budget": held,
        "tensors": pair, "process": pair, "step": pair, "seconds": 1.0,
        "accelerate": {"why_not": "it does not ask for adapter"},
    }  # fmt: skip


def test_a_case_is_a_function_of_seed_and_number_and_all_methods_are_drawn(bench) -> None:
    cases = [bench.cases.draw(3, number) for number in range(400)]
    assert cases[7] == bench.cases.draw(3, 7)
    assert cases[7] != bench.cases.draw(4, 7)
    drawn = {case.recipe[slot]["method"] for case in cases for slot in SLOTS if slot in case.recipe}
    assert drawn == {name for slot in SLOTS for name in methods_for(slot)}
    assert {case.ranks for case in cases} == {1, 2}
    kinds = {case.raw["model_type"] for case in cases if case.raw is not None}
    assert "llama" in kinds
    assert len(kinds) > 12
    assert all(0.7 <= case.factor <= 1.4 for case in cases)


def test_what_stands_on_a_base_is_drawn_and_how_runs_read_and_write(bench) -> None:
    seen: dict[str, int] = {}
    for number in range(120):
        recipe = (case := bench.cases.draw(6, number)).recipe
        adapter, raw = recipe.get("adapter", {}), case.raw or {}
        found = {
            "an adapter on a compressed model": "compress" in recipe and "adapter" in recipe,
            "a form next to compression": "compress" in recipe and "linear" in recipe,
            "a start from an adapter": "adapter" in recipe.get("model", {}),
            "norms in full": "also" in adapter,
            "dropout": "dropout" in adapter,
            "long samples": recipe["samples"].get("tokens", 0) > 64,
            "a stream": recipe.get("data", {}).get("streaming", False),
            "an export": "export" in recipe,
            "bfloat16": raw.get("dtype") == "bfloat16",
            "float16": raw.get("dtype") == "float16",
        }
        for name, there in found.items():
            seen[name] = seen.get(name, 0) + there
    assert min(seen.values()) >= 2, seen


def test_what_a_case_names_is_made_for_its_model(bench, tmp_path) -> None:
    from modicum.planner.planning import asked_of

    raw = bench.models.sized("Llama", 64, 2, 4096, 64) | {"dtype": "bfloat16"}
    recipe = {
        "model": {"path": "{model}", "adapter": "{adapter}"},
        "adapter": {"method": "dora", "also": ["{norm}"]},
        "data": {"path": "{data}", "sequence_length": 64},
    }
    case = bench.cases.Case(0, 0, recipe, 1, "memory", 1.0, raw=raw, data="examples")
    made = bench.one.recipe_of(case, tmp_path)
    asked = asked_of(Recipe(**{**made, "adapter": {"method": "dora"}}))
    assert asked.inputs.dtypes == {"BF16"}
    assert asked.recipe.adapter["rank"] == 16
    assert made["adapter"]["also"] == ["input_layernorm"]
    assert bench.one.recipe_of(case, tmp_path) == made


def test_most_of_what_is_drawn_is_a_recipe(bench) -> None:
    refused = []
    for number in range(50):
        try:
            Recipe(**bench.cases.draw(5, number).recipe)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) < 10, refused


def test_models_of_all_architectures_have_the_size_that_was_asked_for(bench) -> None:
    import transformers

    for name in bench.models.DECODERS | bench.models.ENCODERS:
        raw = bench.models.sized(name, 384, 5, 4096, 256)
        made = transformers.AutoConfig.for_model(**raw)
        sizes = (made.hidden_size, made.num_hidden_layers, made.vocab_size)
        assert sizes == (384, 5, 4096), name


def test_it_counts_until_enough_ran_and_resumes(bench, tmp_path, monkeypatch) -> None:
    asked: list[str] = []

    def run(case: Any, work: Any) -> dict[str, Any]:
        asked.append(case.name)
        if case.number == 1:
            return {"name": case.name, "left_out": "too small"}
        return row(case.name, 0.1)

    monkeypatch.setattr(bench.main, "estimate", lambda case: {"predicted": 2e9})
    progress = tmp_path / "rows.jsonl"
    rows = bench.main.measured(9, 2, progress, tmp_path, run)
    assert asked == ["9-0", "9-1", "9-2"]
    assert rows[0]["accelerate"]["error"] == 1
    assert bench.main.measured(9, 3, progress, tmp_path, run)[:3] == rows
    assert asked == ["9-0", "9-1", "9-2", "9-3"]


def test_the_figures_are_medians_worst_ones_and_shares(bench) -> None:
    rows = [row("a", 0.01), row("b", -0.2, held=1.01), row("c", 0.03, refused=True, held=0.8)]
    rows += [row("d", 0.02, refused=True), {"left_out": "why"}, {"failed": "why"}]
    found = bench.main.summed(rows)
    assert (found["run"], found["left_out"], found["failed"]) == (4, 1, 1)
    assert found["median_error"]["step"] == pytest.approx(0.025)
    assert found["worst_error"]["tensors"] == 0.2
    assert (found["fits"], found["fits_that_exceed"]) == (2, 1)
    assert (found["refused"], found["refused_rightly"]) == (2, 0.5)
    assert found["accelerate"]["answers"] == 0


def test_what_was_measured_is_read_from_the_run(bench, tmp_path) -> None:
    peak = {"predicted": 300, "measured": 310, "base": 50, "process": 400, "process_predicted": 380}
    (tmp_path / "run.json").write_text(json.dumps({"peak_bytes": peak}))
    plans = [
        {
            "why": why,
            "tokens_per_update": 100,
            "prediction": {"ledger": "traced", "tokens_per_second": rate},
            "choices": [],
        }
        for why, rate in (
            ("first plan", 10.0),
            ("the layers' spectra are known: fewer", 50.0),
            ("speed measured over 5 steps", 25.0),
        )
    ]
    (tmp_path / "plan.jsonl").write_text("".join(json.dumps(plan) + "\n" for plan in plans))
    steps = "\n".join(json.dumps({"seconds": each}) for each in (9, 9, 4, 5, 3))
    (tmp_path / "metrics.jsonl").write_text(steps)
    found = bench.one._measured(tmp_path, {"kind": "tensors", "budget": 700})
    assert found["process"]["error"] == pytest.approx(330 / 350 - 1)
    assert found["step"] == {"predicted": 2, "measured": 4, "error": -0.5}
    assert found["held_of_budget"] == 0.5


def test_accelerate_answers_for_full_training_by_adam_alone(bench) -> None:
    case = bench.cases.Case(0, 0, {"training": {"precision": "fp32"}}, 1, "memory", 1.0)
    assert "transformers" in bench.peer.estimate(case)["why_not"]
    raw = bench.models.sized("GPT-2", 64, 2, 512, 64)
    small = bench.cases.Case(0, 0, case.recipe, 1, "memory", 1.0, raw=raw)
    weights = 4 * (512 * 64 + 66 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64)
    assert bench.peer.estimate(small)["predicted"] == 4 * weights
    for slot in ("adapter", "optimizer", "transform", "memory", "comm"):
        other = bench.cases.Case(
            0, 0, {**case.recipe, slot: {"method": "lora"}}, 1, "memory", 1.0, raw=raw
        )
        assert "why_not" in bench.peer.estimate(other)


def test_the_page_shows_every_recipe_that_ran(bench, monkeypatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(ROOT / "docs")
    forecasts = importlib.import_module("forecasts")
    assert "Nothing is measured yet" in forecasts.page(None)
    rows = [row("a", 0.01), row("b", -0.2, refused=True), {"left_out": "why"}]
    found = {**bench.main.summed(rows), "rows": rows, "settings": {"seed": 4}}
    page = forecasts.page(found)
    assert "| tensor" in page
    assert "-20.0% | -20.0% | -20.0% | 0.90, refused" in page
