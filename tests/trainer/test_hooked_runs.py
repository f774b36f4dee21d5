"""A method that takes part in a run by hooks alone: its loss, its state, kills and ranks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import (
    DDP,
    FSDP,
    column,
    outcome,
    recipe_of,
    rows,
    trains,
)

from modicum.checkpoint import CheckpointStore
from modicum.core.ranks.ranks import Ranks

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "pull.py"
STEPS = 30  # of 7 rows out of some 140: an epoch and a half


def values(data: Path, **sections: Any) -> dict[str, Any]:
    training = {"steps": STEPS}
    pull = {"method": "pull", "strength": 0.01}
    made = recipe_of(data, training=training, transform=pull, **sections)
    return made | {"plugins": [str(PLUGIN)]}


def state(folder: Path) -> dict[str, Any]:
    found = CheckpointStore(folder / "checkpoints").newest(lambda message: None)
    assert found is not None
    return dict(found.state["transform"])


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooked") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


@pytest.mark.expensive
def test_the_term_is_in_the_metrics_and_grows_with_the_epochs(alone: Path) -> None:
    extra = column(alone, "extra_loss")
    assert len(extra) == STEPS
    grown = [step for step, (a, b) in enumerate(pairwise(extra), start=1) if b > 1.5 * a]
    assert len(grown) == 1
    assert STEPS // 2 < grown[0] < STEPS
    assert state(alone) == {"updates": STEPS, "epochs": 1}


@pytest.mark.expensive
def test_killed_it_resumes_to_the_bit(questions: Path, alone: Path, tmp_path: Path) -> None:
    made = values(questions)
    assert trains(Ranks(), made, tmp_path / "run", (0, 27)).startswith("4: stopped")
    assert len(rows(tmp_path / "run")) == 27
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)
    assert column(tmp_path / "run", "extra_loss") == column(alone, "extra_loss")
    assert state(tmp_path / "run") == state(alone)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_on_two_ranks_it_is_the_same_term(
    pool: Pool,
    questions: Path,
    alone: Path,
    tmp_path: Path,
    parallel: dict[str, Any],
) -> None:
    made = values(questions, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    for key in ("loss", "gradient_norm", "extra_loss"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=1e-4)
