"""Runs of adapters that see their steps: counts, terms of the loss and second passes, on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from tests.trainer.test_ranks import DDP, FSDP, column, outcome, recipe_of, trains

from modicum.checkpoint import CheckpointStore
from modicum.core.ranks.ranks import Ranks
from modicum.planner import plan
from modicum.recipe import Recipe

PLUGINS = Path(__file__).parents[1] / "contracts" / "plugins"
NAMES = ("tallying", "penalised", "consistent")
STEPS = 4


@pytest.fixture(scope="module")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), recipe_of(questions, training={"steps": 2}), folder) == "done"
    return folder


def values(base: Path, data: Path, name: str, **sections: Any) -> dict[str, Any]:
    training = {"steps": STEPS, **sections.pop("training", {})}
    fields = {"rank": 2, "dropout": 0.2} if name == "consistent" else {}
    more = {
        "model": {"path": str(base)},
        "adapter": {"method": name, **fields},
        "plugins": [str(PLUGINS / f"{name}.py")],
        "checkpoint": {"every": 2},
        "evaluation": {"every": 2, "rows": 5},
    }
    return recipe_of(data, training=training, **sections) | more


@pytest.fixture(scope="module")
def alone(base: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each, in one process."""
    folder = tmp_path_factory.mktemp("steps")
    for name in NAMES:
        assert trains(Ranks(), values(base, questions, name), folder / name) == "done"
    return folder


def state(folder: Path) -> dict[str, Any]:
    found = CheckpointStore(folder / "checkpoints").newest(lambda message: None)
    assert found is not None
    return found.state


def seen(folder: Path) -> torch.Tensor:
    """[layers, 2]: positions, and positive outputs."""
    kept = sorted((n, t) for n, t in state(folder)["model"].items() if n.endswith(".seen"))
    return torch.stack([tensor for _, tensor in kept])


@pytest.mark.expensive
def test_positions_of_updates_are_counted_and_no_others(alone: Path) -> None:
    counts = seen(alone / "tallying")
    assert set(counts[:, 0].tolist()) == {STEPS * 7 * 24}
    assert bool((counts[:, 1] > 0).all())
    assert state(alone / "tallying")["adapter"]["updates"] == STEPS


@pytest.mark.expensive
def test_terms_and_losses_between_passes_are_in_the_metrics(alone: Path) -> None:
    for name in ("penalised", "consistent"):
        extra = column(alone / name, "extra_loss")
        assert len(extra) == STEPS
        assert all(term > 0 for term in extra[1:])  # B begins at zero, so passes are alike
    # Each layer's term is 0.05 |1 + g| with g near 0: the root of its outputs.
    widths = [t.numel() for n, t in state(alone / "penalised")["model"].items() if n.endswith(".g")]
    expected = 0.05 * sum(width**0.5 for width in widths)
    assert column(alone / "penalised", "extra_loss")[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.expensive
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_it_is_the_same_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path, name: str
) -> None:
    made = values(base, questions, name, training={"recompute": "blocks"})
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    for key in ("loss", "gradient_norm"):
        assert column(tmp_path / "run", key) == column(alone / name, key)
    if name == "tallying":
        assert torch.equal(seen(tmp_path / "run"), seen(alone / name))


@pytest.mark.expensive
@pytest.mark.parametrize("name", NAMES)
def test_stopped_it_resumes_to_the_bit(
    base: Path, questions: Path, alone: Path, tmp_path: Path, name: str
) -> None:
    made = values(base, questions, name)
    assert trains(Ranks(), made, tmp_path / "run", (0, 3)).startswith("4: stopped")
    assert trains(Ranks(), made, tmp_path / "run") == "done"
    assert outcome(tmp_path / "run") == outcome(alone / name)


@pytest.mark.ranks
@pytest.mark.expensive
@pytest.mark.parametrize("name", NAMES[:2])
@pytest.mark.parametrize("parallel", [DDP, FSDP, {"strategy": "zero"}])
def test_on_two_ranks_it_is_the_same(
    pool: Pool,
    base: Path,
    questions: Path,
    alone: Path,
    tmp_path: Path,
    name: str,
    parallel: dict[str, Any],
) -> None:
    """Seven rows an update: one rank has a micro-batch in which nothing is trained."""
    made = values(base, questions, name, parallel=parallel)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    for key in ("loss", "gradient_norm"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone / name, key), rel=1e-4)
    if name == "tallying":
        counts, one = seen(tmp_path / "run"), seen(alone / name)
        assert torch.equal(counts[:, 0], one[:, 0])
        assert torch.allclose(counts[:, 1], one[:, 1], rtol=1e-2)
    else:
        extra = column(tmp_path / "run", "extra_loss")
        assert extra == pytest.approx(column(alone / name, "extra_loss"), rel=1e-4)


@pytest.mark.ranks
@pytest.mark.expensive
def test_two_ranks_run_second_passes(
    pool: Pool, base: Path, questions: Path, tmp_path: Path
) -> None:
    made = values(base, questions, "consistent", parallel=FSDP)
    assert pool.run(trains, made, tmp_path / "run", ranks=2) == ["done"] * 2
    assert all(term > 0 for term in column(tmp_path / "run", "extra_loss")[1:])


def test_a_plan_counts_the_rows_of_both_passes(base: Path, questions: Path) -> None:
    both = values(base, questions, "consistent", training={"micro_batch_size": 1})
    lora = both | {"adapter": {"method": "lora", "rank": 2, "dropout": 0.2}, "plugins": []}
    lora["training"] = {**lora["training"], "micro_batch_size": 2}
    kept = [plan(Recipe(**made)).prediction.ledger.bytes("activation") for made in (both, lora)]
    assert kept[0] == kept[1]
