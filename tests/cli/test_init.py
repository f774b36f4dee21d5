"""`modicum init` as a newcomer meets it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hub_cache import stand_in

from modicum.cli.init import ask_here
from modicum.models import traced_cache
from modicum.planner.starting import OpenQuestion


def one_message(ended: Any) -> str:
    lines = ended.err.strip().split("\n")
    assert len(lines) == 1, ended.err
    return str(lines[0])


def test_a_recipe_is_written_that_plans(modicum: Any, runs: Any, tmp_path: Path) -> None:
    out, texts = tmp_path / "deep" / "my.yaml", runs.recipe.parent / "texts"
    ended = modicum(
        "init", "--model", runs.new, "--data", texts, "--memory", "2GB", "--method", "lora",
        "--out", out,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "plan:  fits" in ended.out
    assert "of 2 GB" in ended.out
    assert out.read_text(encoding="utf-8").startswith("# yaml-language-server")
    assert (out.parent / "recipe.schema.json").exists()
    planned = modicum("plan", out, "--json")
    assert planned.code == 0, planned.err
    row = json.loads(planned.out)
    assert row["prediction"]["budget_bytes"] == 2 * 10**9
    assert row["parameters"]["trainable"] < row["parameters"]["total"]
    again = modicum("init", "--out", out)
    assert again.code == 2
    assert "there already" in one_message(again)


def test_json_has_what_was_found(modicum: Any, runs: Any, tmp_path: Path) -> None:
    out, texts = tmp_path / "my.yaml", runs.recipe.parent / "texts"
    ended = modicum("init", "--model", runs.new, "--data", texts, "--json", "--out", out)
    assert ended.code == 0, ended.err
    found = json.loads(ended.out)
    assert found["fits"]
    assert found["model"]["dtype"] == "F32"
    assert found["data"]["documents"] == 8
    assert {each["field"] for each in found["settings"]} >= {"model.path", "training.steps"}
    assert [each["field"] for each in found["questions"]] == ["budget.memory"]
    assert found["plan"]["steps"] == next(
        each["value"] for each in found["settings"] if each["field"] == "training.steps"
    )


def test_a_model_of_the_hub_is_looked_at_without_its_weights(
    modicum: Any, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = stand_in(monkeypatch, runs.new / "model", tmp_path / "cache")
    out, texts = tmp_path / "my.yaml", runs.recipe.parent / "texts"
    ended = modicum(
        "init", "--model", "hub:a/b,revision=v1.0", "--data", texts, "--method", "lora",
        "--out", out,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert hub.downloaded("config.json")
    assert not hub.downloaded("model.safetensors")
    assert 'path: "hub:a/b,revision=v1.0"' in out.read_text(encoding="utf-8")


@pytest.mark.expensive
def test_what_does_not_fit_is_written_and_ends_with_3(
    modicum: Any, runs: Any, tmp_path: Path
) -> None:
    out, texts = tmp_path / "my.yaml", runs.recipe.parent / "texts"
    ended = modicum(
        "init", "--model", runs.new, "--data", texts, "--memory", "9MB", "--out", out
    )  # fmt: skip
    assert ended.code == 3
    assert f"{out} was written, and does not fit budget.memory" in ended.err
    assert "Traceback" not in ended.err
    assert 'memory: "9MB"' in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--memory", "8 gigs"), "budget.memory"),
        (("--model", "m", "--method", "lorra"), "Did you mean 'lora'"),
        (("--model", "m"), "no such folder"),
        (("--data", "d"), "no such file or folder"),
        (("--set", "training.stepps=3"), "Did you mean 'steps'"),
        (("--set", "training.steps"), "expected FIELD=VALUE"),
        (("--set", "task.method=images"), "task.method"),
    ],
)
def test_wrong_input_leaves_nothing(
    modicum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = modicum("init", *arguments)
    assert ended.code == 2
    assert said in one_message(ended)
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    """Somebody who types these lines."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_until_the_answer_is_right(
    modicum: Any, runs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = runs.recipe.parent / "texts"
    monkeypatch.setattr("sys.stdin", Terminal("a lot\n3GB\n"))
    ended = modicum("init", "--data", texts, "--out", tmp_path / "asked.yaml")
    assert ended.code == 0, ended.err
    assert ended.err.count("How much memory") == 2
    assert "not a size" in ended.err
    assert 'memory: "3GB"' in (tmp_path / "asked.yaml").read_text()
    monkeypatch.setattr("sys.stdin", Terminal("3GB\n"))
    ended = modicum("init", "--yes", "--data", texts, "--out", tmp_path / "silent.yaml")
    assert (ended.code, ended.err) == (0, "")
    assert "memory: null" in (tmp_path / "silent.yaml").read_text()


def test_the_end_of_what_is_typed_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert ask_here(OpenQuestion("data.column", "Which?", "text", ("text", "other"))) == "text"


def test_a_config_alone_is_planned_and_not_trained(modicum: Any, runs: Any, tmp_path: Path) -> None:
    folder, out = tmp_path / "config", tmp_path / "my.yaml"
    folder.mkdir()
    config = (runs.new / "model" / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(config, encoding="utf-8")
    texts = runs.recipe.parent / "texts"
    ended = modicum("init", "--model", folder, "--data", texts, "--out", out)
    assert ended.code == 0, ended.err
    assert "no weights are here" in ended.out
    planned = modicum("plan", out)
    assert planned.code == 0
    assert "training needs them" in planned.out
    ended = modicum("train", out, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "enough for a plan and not for training" in one_message(ended)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param("qwen3", "lora", marks=pytest.mark.expensive),
        pytest.param("bloom", "full", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_for_a_model_that_only_transformers_has_trains(
    modicum: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, method: str
) -> None:
    from decoders import add_tokenizer, decoder_folder  # transformers loads slowly

    def here(request: Any, wanted: list[Any]) -> Any:
        asked = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
        return json.loads(json.dumps(traced_cache.answer(asked)))["passes"]

    monkeypatch.setattr(traced_cache, "_traced_apart", here)
    data, out, run = tmp_path / "rows.jsonl", tmp_path / "my.yaml", tmp_path / "run"
    data.write_text('{"text": "to be or not to be"}\n' * 40)
    model = add_tokenizer(decoder_folder(tmp_path / name, name), "to be or not to be")
    ended = modicum(
        "init", "--model", model, "--data", data, "--method", method, "--out", out,
        "--set", "training.steps=3", "--set", "samples.count=0",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "plan:  fits" in ended.out
    assert ("boundaries: true" in out.read_text(encoding="utf-8")) is (name == "bloom")
    ended = modicum("train", out, "--out", run, "--quiet")
    assert ended.code == 0, ended.err
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["steps"] == 3
    assert len((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 3
