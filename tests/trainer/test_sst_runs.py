"""SST in runs: swaps and an SVD on the way, kills on either side, ranks, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum.core.ranks.ranks import Ranks
from modicum.models import read_config
from modicum.verify import verify_export

ZERO = {"strategy": "zero"}
INTERVAL = 3


def values(data: Path, **sections: Any) -> dict[str, Any]:
    """12 updates; of k_proj and v_proj a round is two swaps, so the second has an SVD."""
    training = {"steps": 12, "schedule": "constant", "learning_rate": 1e-2}
    linear = {"method": "sst", "rank": 9, "interval": INTERVAL, "exclude": ["o_proj"]}
    return recipe_of(data, training=training, linear=linear, **sections)


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sst") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


@pytest.mark.expensive
def test_it_learns_and_leaves_dense_weights_alone(alone: Path) -> None:
    losses = column(alone, "loss", "evaluations")
    assert losses[-1] < losses[0] - 0.1
    assert read_config(alone / "model").forms.plain
    assert not (alone / "compressed").exists()  # all of U and V are more numbers than the weight
    seen = verify_export(alone)
    assert seen.findings == []
    assert [check["check"] for check in seen.checks][1:] == ["exported"]


@pytest.mark.expensive
def test_killed_on_either_side_of_a_swap_it_resumes_to_the_bit(
    alone: Path, questions: Path, tmp_path: Path
) -> None:
    for step in (INTERVAL - 1, INTERVAL, 2 * INTERVAL, 2 * INTERVAL + 1):
        run = tmp_path / str(step)
        assert trains(Ranks(), values(questions), run, (0, step)).startswith("4: ")
        assert trains(Ranks(), values(questions), run) == "done"
        assert outcome(run) == outcome(alone)


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("parallel", [DDP, FSDP, ZERO], ids=["ddp", "fsdp", "zero"])
def test_two_ranks_do_what_one_process_does_and_resume(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    made = values(questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert column(tmp_path / "run", "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    run = tmp_path / "other"  # on one rank, two, and one again
    assert trains(Ranks(), values(questions), run, (0, INTERVAL)).startswith("4: ")
    assert all(s[:2] == "4:" for s in pool.run(trains, made, run, (0, 2 * INTERVAL), ranks=2))
    assert trains(Ranks(), values(questions), run) == "done"
    assert column(run, "loss") == pytest.approx(column(alone, "loss"), rel=1e-3)
    for step in (INTERVAL, INTERVAL + 1):
        run = tmp_path / str(step)
        assert all(said[:2] == "4:" for said in pool.run(trains, made, run, (0, step), ranks=2))
        assert pool.run(trains, made, run, ranks=2) == ["done"] * 2
        assert outcome(run) == outcome(tmp_path / "run")
