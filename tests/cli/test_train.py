"""`modicum train --ranks N`: what is settled before ranks are started, and what each is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import Restart
from modicum.core.ranks.ranks import PeerLost
from modicum.parallel.rank_environment import LOST
from modicum.recipe_yaml import load
from modicum.trainer.folder import RunFolder


class Planned:
    """A plan that shows as nothing."""

    def row(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """The commands that ranks are started with; no process is. They end with `CODE`, else 0."""
    commands = []

    class Supervisor:
        def __init__(self, command: list[str], size: int) -> None:
            commands.append((command[command.index("-m") :], size))

        def run(self) -> int:
            return int(os.environ.get("CODE", "0"))

    monkeypatch.setattr("modicum.parallel.launch.Supervisor", Supervisor)
    monkeypatch.setattr("modicum.core.cores.usable_cores", lambda: 2)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return commands


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe that need not be fit for anything."""
    file = tmp_path / "recipe.yaml"
    file.write_text("training: {steps: 3, batch_size: 2}\n")
    return file


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of which a report is written."""
    folders: list[Path] = []
    monkeypatch.setattr("modicum.report.write", folders.append)
    return folders


def one_message(ended: Any) -> str:
    assert ended.out == ""
    assert ended.err.startswith("modicum: ")
    assert ended.err.count("\n") == 1
    return str(ended.err)


def test_what_is_wrong_is_told_before_a_rank_is_started(
    modicum: Any, recipe: Path, tmp_path: Path, started: list[Any]
) -> None:
    train = ("train", recipe, "--out", tmp_path / "run", "--ranks", "2")
    assert modicum(*train[:-1], "0").code == 2
    typo = modicum(*train, "--set", "training.stepps=5")
    assert typo.code == 2
    assert "Did you mean 'steps'?" in one_message(typo)
    assert not started


def test_under_torchrun_no_ranks_are_started(
    modicum: Any, recipe: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    for command in ("train", "plan"):
        ended = modicum(command, recipe, "--ranks", "2")
        assert ended.code == 2
        assert "--ranks: the environment says that this process is a rank" in one_message(ended)
    assert not started


def test_a_finished_run_is_left_alone_and_a_dry_run_starts_nothing(
    modicum: Any,
    recipe: Path,
    tmp_path: Path,
    started: list[Any],
    written: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    RunFolder(out).write_recipe(load(recipe))
    (out / "run.json").write_text('{"modicum": "", "status": "finished"}')
    (out / "report.html").touch()
    command = ("train", recipe, "--out", out, "--ranks", "2")
    ended = modicum(*command)
    assert (ended.code, ended.out) == (0, f"report: {out / 'report.html'}\n")
    assert "finished already" in ended.err
    planned = []
    monkeypatch.setattr("modicum.cli.train._plan", lambda *told: planned.append(told) or Planned())
    shown = []
    monkeypatch.setattr("modicum.cli.planning._plan", lambda *told: shown.append(told) or Planned())
    assert modicum(*command, "--dry-run", "--json").out == "{}\n"
    assert modicum("plan", recipe, "--ranks", "3", "--json").out == "{}\n"
    assert [told[1:] for told in planned] == [(out, 2)]
    assert [told[1:] for told in shown] == [(3, None)]
    assert not started
    assert not written


def test_every_rank_is_told_the_same_and_the_report_is_written_once(
    modicum: Any, recipe: Path, tmp_path: Path, started: list[Any], written: list[Path]
) -> None:
    out, fork = tmp_path / "run", tmp_path / "-other"
    ended = modicum(
        "train", recipe, "--out", out, "--set", "training.steps=7", "--set",
        "training.seed=3", "--fork", fork, "--ranks=3", "--progress", "lines", "--restart",
    )  # fmt: skip
    assert (ended.code, ended.out) == (0, f"report: {out / 'report.html'}\n")
    assert ended.err == "warning: 3 ranks share 2 cores\n"
    [(command, size)] = started
    assert size == 3
    assert command == [
        "-m", "modicum", "train", "--out", str(out), "--progress", "lines",
        "--set", "training.steps=7", "--set", "training.seed=3", "--fork", str(fork),
        "--restart", "--", str(recipe),
    ]  # fmt: skip
    assert written == [out]


def test_what_ranks_end_with_is_passed_on(
    modicum: Any,
    recipe: Path,
    tmp_path: Path,
    started: list[Any],
    written: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CODE", "4")
    out = tmp_path / "run"
    command = ("train", recipe, "--out", out, "--ranks", "2", "--json")
    ended = modicum(*command)
    assert (ended.code, ended.out, ended.err) == (4, "", "")  # the supervisor has said it
    assert not written
    out.mkdir()
    (out / "run.json").write_text('{"modicum": "", "status": "interrupted"}')
    assert modicum(*command).code == 4
    assert written == [out]


def test_of_ranks_only_the_first_shows_its_plan(
    modicum: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("modicum.cli.planning._plan", lambda *_: Planned())
    told = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        told.append(modicum("plan", recipe, "--json"))
    assert [(ended.code, ended.out, ended.err) for ended in told] == [(0, "{}\n", ""), (0, "", "")]


# How errors end a rank


@pytest.mark.parametrize(
    ("error", "environment", "code", "told"),
    [
        (PeerLost("gone"), {"RANK": "1"}, 4, "modicum: rank 1: gone\n"),
        (PeerLost("gone"), {"RANK": "0"}, 4, "modicum: gone\n"),
        (PeerLost("gone"), {"RANK": "0", "MODICUM_SUPERVISOR": ""}, LOST, ""),
        (Restart("split"), {"RANK": "1"}, 4, "modicum: rank 1: split\n"),
        (Restart("split"), {"RANK": "1", "MODICUM_SUPERVISOR": ""}, 75, "modicum: rank 1: split\n"),
    ],
)
def test_how_an_error_ends_a_rank(
    modicum: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    environment: dict[str, str],
    code: int,
    told: str,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("modicum.recipe_yaml.load", fail)
    for name, value in ({"WORLD_SIZE": "2"} | environment).items():
        monkeypatch.setenv(name, value)
    ended = modicum("train", "demo-pretrain")
    assert (ended.code, ended.out, ended.err) == (code, "", told)


def test_a_bug_says_on_which_rank_it_was(recipe: Path) -> None:
    code = (
        "from modicum import recipe_yaml\nfrom modicum.cli import main\n"
        "recipe_yaml.load = None\nmain.run()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "train", str(recipe)],
        env=os.environ | {"WORLD_SIZE": "2", "RANK": "1"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    first, *_, last = ended.stderr.splitlines()
    assert first == "modicum: rank 1 failed:"
    assert last == "TypeError: 'NoneType' object is not callable"


@pytest.mark.expensive
@pytest.mark.parametrize(("supervised", "code"), [(False, 4), (True, -signal.SIGTERM)])
def test_a_supervised_rank_ends_at_once_while_it_has_nothing_to_save(
    recipe: Path, supervised: bool, code: int
) -> None:
    script = (
        "import os, signal\nfrom modicum import recipe_yaml\nfrom modicum.cli import main\n"
        "recipe_yaml.load = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\nmain.run()"
    )
    place = {"WORLD_SIZE": "2", "RANK": "1"}
    if supervised:
        place["MODICUM_SUPERVISOR"] = str(os.getpid())
    ended = subprocess.run(
        [sys.executable, "-c", script, "plan", str(recipe)],
        env=os.environ | place,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code
    assert ended.stderr == (
        "" if supervised else "modicum: rank 1: interrupted; the same command begins anew\n"
    )


@pytest.mark.parametrize(("method", "said"), [("svfit", True), ("lora", False)])
def test_a_run_says_what_its_adapter_loads_as(
    modicum: Any, runs: Any, tmp_path: Path, method: str, said: bool
) -> None:
    out = tmp_path / "run"
    asked = ("--set", f"adapter={{method: {method}, rank: 2}}", "--progress", "lines")
    ended = modicum("train", runs.adapted_recipe, "--out", out, *asked)
    assert ended.code == 0, ended.err
    line = (
        f"export: {out / 'adapter'} is a LoRA of rank 2 in PEFT's files, exact: loaded there or "
        "here it is lora, and no longer svfit\n"
    )
    assert (line in ended.err) is said
    config = json.loads((out / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", 2)
