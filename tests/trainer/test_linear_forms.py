"""Forms that train, in runs: a plugin's and low-rank factors, alone, on two ranks, interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains
from torch import nn

from modicum.core.contracts.run_hooks import ExtraLoss, RunHook
from modicum.core.ranks.ranks import Ranks
from modicum.linears import LowRank
from modicum.models import read_config

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "block_diagonal.py"
FORMS: dict[str, dict[str, Any]] = {
    "block_diagonal": {"method": "block_diagonal", "blocks": 2, "exclude": ["o_proj"]},
    "low_rank": {"method": "low_rank", "share": 0.6},
    "monarch": {"method": "monarch", "blocks": 2},
    "lost": {"method": "lost", "share": 0.6, "channels": 0.1},
}


def values(data: Path, name: str, **sections: Any) -> dict[str, Any]:
    training = {"steps": 12, "schedule": "constant", "learning_rate": 1e-2}
    made = recipe_of(data, training=training, linear=FORMS[name], **sections)
    return made | {"plugins": [str(PLUGIN)]}


@pytest.fixture(scope="module", params=FORMS)
def alone(
    request: pytest.FixtureRequest, questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    assert trains(Ranks(), values(questions, request.param), folder) == "done"
    return folder


def name_of(run: Path) -> str:
    return run.parent.name.rstrip("0123456789")


@pytest.mark.expensive
def test_the_loss_falls_and_the_small_export_holds_the_plan(alone: Path) -> None:
    losses = column(alone, "loss", "evaluations")
    assert losses[-1] < losses[0] - 0.1
    peak = json.loads((alone / "run.json").read_text())["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.15)
    dense = name_of(alone) != "lost"  # whose layers no dense weight represents
    small = alone / ("compressed" if dense else "model")
    forms = read_config(small).forms.layers
    assert {form.name for form in forms.values()} == {name_of(alone)}
    assert read_config(alone / "model").forms.plain == dense == (alone / "compressed").exists()


@pytest.mark.expensive
def test_killed_they_resume_to_the_bit(alone: Path, questions: Path, tmp_path: Path) -> None:
    made = values(questions, name_of(alone))
    assert trains(Ranks(), made, tmp_path / "run", (0, 7)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


class Small(RunHook):
    """A term of the factors' sizes."""

    def __init__(self, model: nn.Module) -> None:
        self.factors = [p for name, p in model.named_parameters() if name.endswith(".up")]

    def extra_loss(self) -> ExtraLoss:
        return ExtraLoss(torch.stack([p.square().sum() for p in self.factors]).sum())


@pytest.mark.expensive
def test_a_form_may_take_part_by_hooks(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LowRank, "run_hook", lambda self, bound: Small(bound))
    assert trains(Ranks(), values(questions, "low_rank"), tmp_path / "run") == "done"
    terms = column(tmp_path / "run", "extra_loss")
    assert len(terms) == 12
    assert terms[-1] < terms[0]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_on_two_ranks_they_make_the_same_updates_and_resume(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(questions, name_of(alone), parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert column(tmp_path / "run", "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    stopped = pool.run(trains, made, tmp_path / "stopped", (0, 7), ranks=2)
    assert all(said.startswith("4: ") for said in stopped)
    assert pool.run(trains, made, tmp_path / "stopped", ranks=2) == ["done"] * 2
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")
