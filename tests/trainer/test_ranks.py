"""Whole runs on several ranks: against one process, through interruptions, and refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from pool import Pool

from modicum.core.errors import ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.trainer import continued, train

pytestmark = pytest.mark.ranks


def recipe_of(data: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """12 updates of 7 rows, which no number of ranks divides, one or two at a time."""
    values: dict[str, Any] = {
        "data": {"path": str(data), "column": "answer", "prompt_column": "question"},
        "model": {"layers": 2, "width": 36, "heads": 2, "kv_heads": 1, "vocabulary_size": 300},
        "training": {"steps": 12, "batch_size": 7, "micro_batch_size": 2, "learning_rate": 1e-2},
        "evaluation": {"every": 6, "rows": 5},
        "checkpoint": {"every": 4},
        "samples": {"prompts": ["why"], "tokens": 3},
    }
    values["data"] |= {"sequence_length": 24, "validation_fraction": 0.1}
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


def trains(
    ranks: Ranks,
    values: dict[str, Any],
    folder: Path,
    stop: tuple[int, int] | None = None,
    fork: Path | None = None,
) -> str:
    """Train as a rank; `stop` (rank, step) sends that rank SIGTERM there. How it ended."""

    def listener(told: dict[str, Any]) -> None:
        if stop and told["event"] == "step" and (ranks.rank, told["step"]) == stop:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        recipe = Recipe(**values)
        plan = continued(recipe, folder, ranks=ranks)
        train(plan, folder, ranks=ranks, listener=listener, fork=fork)
    except ModicumError as error:
        return f"{error.exit_code}: {error}"
    return "done"


def rows(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def column(folder: Path, key: str, name: str = "metrics") -> list[float]:
    return [row[key] for row in rows(folder, name)]


def outcome(folder: Path) -> dict[str, Any]:
    """All of a run folder that is a function of the recipe and the ranks, to the bit."""
    weights = [*folder.glob("model/*.safetensors"), *folder.glob("adapter/*.safetensors")]
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    return {
        "metrics": [[row[key] for key in keys] for row in rows(folder)],
        "evaluations": [(row["step"], row["loss"]) for row in rows(folder, "evaluations")],
        "samples": rows(folder, "samples"),
        "weights": {path.name: path.read_bytes() for path in weights},
    }


DDP, FSDP = {"strategy": "ddp"}, {"strategy": "fsdp"}
HYBRID = {"strategy": "fsdp", "shard": 2}


@pytest.fixture(scope="session")
def alone(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert trains(Ranks(), recipe_of(questions), folder) == "done"
    return folder


@pytest.mark.parametrize(("ranks", "parallel"), [(2, DDP), (2, FSDP), (4, DDP), (4, HYBRID)])
def test_losses_are_those_of_one_process(
    pool: Pool, questions: Path, alone: Path, tmp_path: Path, ranks: int, parallel: dict[str, Any]
) -> None:
    values = recipe_of(questions, parallel=parallel)
    assert pool.run(trains, values, tmp_path / "run", ranks=ranks) == ["done"] * ranks
    assert column(tmp_path / "run", "tokens") == column(alone, "tokens")
    assert len(set(column(alone, "tokens"))) > 1
    for key in ("loss", "gradient_norm"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=1e-4)
    assert column(tmp_path / "run", "loss", "evaluations") == pytest.approx(
        column(alone, "loss", "evaluations"), rel=1e-4
    )
    assert rows(tmp_path / "run", "samples") == rows(alone, "samples")


@pytest.mark.parametrize(
    ("ranks", "parallel", "stop"),
    [(2, DDP, (1, 6)), (2, FSDP, (0, 5)), (4, DDP, (3, 3)), (4, FSDP, (2, 9))],
)
def test_a_signal_to_one_rank_stops_all_and_they_go_on_to_the_bit(
    pool: Pool,
    questions: Path,
    tmp_path: Path,
    ranks: int,
    parallel: dict[str, Any],
    stop: tuple[int, int],
) -> None:
    values = recipe_of(questions, parallel=parallel)
    assert pool.run(trains, values, tmp_path / "calm", ranks=ranks) == ["done"] * ranks
    ended = pool.run(trains, values, tmp_path / "stopped", stop, ranks=ranks)
    assert all(text.startswith("4: stopped ") for text in ended)
    assert len(rows(tmp_path / "stopped")) == stop[1]
    assert json.loads((tmp_path / "stopped/run.json").read_text())["status"] == "interrupted"
    assert pool.run(trains, values, tmp_path / "stopped", ranks=ranks) == ["done"] * ranks
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "calm")


@pytest.mark.parametrize(
    "path",
    [[(2, DDP), (4, FSDP), (1, {})], [(4, HYBRID), (2, DDP), (2, FSDP)]],
    ids=["ddp2-fsdp4-one", "hybrid4-ddp2-fsdp2"],
)
def test_a_run_goes_on_with_other_ranks_and_another_layout(
    pool: Pool, questions: Path, alone: Path, tmp_path: Path, path: list[tuple[int, dict[str, Any]]]
) -> None:
    for part, (ranks, parallel) in enumerate(path):
        values = recipe_of(questions, parallel=parallel)
        stop = None if part == len(path) - 1 else (0, 4 * part + 3)
        ended = pool.run(trains, values, tmp_path / "run", stop, ranks=ranks)
        assert all(text.startswith("4: " if stop else "done") for text in ended), ended
    for key in ("loss", "gradient_norm", "learning_rate"):
        assert column(tmp_path / "run", key) == pytest.approx(column(alone, key), rel=2e-4)


@pytest.mark.parametrize("parallel", [DDP, FSDP])
def test_adapters_with_dropout_go_on_to_the_bit(
    pool: Pool, questions: Path, alone: Path, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    adapter = {"method": "lora", "rank": 4, "dropout": 0.2}
    values = recipe_of(questions, parallel=parallel, adapter=adapter)
    values["model"] = {"path": str(alone)}
    assert pool.run(trains, values, tmp_path / "calm") == ["done"] * 2
    ended = pool.run(trains, values, tmp_path / "stopped", (1, 7))
    assert all(text.startswith("4: stopped ") for text in ended)
    assert pool.run(trains, values, tmp_path / "stopped") == ["done"] * 2
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "calm")
    # A rank's dropout is its own, so one process draws others.
    assert trains(Ranks(), values, tmp_path / "one") == "done"
    assert column(tmp_path / "one", "loss") != column(tmp_path / "calm", "loss")


def differs(ranks: Ranks, values: dict[str, Any], folder: Path, what: str) -> str:
    """Train as a rank of which the second has another recipe, code or model."""
    if ranks.rank == 1 and what == "recipe":
        values["training"]["learning_rate"] = 0.5
    if ranks.rank == 1 and what == "code":
        from modicum.trainer import rank_agreement

        rank_agreement.code.cache_clear()
        rank_agreement.__version__ = "0.0.0"
    if ranks.rank == 1 and what == "model":
        values["model"]["path"] = values["model"].pop("other")
    values["model"].pop("other", None)
    if what == "model":  # the path is the same on both hosts, and the files behind it are not
        Recipe.plain = lambda recipe: {}  # type: ignore[method-assign]
    return trains(ranks, values, folder)


@pytest.mark.parametrize(
    ("what", "difference"),
    [
        ("recipe", "rank 1 has another setup than rank 0: recipe.training.learning_rate: 0.01 -> "),
        ("code", "rank 1 has another setup than rank 0: modicum: '"),
        ("model", "rank 1 has another base model than rank 0: model.safetensors: '"),
    ],
)
def test_a_rank_that_differs_is_refused(
    pool: Pool, questions: Path, alone: Path, tmp_path: Path, what: str, difference: str
) -> None:
    values = recipe_of(questions)
    if what == "model":
        import shutil

        other = tmp_path / "other"
        shutil.copytree(alone / "model", other)
        weights = (other / "model.safetensors").read_bytes()
        (other / "model.safetensors").write_bytes(weights[:-9] + b"\1" + weights[-8:])
        values["model"] = {"path": str(alone / "model"), "other": str(other)}
        values["adapter"] = {"method": "lora", "rank": 2}
    ended = pool.run(differs, values, tmp_path / "run", what)
    pool.close()  # these ranks are no longer what they were
    assert all(text.startswith(f"2: {difference}") for text in ended), ended
    assert not (tmp_path / "run/metrics.jsonl").exists()


def on_own_disks(ranks: Ranks, values: dict[str, Any], folder: Path) -> str:
    """Train as a rank, each of which has a folder of its own."""
    from modicum.trainer import rank_agreement

    before, rank_agreement.SEEN_SECONDS = rank_agreement.SEEN_SECONDS, 0.2
    try:
        return trains(ranks, values, folder / str(ranks.rank))
    finally:
        rank_agreement.SEEN_SECONDS = before


def test_a_rank_that_does_not_see_the_folder_is_refused_at_once(
    pool: Pool, questions: Path, tmp_path: Path
) -> None:
    ended = pool.run(on_own_disks, recipe_of(questions), tmp_path)
    said = "rank 1 does not see this folder of rank 0; give --out one that all ranks see"
    assert all(text.startswith("2: ") and said in text for text in ended), ended
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert [path.name for path in (tmp_path / "0").iterdir()] == ["lock"]
