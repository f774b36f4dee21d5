"""Monarch in runs whose layers become dense on the way: kills, ranks, budgets, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, HYBRID, column, outcome, recipe_of, rows, trains

import modicum
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.models import read_config
from modicum.recipe import Recipe

ZERO = {"strategy": "zero"}
AFTER = 6


def values(data: Path, after: int | None = AFTER, **sections: Any) -> dict[str, Any]:
    """12 updates, after six of which the layers are dense."""
    training = {"steps": 12, "schedule": "constant", "learning_rate": 1e-2}
    linear = {"method": "monarch", "blocks": 2, "share": 0.5, "exclude": ["o_proj"]}
    if after is not None:
        linear["dense_after"] = after
    return recipe_of(data, training=training, linear=linear, **sections)


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("monarch") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


def surgeries(folder: Path) -> list[dict[str, Any]]:
    return [row for row in rows(folder, "plan") if "surgery" in row]


@pytest.mark.expensive
def test_layers_are_dense_from_an_update_on_and_compute_what_they_did(
    alone: Path, questions: Path, tmp_path: Path
) -> None:
    [seen] = surgeries(alone)
    assert seen["surgery"]["step"] == AFTER
    assert len(seen["surgery"]["dense"]) == 12
    assert trains(Ranks(), values(questions, None), tmp_path) == "done"
    one, other = column(alone, "loss"), column(tmp_path, "loss")
    assert one[:AFTER] == other[:AFTER]
    assert one[AFTER] == pytest.approx(other[AFTER], rel=1e-5)
    assert one[AFTER + 1] != pytest.approx(other[AFTER + 1], rel=1e-5)
    assert one[-1] < one[0]
    assert read_config(alone / "model").forms.plain
    assert not (alone / "compressed").exists()


@pytest.mark.expensive
def test_killed_on_either_side_of_it_a_run_resumes(
    alone: Path, questions: Path, tmp_path: Path
) -> None:
    for name, step in (("before", AFTER - 1), ("at", AFTER), ("after", AFTER + 1)):
        assert trains(Ranks(), values(questions), tmp_path / name, (0, step)).startswith("4: ")
        assert trains(Ranks(), values(questions), tmp_path / name) == "done"
        assert outcome(tmp_path / name) == outcome(alone)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [(2, DDP), (2, FSDP), (2, ZERO), (4, HYBRID)],
    ids=["ddp", "fsdp", "zero", "hybrid"],
)
def test_ranks_do_what_one_process_does(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    made, run = values(questions, parallel=parallel), tmp_path / "run"
    if ranks == 2:
        ended = pool.run(trains, made, run, (0, AFTER + 1), ranks=ranks)
        assert all(each.startswith("4: ") for each in ended)
    assert pool.run(trains, made, run, ranks=ranks) == ["done"] * ranks
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    assert [row["surgery"] for row in surgeries(run)] == [
        row["surgery"] for row in surgeries(alone)
    ]


@pytest.mark.expensive
@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon", "galore", "soap"])
def test_optimizers_begin_anew_with_the_dense_weights(
    questions: Path, tmp_path: Path, optimizer: str
) -> None:
    made = values(questions, optimizer={"method": optimizer}, evaluation={"every": 12})
    assert trains(Ranks(), made, tmp_path, (0, AFTER + 1)).startswith("4: ")
    assert trains(Ranks(), made, tmp_path) == "done"
    assert len(surgeries(tmp_path)) == 1


def test_a_plan_counts_what_is_there_when_layers_are_dense(questions: Path) -> None:
    dense = modicum.plan(Recipe(**(values(questions) | {"linear": None})))
    later, never = (modicum.plan(Recipe(**values(questions, each))) for each in (AFTER, None))
    assert never.prediction.trainable < dense.prediction.trainable
    assert later.prediction.peak_bytes >= dense.prediction.peak_bytes
    assert later.prediction.peak_bytes > never.prediction.peak_bytes


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ({"comm": {"method": "dear"}}, "leave comm out"),
        ({"optimizer": {"method": "frugal"}}, "set optimizer.part to another than tensors"),
        ({"training": {"compile": "blocks"}}, "set training.compile to none"),
        ({"evaluation": {"keep_best": True}}, "weights of earlier shapes cannot be exported"),
    ],
)
def test_what_does_not_go_with_it_is_refused(
    questions: Path, section: dict[str, Any], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        Recipe(**(values(questions) | section))
    Recipe(**(values(questions, None) | section))
