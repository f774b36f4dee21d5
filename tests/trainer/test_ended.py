"""A method ends for good in the middle of a run: the plan, kills on either side, forks, ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import FSDP, outcome, recipe_of, rows, trains

from modicum.core.ranks.ranks import Ranks

pytestmark = pytest.mark.ranks


def values(data: Path, **sections: Any) -> dict[str, Any]:
    """20 updates under MKOR-H that looks at the loss in every update, and expects much."""
    hybrid = {"hybrid": True, "hybrid_after": 3, "hybrid_window": 1, "hybrid_share": 0.9}
    return recipe_of(
        data,
        training={"steps": 20, "schedule": "constant"},
        transform={"method": "mkor", "every": 2, **hybrid},
        evaluation={"every": 99, "rows": 5},
        checkpoint={"every": 2, "asynchronous": False, "keep": 9},
        **sections,
    )


def ended(folder: Path) -> list[dict[str, Any]]:
    return [row["ended"] for row in rows(folder, "plan") if "ended" in row]


@pytest.fixture(scope="module")
def calm(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


def test_the_plan_has_a_revision_without_what_the_method_spends(calm: Path) -> None:
    (end,) = ended(calm)
    assert end["section"] == "transform"
    assert 4 <= end["step"] < 18  # both sides of it are of some updates
    before, after = (
        next(row for row in rows(calm, "plan") if ("ended" in row) is over)
        for over in (False, True)
    )
    assert after["why"].startswith(f"after step {end['step']}: mkor has ended, as the loss fell")
    spent = [
        {line["what"] for line in row["prediction"]["table"] if "what" in line}
        for row in (before, after)
    ]
    assert "inverse factors" in spent[0] - spent[1]
    peaks = [row["prediction"]["peak_bytes"] for row in (before, after)]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize("side", [-2, 1], ids=["before", "after"])
def test_a_run_that_is_stopped_on_either_side_ends_alike(
    questions: Path, calm: Path, tmp_path: Path, side: int
) -> None:
    (end,) = ended(calm)
    stop = (0, end["step"] + side)
    assert trains(Ranks(), values(questions), tmp_path / "run", stop).startswith("4: ")
    assert trains(Ranks(), values(questions), tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(calm)
    assert ended(tmp_path / "run") == [end]


@pytest.mark.expensive
def test_a_fork_takes_the_end_over(questions: Path, calm: Path, tmp_path: Path) -> None:
    made = values(questions)
    made["training"]["steps"] = 24
    assert trains(Ranks(), made, tmp_path / "fork", fork=calm) == "done"
    assert ended(tmp_path / "fork") == ended(calm)
    assert len(rows(tmp_path / "fork")) == 4


@pytest.mark.expensive
def test_sharded_over_ranks_it_ends_and_resumes_to_the_bit(
    pool: Pool, questions: Path, calm: Path, tmp_path: Path
) -> None:
    made = values(questions, parallel=FSDP)
    assert set(pool.run(trains, made, tmp_path / "run", ranks=2)) == {"done"}
    (end,) = ended(tmp_path / "run")
    for side in (-2, 1):
        folder, stop = tmp_path / f"stopped {side}", (1, end["step"] + side)
        said = pool.run(trains, made, folder, stop, ranks=2)
        assert all(text.startswith("4: ") for text in said)
        assert set(pool.run(trains, made, folder, ranks=2)) == {"done"}
        assert outcome(folder) == outcome(tmp_path / "run")
        assert ended(folder) == [end]
