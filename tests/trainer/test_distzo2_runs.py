"""DistZO2 in a run: streamed and not, on several ranks, resumed; what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

import modicum
from modicum.checkpoint import CheckpointStore
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.planner import plan


def values(data: Path, fields: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    optimizer = {"method": "distzo2", "perturbations": 2, "snapshot": True, **(fields or {})}
    training = {"steps": 6, "schedule": "constant", "clip_norm": None, "learning_rate": 1e-3}
    return recipe_of(data, training=training, optimizer=optimizer, **sections)


@pytest.fixture(scope="module")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert trains(Ranks(), values(questions), folder) == "done"
    return folder


@pytest.mark.expensive
def test_a_streamed_run_is_the_plain_one_to_the_bit_also_when_killed(alone, questions, tmp_path):
    made = values(questions, {"stream": True})
    assert trains(Ranks(), made, tmp_path / "run", (0, 4)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone)
    newest = CheckpointStore(alone / "checkpoints").newest(lambda message: None)
    assert newest is not None
    assert newest.state["log"]["updates"].shape == (6, 4)
    losses = column(alone, "loss", "evaluations")
    assert losses[-1] < losses[0]


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("parallel", "stream"), [(DDP, True), (FSDP, False)], ids=["ddp, streamed", "fsdp"]
)
def test_two_ranks_make_the_same_updates(
    pool: Pool, alone: Path, questions: Path, tmp_path: Path, parallel: Any, stream: bool
) -> None:
    made = values(questions, {"stream": stream}, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert column(tmp_path / "run", "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"training": {"clip_norm": 1.0}}, "no gradients to clip"),
        ({"training": {"recompute": "blocks"}}, "nothing is kept that could be computed again"),
        ({"training": {"compile": "blocks"}}, "compiled blocks expect them in one place"),
        ({"transform": {"method": "eva"}}, "no gradients to change"),
        ({"memory": {"method": "comet"}}, "backward"),
        ({"parallel": {"strategy": "zero"}}, "zero's optimizer trains others"),
        ({"parallel": {"strategy": "fsdp"}}, r"blocks move .* in full"),
    ],
)
def test_what_does_not_go_with_it_is_refused(questions: Path, sections: Any, why: str) -> None:
    made = values(questions, {"stream": "zero" not in why})
    for section, said in sections.items():
        made[section] = {**made.get(section, {}), **said}
    with pytest.raises(InputError, match=why) as refused:
        plan(modicum.Recipe(**made), ranks=1 + ("parallel" in sections))
    assert "\n" not in str(refused.value)
