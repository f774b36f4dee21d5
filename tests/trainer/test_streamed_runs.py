"""Runs on data that is streamed: as mapped ones, killed, resumed on other ranks, and broken."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.conftest import full, losses, outcome, rows, run, sentence
from tests.trainer.test_mixed_sources import trains

import modicum
from modicum.core.errors import InputError


def written(file: Path, count: int) -> Path:
    """Rows of a sentence or two."""
    lines = ({"text": f"{sentence(n)}. {sentence(n + 3)}."} for n in range(count))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def streamed(file: Path, base: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """The recipe of `full` on a stream, with the tokenizer of another run."""
    more = {"tokenizer": str(base / "tokenizer"), "streaming": True, **sections.pop("data", {})}
    return full(file, data=more, **sections)


@pytest.fixture(scope="session")
def calm(dataset: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The streamed run of one process, never interrupted, with blocks of 50 documents."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run(streamed(dataset, finished, data={"shuffle_buffer": 50}), folder)
    return folder


@pytest.mark.expensive
def test_data_that_fits_into_the_buffer_trains_as_if_it_were_mapped(
    finished: Path, tmp_path: Path
) -> None:
    data = written(tmp_path / "data.jsonl", 60)  # the run goes through it more than twice
    values = streamed(data, finished, training={"steps": 25})
    run(values, tmp_path / "streamed")
    values["data"]["streaming"] = False
    run(values, tmp_path / "mapped")
    assert outcome(tmp_path / "streamed") == outcome(tmp_path / "mapped")


def test_nothing_of_the_rows_is_written(calm: Path) -> None:
    assert not (calm / "data").exists()
    assert sorted(path.name for path in calm.iterdir() if path.is_dir()) == [
        "checkpoints",
        "model",
        "tokenizer",
    ]


def test_plan_and_run_say_that_it_is_streamed(calm: Path) -> None:
    [plan, *_] = rows(calm, "plan.jsonl")
    assert plan["data"].endswith("; streamed")
    assert plan["counts"]["streamed"]
    assert not plan["counts"]["exact"]
    content = json.loads((calm / "run.json").read_text())
    assert content["data"]["streamed"]
    assert content["data_wait"] > 0


@pytest.mark.expensive
@pytest.mark.parametrize(("event", "number"), [("step", 8), ("backward", 33)])
def test_killed_at_any_moment_the_same_again_resumes(
    dataset: Path,
    finished: Path,
    calm: Path,
    child: Callable[..., Any],
    tmp_path: Path,
    event: str,
    number: int,
) -> None:
    values = streamed(dataset, finished, data={"shuffle_buffer": 50})
    assert child(values, tmp_path / "run", event, number).code == -signal.SIGKILL
    run(values, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(calm)


@pytest.mark.expensive
@pytest.mark.ranks
def test_killed_on_two_ranks_it_resumes_on_three(
    pool: Pool, dataset: Path, finished: Path, calm: Path, tmp_path: Path
) -> None:
    values = streamed(dataset, finished, data={"shuffle_buffer": 50})
    folder = tmp_path / "run"
    ended = pool.run(trains, values, folder, (1, 12), ranks=2, lost=(1,))
    assert ended[0].startswith("4: another rank is gone")
    assert 10 < len(rows(folder)) < 14
    assert pool.run(trains, values, folder, ranks=3) == ["done"] * 3
    found, expected = losses(folder), losses(calm)
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for (_, *some), (_, *others) in zip(found, expected, strict=True):
        assert some == pytest.approx(others, rel=1e-3)
    counted = [[row["tokens"] for row in rows(each)] for each in (folder, calm)]
    assert counted[0] == counted[1]


@pytest.mark.expensive
def test_a_broken_line_ends_a_run_that_resumes_once_it_is_mended(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modicum.tasks.text_parts.SURVEYED_BYTES", 1000)
    data = written(tmp_path / "data.jsonl", 1200)
    lines = data.read_text().splitlines(keepends=True)
    training = {"steps": 60, "batch_size": 32, "micro_batch_size": 16}
    more = {"validation_fraction": 0, "shuffle_buffer": 100}
    values = streamed(
        data, finished, data=more, training=training, checkpoint={"every": 100}, samples={}
    )
    data.write_text("".join([*lines[:1100], lines[1100][:20] + "\n", *lines[1101:]]))
    with pytest.raises(InputError, match=r"data\.jsonl:1101: the line is not valid JSON"):
        run(values, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "data.jsonl:1101" in record["error"]
    done = len(rows(tmp_path / "run"))
    assert 20 < done < 60
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        f"step-{done:08}"
    ]
    data.write_text("".join(lines))
    run(values, tmp_path / "run")
    run(values, tmp_path / "calm")
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")


def test_data_that_changed_is_refused_and_a_fork_begins_it_anew(
    finished: Path, tmp_path: Path
) -> None:
    data = written(tmp_path / "data.jsonl", 100)
    more = {"shuffle_buffer": 20, "validation_fraction": 0}
    values = streamed(data, finished, data=more, training={"steps": 3}, samples={})
    run(values, tmp_path / "run")
    written(data, 200)
    data.write_text(data.read_text().replace("small", "tiny"))
    values["training"]["steps"] = 5
    with pytest.raises(InputError, match="the data has changed since this run began"):
        run(values, tmp_path / "run")
    run(values, tmp_path / "fork", fork=tmp_path / "run")
    assert [step for step, *_ in losses(tmp_path / "fork")] == [4, 5]


def test_sources_are_mixed_by_weight(finished: Path, tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", 50)
    (tmp_path / "b.txt").write_text(". ".join(map(sentence, range(200))))
    sources = [{"path": str(first), "weight": 3}, {"path": str(tmp_path / "b.txt"), "weight": 1}]
    data = {"sources": sources, "path": None, "validation_fraction": 0}
    values = streamed(first, finished, data=data, training={"steps": 4}, samples={})
    plan = modicum.plan(modicum.Recipe(**values))
    assert [each["share"] for each in plan.counts["sources"]] == pytest.approx([0.75, 0.25], 0.05)
    content = modicum.train(plan, tmp_path / "run")
    assert content["status"] == "finished"
    assert os.listdir(tmp_path / "run" / "checkpoints") == ["step-00000004"]


def test_other_data_to_evaluate_on_is_read_as_far_as_it_is_looked_at(
    dataset: Path, finished: Path, tmp_path: Path
) -> None:
    other = written(tmp_path / "other.jsonl", 3000)
    data = {"validation_path": str(other)}
    values = streamed(dataset, finished, data=data, training={"steps": 1}, samples={})
    run(values, tmp_path / "run")
    [first, _] = rows(tmp_path / "run", "evaluations.jsonl")
    assert 8 * 32 - 8 <= first["tokens"] <= 8 * 32


def test_a_stream_without_a_tokenizer_is_refused(dataset: Path) -> None:
    recipe = modicum.Recipe(**full(dataset, data={"streaming": True}))
    with pytest.raises(InputError, match=r"data\.tokenizer: a tokenizer is trained on all data"):
        modicum.plan(recipe)
