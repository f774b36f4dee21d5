"""A rank that dies or stops at any moment of a run is named, all end, and the run resumes."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import outcome, recipe_of, trains

from modicum.core.errors import ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.comm.fault_moments import COMPILING, strike_at
from modicum.recipe import Recipe
from modicum.trainer import continued, train
from modicum.trainer.rank_watch import watched_start

C4 = {"method": "c4", "silent_seconds": 3.0}
SOON = 20.0  # ten seconds, and as many for a machine that does other things


def struck(
    ranks: Ranks, values: dict[str, Any], folder: Path, moment: str, guilty: int, what: str
) -> str:
    """Train as `modicum train` does; how it ended, where the watch did not end the process."""
    when = folder.parent / "when"

    def strike() -> None:
        when.write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)

    if ranks.rank == guilty:
        strike_at(moment, strike)
    recipe = Recipe(**values)
    try:
        with watched_start(recipe, folder, ranks):
            train(continued(recipe, folder, ranks=ranks), folder, ranks=ranks)
    except ModicumError as error:
        return f"{error.exit_code}: {error}"
    return "done"


@pytest.fixture(scope="module")
def calm(pool: Pool, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What comes of the run to which nothing happens."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert pool.run(trains, recipe_of(questions), folder, ranks=2) == ["done"] * 2
    return outcome(folder)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize(
    ("moment", "guilty"),
    [("data", 0), (COMPILING, 0), ("rehearsal", 1), ("update", 0), ("save", 1), ("writing", 0),
     ("writing", 1)],
)  # fmt: skip
def test_a_rank_that_dies_is_named_and_the_run_resumes(
    pool: Pool, questions: Path, tmp_path: Path, calm: dict[str, Any], moment: str, guilty: int
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    compiles = {"compile": "blocks"} if moment == COMPILING else {}
    wanted = values | {"training": values["training"] | compiles}
    found = pool.run(struck, wanted, folder, moment, guilty, "killed", ranks=2, lost=(0, 1))
    assert time.time() - float((tmp_path / "when").read_text()) < SOON
    if (said := found[1 - guilty]) is not None:  # else the watch ended it, with exit code 4
        assert said.startswith(f"4: rank {guilty} (host ")
        assert said.endswith("the same command resumes from the last checkpoint")
    rows = [json.loads(line) for line in (folder / "anomalies.jsonl").read_text().splitlines()]
    assert (rows[-1]["kind"], rows[-1]["rank"], rows[-1]["ends"]) == ("dead", guilty, True)
    assert f"rank {guilty} (host " in rows[-1]["sentence"]
    assert " is dead since " in rows[-1]["sentence"]
    if moment != COMPILING:  # which would take a minute
        assert pool.run(trains, values, folder, ranks=2) == ["done"] * 2
        assert outcome(folder) == calm


def ended_record(folder: Path) -> dict[str, Any]:
    """run.json, once it says that the run has ended: of a stopped rank 0 the agent writes it.

    The agent does so when that rank is gone, so a moment after it.
    """
    while True:
        kept: dict[str, Any] = json.loads((folder / "run.json").read_text())
        if (
            kept["status"] != "running"
            or time.time() - float((folder.parent / "when").read_text()) > SOON
        ):
            return kept
        time.sleep(0.05)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize(("moment", "guilty"), [(COMPILING, 0), ("save", 1), ("writing", 1)])
def test_a_rank_that_stops_is_named_and_all_end(
    pool: Pool, questions: Path, tmp_path: Path, calm: dict[str, Any], moment: str, guilty: int
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    compiles = {"compile": "blocks"} if moment == COMPILING else {}
    wanted = values | {"training": values["training"] | compiles}
    pool.run(struck, wanted, folder, moment, guilty, "stopped", ranks=2, lost=(0, 1))
    assert time.time() - float((tmp_path / "when").read_text()) < SOON
    kept = ended_record(folder)
    assert (kept["status"], kept["failed_by"]) == ("interrupted", "PeerLost")
    assert kept["error"].startswith(f"rank {guilty} (host ")
    assert " is stopped since 3 s" in kept["error"]
    if moment != COMPILING:
        assert pool.run(trains, values, folder, ranks=2) == ["done"] * 2
        assert outcome(folder) == calm


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_rank_that_is_gone_before_anybody_watches_is_named(
    pool: Pool, questions: Path, tmp_path: Path, guilty: int, what: str
) -> None:
    values, folder = recipe_of(questions, watchdog=C4), tmp_path / "run"
    found = pool.run(struck, values, folder, "start", guilty, what, ranks=2, lost=(guilty,))
    assert time.time() - float((tmp_path / "when").read_text()) < SOON
    assert found[guilty] is None
    assert found[1 - guilty].startswith(f"4: rank {guilty}")
    assert found[1 - guilty].endswith("the same command resumes from the last checkpoint")
    assert not folder.exists()
