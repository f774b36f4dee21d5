"""Runs that train the factors of a base alone, whose ranks its spectra say: plan, resume, ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum.core.layers.full_model import COMPRESSION
from modicum.core.layers.linear_forms import forms_of
from modicum.core.layers.rank_plan import RankPlan
from modicum.core.ranks.ranks import Ranks
from modicum.models import huggingface
from modicum.planner import plan
from modicum.recipe import Recipe

pytestmark = pytest.mark.expensive
WELORE = {"method": "welore", "share": 0.8}


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    made = recipe_of(questions, model={"heads": 2, "kv_heads": 2}, training={"steps": 4})
    assert trains(Ranks(), made, folder) == "done"
    return folder / "model"


def asked(base: Path, data: Path, **sections: Any) -> dict[str, Any]:
    return recipe_of(data, **sections) | {"model": {"path": str(base)}, "compress": WELORE}


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("welore") / "run"
    assert trains(Ranks(), asked(base, questions), folder) == "done"
    return folder


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "plan.jsonl").read_text().splitlines()]


def predicted(folder: Path) -> int:
    """What stands next to the measured peak of tensors."""
    found: int = json.loads((folder / "run.json").read_text())["peak_bytes"]["predicted"]
    return found


def test_the_run_says_what_each_layer_has_and_trains_that_alone(
    base: Path, questions: Path, alone: Path
) -> None:
    said = json.loads((alone / "base" / COMPRESSION).read_text())
    ranks = RankPlan.from_json(said["ranks"])
    assert 0 < len(ranks.ranks) < len(ranks.layers)
    bound = plan(Recipe(**asked(base, questions))).prediction
    last = rows(alone)[-1]
    assert last["parameters"]["trainable"] == ranks.trained_elements < bound.trainable
    assert any("the layers' spectra are known" in row["why"] for row in rows(alone))
    assert last["prediction"]["peak_bytes"] < bound.peak_bytes
    first = rows(alone)[0]["prediction"]
    assert (first["peak_bytes"], first["counts_the_most"]) == (bound.peak_bytes, True)
    assert not last["prediction"]["counts_the_most"]
    assert predicted(alone) == last["prediction"]["peak_bytes"]
    assert last["prediction"]["ledger"] == "traced"  # arithmetic knows no layers that are frozen
    measured = json.loads((alone / "run.json").read_text())["peak_bytes"]["measured"]
    assert predicted(alone) == pytest.approx(measured, rel=0.01)
    begun, now = huggingface.load(alone / "base"), huggingface.load(alone / "compressed")
    assert forms_of(now) == forms_of(begun)
    after = dict(now.named_parameters())
    for name, before in begun.named_parameters():
        trained = name.endswith((".down", ".up"))
        assert torch.equal(before, after[name]) == (not trained), name
    assert column(alone, "loss")[-1] < column(alone, "loss")[0]


def test_killed_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = asked(base, questions)
    assert trains(Ranks(), made, tmp_path / "run", (0, 6)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)
    small = [run / "compressed/model.safetensors" for run in (tmp_path / "run", alone)]
    assert small[0].read_bytes() == small[1].read_bytes()
    told = [row["why"] for row in rows(tmp_path / "run")]
    assert sum("the layers' spectra are known" in why for why in told) == 1, told
    assert rows(tmp_path / "run")[-1]["parameters"] == rows(alone)[-1]["parameters"]
    assert predicted(tmp_path / "run") == predicted(alone)


@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP, {"strategy": "zero"}], ids=["ddp", "fsdp", "zero"])
def test_two_ranks_do_what_one_does(
    pool: Pool, base: Path, questions: Path, alone: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = asked(base, questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    both = [json.loads((run / "base" / COMPRESSION).read_text())["ranks"]
            for run in (tmp_path / "run", alone)]  # fmt: skip
    assert both[0] == both[1]
    losses = column(tmp_path / "run", "loss")
    assert losses == pytest.approx(column(alone, "loss"), rel=1e-3)


def test_random_weights_are_refused(questions: Path, tmp_path: Path) -> None:
    made = recipe_of(questions) | {"compress": WELORE}
    refused = trains(Ranks(), made, tmp_path / "run")
    assert refused.startswith("2: ")
    assert "it needs trained weights, and this model starts from random ones" in refused


def test_an_adapter_learns_on_what_is_left(base: Path, questions: Path, tmp_path: Path) -> None:
    made = asked(base, questions) | {"adapter": {"method": "lora", "rank": 3}}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    losses = column(tmp_path / "run", "loss", "evaluations")
    assert losses[-1] < losses[0]
    first, *later = rows(tmp_path / "run")
    known = next(row for row in later if "the layers' spectra are known" in row["why"])
    assert f"{known['parameters']['total']:,} parameters, where" in known["why"]
    assert known["parameters"]["total"] < first["parameters"]["total"]


def test_all_is_trained_where_that_is_asked_for(
    base: Path, questions: Path, alone: Path, tmp_path: Path
) -> None:
    made = asked(base, questions)
    made["compress"] = WELORE | {"train": "all"}
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    every = rows(tmp_path / "run")[-1]["parameters"]
    assert every["trainable"] == every["total"] == rows(alone)[-1]["parameters"]["total"]
