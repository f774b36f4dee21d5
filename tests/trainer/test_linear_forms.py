"""Forms that train, in runs: a plugin's and low-rank factors, alone, on two ranks, interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains
from torch import Tensor, nn

from modicum.core.contracts.run_hooks import ExtraLoss, RunHook
from modicum.core.contracts.weight_terms import WeightTerm, row_squares
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part
from modicum.linears import LowRank
from modicum.models import ModelConfig, create, read_config

ZERO = {"strategy": "zero"}
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
    monkeypatch.setattr(LowRank, "run_hook", lambda self, bound: Small(bound.model))
    assert trains(Ranks(), values(questions, "low_rank"), tmp_path / "run") == "done"
    terms = column(tmp_path / "run", "extra_loss")
    assert len(terms) == 12
    assert terms[-1] < terms[0]


class Decay(WeightTerm):
    """A term of the squares of all factors, as a method has it that knows no layout."""

    def term(self) -> tuple[float, Iterable[tuple[str, Tensor]]]:
        own = {n: p for n, p in self.parameters.items() if n.endswith((".down", ".up"))}
        squares = row_squares(own, self.ranks)
        value = 0.05 * float(torch.stack([each.sum() for each in squares.values()]).sum())
        return value, ((name, 0.1 * own_part(p.detach())[0]) for name, p in own.items())


def decaying(ranks: Ranks, made: dict[str, Any], folder: Path, *stop: Any) -> str:
    """Train as a rank, with that term."""
    before = LowRank.run_hook
    LowRank.run_hook = lambda self, bound: Decay(bound.parameters, bound.ranks)  # type: ignore[method-assign]
    try:
        return trains(ranks, made, folder, *stop)
    finally:
        LowRank.run_hook = before  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def decayed(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decayed") / "run"
    assert decaying(Ranks(), values(questions, "low_rank"), folder) == "done"
    return folder


@pytest.mark.expensive
def test_a_term_of_weights_counts_once_an_update(
    decayed: Path, questions: Path, tmp_path: Path
) -> None:
    """Rows have unequal counts of tokens, and seven make four micro-batches, or one."""
    config = read_config(decayed / "compressed")
    assert isinstance(config, ModelConfig)
    factors = [p for n, p in create(config, 0).named_parameters() if n.endswith((".down", ".up"))]
    begun = 0.05 * sum(p.detach().double().square().sum().item() for p in factors)
    terms = column(decayed, "extra_loss")
    assert terms[0] == pytest.approx(begun, rel=1e-6)
    assert terms[-1] < terms[0]
    made = values(questions, "low_rank")
    made["training"] |= {"micro_batch_size": 7}
    assert decaying(Ranks(), made, tmp_path / "run") == "done"
    for key in ("loss", "extra_loss", "gradient_norm"):
        assert column(tmp_path / "run", key) == pytest.approx(column(decayed, key), rel=1e-4)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO], ids=["ddp", "fsdp", "zero"])
def test_a_term_of_weights_is_the_same_on_two_ranks(
    pool: Pool, decayed: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(questions, "low_rank", parallel=parallel)
    assert pool.run(decaying, made, tmp_path / "run", ranks=2) == ["done"] * 2
    for key in ("loss", "extra_loss", "gradient_norm"):
        assert column(tmp_path / "run", key) == pytest.approx(column(decayed, key), rel=1e-4)


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


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [FSDP, ZERO], ids=["fsdp", "zero"])
def test_one_rank_two_and_one_again(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    run, made = tmp_path / "run", values(questions, name_of(alone))
    assert trains(Ranks(), made, run, (0, 4)).startswith("4: ")
    both = values(questions, name_of(alone), parallel=parallel)
    assert all(said[:3] == "4: " for said in pool.run(trains, both, run, (0, 8), ranks=2))
    assert trains(Ranks(), made, run) == "done"
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
