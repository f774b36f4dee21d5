"""Runs on several sources of different kinds: mixed by weight, killed, resumed on other ranks."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from tests.trainer.conftest import losses, outcome, rows, run, sentence

import modicum
from modicum.core.errors import InputError, ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.recipe import Recipe
from modicum.trainer import continued, train


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A compressed table of examples, a list of prompts with completions, and running text."""
    folder = tmp_path_factory.mktemp("sources")
    table, pairs, texts = folder / "a.csv.gz", folder / "b.json", folder / "c"
    lines = "".join(f'{n},"{sentence(n)}"\n' for n in range(60))
    table.write_bytes(gzip.compress(f"number,body\n{lines}".encode(), mtime=0))
    content = [{"prompt": sentence(n), "completion": sentence(n + 3)} for n in range(20)]
    pairs.write_text(json.dumps(content))
    texts.mkdir()
    for part in range(6):
        text = "\n\n".join(sentence(n) for n in range(part * 25, part * 25 + 25))
        (texts / f"{part}.txt").write_text(text)
    return [
        {"path": str(table), "weight": 1, "column": "body"},
        {"path": str(pairs), "weight": 2},
        {"path": str(texts), "weight": 1.5},
    ]


def mixed(sources: list[dict[str, Any]], **sections: dict[str, Any]) -> dict[str, Any]:
    """12 updates of 7 rows: an epoch and a part."""
    values: dict[str, Any] = {
        "data": {"sources": sources, "sequence_length": 48, "validation_fraction": 0.3},
        "model": {"layers": 1, "width": 32, "heads": 2, "vocabulary_size": 300},
        "training": {"steps": 12, "batch_size": 7, "micro_batch_size": 2, "learning_rate": 1e-2},
        "evaluation": {"every": 6, "rows": 5},
        "checkpoint": {"every": 4},
        "samples": {"prompts": ["the cat"], "tokens": 4},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    return values


@pytest.fixture(scope="session")
def calm(sources: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, never interrupted."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    run(mixed(sources), folder)
    return folder


def test_each_source_has_its_share_and_all_are_named(
    sources: list[dict[str, Any]], calm: Path
) -> None:
    counts = json.loads((calm / "run.json").read_text())["data"]
    assert [each["name"] for each in counts["sources"]] == ["a.csv.gz", "b.json", "c"]
    weights = [each["weight"] for each in sources]
    for each, weight in zip(counts["sources"], weights, strict=True):
        assert each["share"] == pytest.approx(weight / sum(weights), abs=1 / counts["rows"])
        assert each["passes"] == pytest.approx(each["share"] * counts["rows"] / each["rows"], 1e-3)
    for key in ("rows", "documents", "trained"):
        assert counts[key] == sum(each[key] for each in counts["sources"])
    assert counts["sources"][2]["waste"] < counts["sources"][0]["waste"]  # text fills its rows
    assert counts["rows"] < 12 * 7  # the run reaches into its second epoch


def test_a_plan_estimates_the_same_shares(sources: list[dict[str, Any]], calm: Path) -> None:
    counts = json.loads((calm / "run.json").read_text())["data"]
    data = {"tokenizer": str(calm / "tokenizer")}
    planned = modicum.plan(modicum.Recipe(**mixed(sources, data=data))).counts
    assert planned["exact"]
    assert planned["sources"] == counts["sources"]


@pytest.mark.expensive
def test_killed_in_the_middle_of_an_epoch_the_same_again_resumes(
    sources: list[dict[str, Any]], calm: Path, child: Callable[..., Any], tmp_path: Path
) -> None:
    values = mixed(sources)
    assert child(values, tmp_path / "run", "step", 6).code == -signal.SIGKILL
    run(values, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(calm)


def trains(
    ranks: Ranks, values: dict[str, Any], folder: Path, killed: tuple[int, int] | None = None
) -> str:
    """Train as a rank; `killed` (rank, step) ends that rank there, as a loss of power does."""

    def listener(event: dict[str, Any]) -> None:
        if killed and event["event"] == "step" and (ranks.rank, event["step"]) == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        recipe = Recipe(**values)
        train(continued(recipe, folder, ranks=ranks), folder, ranks=ranks, listener=listener)
    except ModicumError as error:
        return f"{error.exit_code}: {error}"
    return "done"


@pytest.mark.expensive
@pytest.mark.ranks
@pytest.mark.parametrize("again", [1, 3])
def test_killed_on_two_ranks_it_resumes_on_others(
    pool: Pool, sources: list[dict[str, Any]], calm: Path, tmp_path: Path, again: int
) -> None:
    values, folder = mixed(sources), tmp_path / "run"
    ended = pool.run(trains, values, folder, (1, 6), ranks=2, lost=(1,))
    assert ended[0].startswith("4: another rank is gone")
    assert 4 < len(rows(folder)) < 8
    assert pool.run(trains, values, folder, ranks=again) == ["done"] * again
    found, expected = losses(folder), losses(calm)
    assert [step for step, *_ in found] == [step for step, *_ in expected]
    for (_, *some), (_, *others) in zip(found, expected, strict=True):
        assert some == pytest.approx(others, rel=2e-4)
    counted = [[row["tokens"] for row in rows(each)] for each in (folder, calm)]
    assert counted[0] == counted[1]


def test_other_weights_are_another_run(
    sources: list[dict[str, Any]], calm: Path, tmp_path: Path
) -> None:
    others = [{**each, "weight": 1} for each in sources]
    with pytest.raises(InputError, match=r"Changed: data\.sources"):
        run(mixed(others), calm)


def test_a_source_that_has_changed_is_refused(
    sources: list[dict[str, Any]], tmp_path: Path
) -> None:
    pairs = tmp_path / "b.json"
    pairs.write_text(Path(sources[1]["path"]).read_text())
    values = mixed([sources[0], {**sources[1], "path": str(pairs)}], training={"steps": 3})
    run(values, tmp_path / "run")
    pairs.write_text(pairs.read_text().replace("cat", "cow"))
    with pytest.raises(InputError, match="the data has changed since this run began"):
        run({**values, "training": {**values["training"], "steps": 5}}, tmp_path / "run")


def test_a_source_of_which_nothing_can_be_held_out_is_named(
    sources: list[dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "one.txt").write_text("the only document")
    values = mixed([sources[0], {"path": str(tmp_path / "one.txt"), "weight": 1}])
    with pytest.raises(InputError, match=r"one\.txt: data\.validation_fraction: .* only one"):
        run(values, tmp_path / "run")


def test_other_data_for_validation_is_looked_at_alone(
    sources: list[dict[str, Any]], tmp_path: Path
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"body": "the dog sees the cat under the tree"}\n')
    data = {"validation_path": str(other), "column": "body"}
    bare = [{k: v for k, v in each.items() if k != "weight"} for each in sources]
    bare[1] |= {"format": "prompt_completion"}
    content = run(mixed(bare, data=data, training={"steps": 2}), tmp_path / "run")
    assert [each["passes"] for each in content["data"]["sources"]] == [1, 1, 1]
    assert content["data"]["sources"][1]["documents"] == 20  # none of it is held out
    [first, _] = rows(tmp_path / "run", "evaluations.jsonl")
    assert 0 < first["tokens"] < 60
