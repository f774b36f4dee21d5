"""Runs whose length and warm-up are given in tokens, and whose rate is flat and then falls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.conftest import full, lora, losses, rows, run

from modicum.core.errors import InputError

UPDATE = 8 * 32


def by_tokens(values: dict[str, Any], tokens: int | str, **more: Any) -> dict[str, Any]:
    training = {key: value for key, value in values["training"].items() if key != "steps"}
    return values | {"training": training | {"tokens": tokens} | more}


def rates(folder: Path) -> list[float]:
    return [row["learning_rate"] for row in rows(folder)]


FLAT = {"schedule": "flat", "decay_fraction": 0.5, "final_fraction": 0}


@pytest.fixture(scope="module")
def in_tokens(
    dataset: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    """Of an adaptation of 8 steps, two of which warm up: the recipe's values and the folder."""
    folder = tmp_path_factory.mktemp("tokens") / "run"
    values = lora(finished, dataset, checkpoint={"every": 4})
    values = by_tokens(values, 7 * UPDATE + 1, warmup_tokens=UPDATE + 1, **FLAT)
    run(values, folder)
    return values, folder


def test_a_length_in_tokens_is_that_many_steps(
    in_tokens: tuple[dict[str, Any], Path], dataset: Path, finished: Path, tmp_path: Path
) -> None:
    _, folder = in_tokens
    content = json.loads((folder / "run.json").read_text())
    assert content["steps"] == content["steps_planned"] == 8
    expected = [1 / 3, 2 / 3, 1, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates(folder) == pytest.approx([1e-2 * each for each in expected])
    steps = {"steps": 8, "warmup_steps": 2, **FLAT}
    run(lora(finished, dataset, training=steps, checkpoint={"every": 4}), tmp_path / "run")
    assert losses(tmp_path / "run") == losses(folder)


def test_more_tokens_extend_a_run_and_fewer_do_not(
    in_tokens: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    values, folder = in_tokens
    more = values | {"training": values["training"] | {"tokens": 12 * UPDATE}}
    content = run(more, folder)
    assert content["steps"] == content["steps_planned"] == 12
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))
    # What was done is as it was; what follows is on the schedule of the new length.
    followed = [0.2, 4 / 7, 3 / 7, 2 / 7, 1 / 7]
    assert rates(folder)[7:] == pytest.approx([1e-2 * each for each in followed])
    less = values | {"training": values["training"] | {"tokens": 5 * UPDATE}}
    with pytest.raises(InputError, match=r"training\.tokens: 3072 -> 1280"):
        run(less, folder)
    with pytest.raises(InputError, match=r"training\.tokens: .* has done 12 steps already"):
        run(less, tmp_path / "fork", fork=folder)


def test_a_flat_run_made_longer_before_it_falls_had_this_length_from_the_start(
    in_tokens: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    values, _ = in_tokens
    longer = values | {"training": values["training"] | {"tokens": 10 * UPDATE}}
    run(longer, tmp_path / "once")

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(values, tmp_path / "twice", listener=stop)
    run(longer, tmp_path / "twice")
    assert losses(tmp_path / "twice") == losses(tmp_path / "once")
    assert rates(tmp_path / "twice") == rates(tmp_path / "once")


def test_a_new_model_is_trained_on_so_many_tokens(dataset: Path, tmp_path: Path) -> None:
    values = by_tokens(full(dataset), "1k", warmup_fraction=0.5)
    content = run(values, tmp_path / "run")
    assert content["steps"] == 4
    assert rates(tmp_path / "run")[:3] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    kept = (tmp_path / "run" / "recipe.yaml").read_text()
    assert "tokens: 1000" in kept
    assert "steps: null" in kept
