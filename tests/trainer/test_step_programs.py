"""Step programs that are none of our own: forward passes alone, and a teacher next to the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

import modicum
from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks

PLUGINS = Path(__file__).parents[1] / "contracts" / "plugins"
PROGRAMS = {
    # One random direction an update: a small rate, and losses that fall slowly.
    "forward_only": {"clip_norm": None, "learning_rate": 1e-3},
    "student": {"learning_rate": 3e-2},
    "keep_better": {"clip_norm": None},
}
FALL = {"forward_only": 1e-4, "student": 0.3, "keep_better": 1e-4}


def values(data: Path, name: str, **sections: Any) -> dict[str, Any]:
    training = {"steps": 12, "schedule": "constant", **PROGRAMS[name]}
    made = recipe_of(data, training=training, optimizer={"method": name}, **sections)
    if "learning_rate" not in PROGRAMS[name]:
        made["training"].pop("learning_rate", None)
    return made | {"plugins": [str(PLUGINS / f"{name}.py")]}


@pytest.fixture(scope="module", params=PROGRAMS)
def alone(
    request: pytest.FixtureRequest, questions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp(request.param) / "run"
    assert trains(Ranks(), values(questions, request.param), folder) == "done"
    return folder


def name_of(run: Path) -> str:
    return run.parent.name.rstrip("0123456789")


@pytest.mark.expensive
def test_the_loss_falls_and_the_forecast_holds(alone: Path) -> None:
    losses = column(alone, "loss", "evaluations")
    assert losses[-1] < losses[0] - FALL[name_of(alone)]
    record = json.loads((alone / "run.json").read_text())
    peak = record["peak_bytes"]
    # What the teacher makes of a batch is as large as the batch, which an optimizer's ledger does
    # not know.
    off = 0.25 if name_of(alone) == "student" else 0.15
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=off)
    newest = CheckpointStore(alone / "checkpoints").newest(lambda message: None)
    assert newest is not None
    assert ("teacher" in newest.state) == (name_of(alone) == "student")
    assert ("search" in newest.state) == (name_of(alone) == "keep_better")
    assert ("optimizer" in newest.state) == (name_of(alone) == "student")


@pytest.mark.expensive
def test_killed_they_resume_to_the_bit(alone: Path, questions: Path, tmp_path: Path) -> None:
    made = values(questions, name_of(alone))
    assert trains(Ranks(), made, tmp_path / "run", (0, 7)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_on_two_ranks_they_make_the_same_updates(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    if name_of(alone) == "student" and parallel is FSDP:
        pytest.skip("this teacher is a plain copy, which a sharded model has no room for")
    made = values(questions, name_of(alone), parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert column(tmp_path / "run", "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)


def test_what_means_nothing_without_gradients_is_refused(questions: Path) -> None:
    made = values(questions, "forward_only")
    for section, why in (
        ({"training": made["training"] | {"clip_norm": 1.0}}, "no gradients to clip"),
        ({"transform": {"method": "eva"}}, "no gradients to change"),
    ):
        with pytest.raises(InputError, match=why):
            modicum.plan(modicum.Recipe(**(made | section)))


def test_a_rate_and_what_changes_it_are_refused_where_updates_have_none(questions: Path) -> None:
    made = values(questions, "keep_better")
    assert modicum.plan(modicum.Recipe(**made)).prediction.choice.micro_batch_size
    for said, why in (
        ({"learning_rate": 2e-3}, "leave training.learning_rate out"),
        ({"schedule": "cosine"}, "set training.schedule to constant"),
        ({"warmup_steps": 3}, "leave the warm-up out"),
        ({"clip_norm": 1.0}, "no gradients to clip"),
    ):
        with pytest.raises(InputError, match=why) as refused:
            modicum.plan(modicum.Recipe(**(made | {"training": made["training"] | said})))
        assert "\n" not in str(refused.value)


def test_without_gradients_less_is_planned(questions: Path) -> None:
    made = values(questions, "forward_only")
    plain = {k: v for k, v in made.items() if k not in ("optimizer", "plugins")}
    less, more = (modicum.plan(modicum.Recipe(**each)).prediction for each in (made, plain))
    assert less.peak_bytes < 0.8 * more.peak_bytes
    assert less.ledger.bytes(phase="loss") < 0.5 * more.ledger.bytes(phase="loss")
    assert less.ledger.flops("backward") == 0 < more.ledger.flops("backward")
