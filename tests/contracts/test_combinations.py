"""Every cell of docs/combinations.yaml: what runs is run, refusals have the table's sentence."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pool import Pool

from modicum.core.contracts.catalog import catalog
from modicum.core.errors import ModicumError
from modicum.core.ranks.ranks import Ranks
from modicum.planner import plan
from modicum.recipe import Recipe
from modicum.trainer import compiled_blocks, continued, train

TABLE = yaml.safe_load(
    (Path(__file__).resolve().parents[2] / "docs" / "combinations.yaml").read_text()
)
ADAPTER = {"targets": ["q_proj", "down_proj"]}
# What a recipe says to have the row's method; `{base}` is a trained model's folder.
ROWS: dict[str, dict[str, Any]] = {
    "pissa": {"adapter": {"method": "pissa", "rank": 2, **ADAPTER}, "model": {"path": "{base}"}},
    "pissa, 4-bit base": {
        "adapter": {"method": "pissa", "rank": 2, "rounds": 2, **ADAPTER},
        "model": {"path": "{base}", "linear": "nf4"},
    },
    "mos": {"adapter": {"method": "mos", "rank": 2, **ADAPTER}, "model": {"path": "{base}"}},
    "galore": {"optimizer": {"method": "galore", "rank": 4, "update_gap": 3}},
    "galore, in the backward pass": {
        "optimizer": {"method": "galore", "rank": 4, "update_gap": 3, "in_backward": True},
        "training": {"clip_norm": None},
    },
    "galore, 8-bit state": {
        "optimizer": {"method": "galore", "rank": 4, "update_gap": 3, "state_bits": 8}
    },
    "eva": {"transform": {"method": "eva"}, "optimizer": {"method": "sgd"}},
    "dear": {"comm": {"method": "dear", "bucket_bytes": 20000}},
    "sdp4bit": {"comm": {"method": "sdp4bit"}},
    "comet": {
        "memory": {"method": "comet", "warmup": 2, "every": 2},
        "task": {"method": "images", "images": 96, "held_out": 16, "widths": [6, 6]},
    },
    "fwsvd": {
        "compress": {"method": "fwsvd", "examples": 16},
        "model": {"path": "{base}"},
    },
}
# What the column says on top; several ranks have unequal counts in any case: 7 rows, and prompts.
COLUMNS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "ddp": {"parallel": {"strategy": "ddp"}},
    "fsdp": {"parallel": {"strategy": "fsdp", "reshard_after_forward": False}},
    "accumulation": {"training": {"micro_batch_size": 2}},
    "unequal": {},
    "bf16": {"training": {"precision": "bf16"}},
    "compile": {"training": {"compile": "blocks"}},
    "resume": {},
}
CROSSES_WIRE = {"dear", "sdp4bit"}
# Noise of four bits, and bounds that follow from a rank's own momentum, are not to the last digit.
CLOSE = {"sdp4bit": 3e-2, "comet": 1e-2}
STEPS = 6
CELLS = [
    pytest.param(row, column, id=f"{row}-{column}", marks=pytest.mark.dear)
    for row in ROWS
    for column in COLUMNS
]


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL with prompts of very different lengths: ranks train unequal numbers of tokens."""
    file = tmp_path_factory.mktemp("questions") / "data.jsonl"
    asked = (
        {"question": "why " * (n % 9) * (n % 4) + "? ", "answer": f"as {n % 5} is a tree"}
        for n in range(120)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return file


@pytest.fixture(scope="session")
def base(questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model."""
    folder = tmp_path_factory.mktemp("base") / "run"
    assert trains(Ranks(), values_of("", "recipe", questions, None), folder) == "done"
    return folder


def values_of(row: str, column: str, questions: Path, base: Path | None) -> dict[str, Any]:
    """The recipe of a cell."""
    values: dict[str, Any] = {
        "training": {"steps": STEPS, "batch_size": 7, "learning_rate": 1e-3},
        "evaluation": {"every": 3, "rows": 5},
        "checkpoint": {"every": 2},
        "samples": {"count": 0},
    }
    values["data"] = {"path": str(questions), "column": "answer", "prompt_column": "question"}
    values["data"] |= {"sequence_length": 24, "validation_fraction": 0.1}
    values["model"] = {"layers": 2, "width": 36, "heads": 2, "vocabulary_size": 300}
    asked = [ROWS.get(one, {}) for one in row.split(" and ")]
    if any("task" in fields for fields in asked):
        del values["data"], values["model"]
    for section, fields in [
        *chain(*(fields.items() for fields in asked)),
        *COLUMNS[column].items(),
    ]:
        own = {} if "path" in fields else values.get(section, {})
        values[section] = own | fields
    if values.get("model", {}).get("path") == "{base}":
        values["model"]["path"] = str(base)
    return values


def trains(
    ranks: Ranks, values: dict[str, Any], folder: Path, stop_after: int | None = None
) -> str:
    """Train as a rank; the first one sends itself SIGTERM after some steps. How it ended."""

    def listener(told: dict[str, Any]) -> None:
        if ranks.first and told["event"] == "step" and told["step"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        made = continued(Recipe(**values), folder, ranks=ranks)
        train(made, folder, ranks=ranks, listener=listener)
    except ModicumError as error:
        return f"{error.exit_code}: {error}"
    return "done"


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in rows(folder)]


def outcome(folder: Path) -> dict[str, Any]:
    """What is a function of the recipe and the ranks, to the bit."""
    keys = ("step", "loss", "gradient_norm", "learning_rate", "tokens")
    weights = sorted(folder.glob("*/*.safetensors"))
    return {
        "rows": [[row[key] for key in keys] for row in rows(folder)],
        "weights": {str(file.relative_to(folder)): file.read_bytes() for file in weights},
    }


@pytest.fixture
def eager_tracing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks traced and differentiated as for inductor, without its compiler, which takes long."""
    torch.compiler.reset()
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **more: compile_(function, backend="aot_eager", **more)
    )
    compiled_blocks._function.cache_clear()
    yield
    compiled_blocks._function.cache_clear()
    torch.compiler.reset()


@pytest.mark.ranks
@pytest.mark.usefixtures("eager_tracing")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(("row", "column"), CELLS)
def test_a_cell(
    pool: Pool, questions: Path, base: Path, tmp_path: Path, row: str, column: str
) -> None:
    cell = TABLE["methods"][row][column]
    values = values_of(row, column, questions, base)
    several = column in ("ddp", "fsdp", "unequal", "resume") or row in CROSSES_WIRE
    if column == "recipe" or (column == "compile" and cell != "runs"):
        several = False

    def run(folder: str, stop_after: int | None = None) -> list[str]:
        if several:
            return pool.run(trains, values, tmp_path / folder, stop_after, ranks=2)
        return [trains(Ranks(), values, tmp_path / folder, stop_after)]

    if cell != "runs":
        (said, *_) = run("run")
        assert said.startswith("2: ")
        assert TABLE["sentences"][cell["refused"]] in said
        return
    if column == "compile" and several:
        pytest.skip(
            "compiled blocks on several ranks are not run here: each would compile for minutes"
        )
    assert set(run("run")) == {"done"}
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    assert found[-1] < found[0]
    if column in ("ddp", "fsdp", "unequal") and row not in CROSSES_WIRE:
        # One process makes the same updates.
        assert trains(Ranks(), values, tmp_path / "alone") == "done"
        assert found == pytest.approx(losses(tmp_path / "alone"), rel=CLOSE.get(row, 1e-3))
    if column == "resume":
        assert all(said.startswith("4: ") for said in run("stopped", 3))
        assert set(run("stopped")) == {"done"}
        assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")


@pytest.mark.ranks
@pytest.mark.dear
@pytest.mark.parametrize("pair", TABLE["together"], ids=" and ".join)
def test_a_pair_runs(
    pool: Pool, questions: Path, base: Path, tmp_path: Path, pair: list[str]
) -> None:
    values = values_of(" and ".join(pair), "ddp", questions, base)

    def run(folder: str, stop_after: int | None = None) -> set[str]:
        return set(pool.run(trains, values, tmp_path / folder, stop_after, ranks=2))

    assert run("run") == {"done"}
    assert all(said.startswith("4: ") for said in run("stopped", 3))
    assert run("stopped") == {"done"}
    assert outcome(tmp_path / "stopped") == outcome(tmp_path / "run")
    if CROSSES_WIRE & set(pair):  # which changes nothing in what is computed
        plain = values_of(pair[0], "ddp", questions, base)
        assert set(pool.run(trains, plain, tmp_path / "plain", ranks=2)) == {"done"}
        assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.mark.parametrize("pair", TABLE["pairs"], ids=lambda pair: pair[2])
def test_a_pair_is_refused(pair: list[Any], base: Path) -> None:
    one, other, sentence = pair
    values: dict[str, Any] = {"model": {"path": str(base)}}
    asked = {**one, **other}
    if asked.get("model", {}).get("path", "") is None or "task" in asked:
        values = {}
    for section, fields in asked.items():
        if section == "task" or fields is None:
            continue
        values[section] = {**values.get(section, {}), **fields}
    ranks = 2 if "comm" in asked else 1
    with pytest.raises(ModicumError, match=re.escape(TABLE["sentences"][sentence])):
        plan(Recipe(**values), ranks=ranks)


@pytest.mark.parametrize("row", ROWS)
def test_each_method_shows_how_it_is_used_alone(row: str) -> None:
    record = catalog()[next(iter(_methods(row)))]
    assert ">>>" in (record.load().__doc__ or "")
    assert TABLE["methods"][row]["alone"] == "runs"


def _methods(row: str) -> Iterator[str]:
    for section, fields in ROWS[row].items():
        if "method" in fields and section not in ("optimizer", "task"):
            yield fields["method"]
    if "optimizer" in ROWS[row]:
        yield ROWS[row]["optimizer"]["method"]


def test_the_table_is_whole() -> None:
    assert TABLE["methods"].keys() == ROWS.keys()
    for cells in TABLE["methods"].values():
        assert cells.keys() == TABLE["columns"].keys()
    cells = [cell for row in TABLE["methods"].values() for cell in row.values()]
    used = {cell["refused"] for cell in cells if isinstance(cell, dict)}
    assert used | {pair[2] for pair in TABLE["pairs"]} == TABLE["sentences"].keys()
