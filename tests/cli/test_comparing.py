"""What `modicum compare` prints while it runs and afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.formula_trials import Bowl, sides

from modicum.cli.app import app
from modicum.cli.comparing import CompareCommand, CompareLines, show_comparison, words_of
from modicum.comparison import Comparison, Outcome, Side, Study
from modicum.comparison.budgets import SharedBudget
from modicum.comparison.comparing import Settled

ASKED = Settled((), None, 6, 5)


@pytest.fixture
def found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Comparison:
    """A study whose every event was shown."""
    study = Study(tmp_path, sides("a", "b"), Bowl(), trials=6, sampler="grid")
    comparison = study.run(CompareLines())
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith(("tune ", "judge "))]
    assert len(lines) == len(comparison.trials)
    assert all(": loss " in line for line in lines)
    assert any("/6  " in line for line in lines)
    assert any("seed 1:" in line for line in lines)
    assert not any("more in about" in line for line in lines)  # nobody said how many there are
    return comparison


def test_a_line_a_trial_and_a_table_of_eighty_columns(
    found: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show_comparison(found, ASKED, tmp_path)
    out = capsys.readouterr().out
    for standing in found.judgement.standings:
        assert f"{standing.mean:.4f}" in out
    assert max(map(len, out.splitlines())) <= 80
    words = "is better than every other side" if found.winner else "No side is shown to be better"
    assert words in out


def test_a_side_that_is_not_at_the_budget_is_named(
    found: Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "has 5 kB of trained weights, not 10 kB: it has no size that could be changed"
    budget = SharedBudget("trained", 10_000)
    show_comparison(found, Settled((), budget, 6, 5, unequal={"b": why}), tmp_path)
    out = capsys.readouterr().out
    assert "Trained" in out.splitlines()[1]
    assert "not at" in out
    assert f"b {why}." in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("budget", [None, SharedBudget("seconds", 3.0)])
def test_what_is_not_the_budget_is_a_column(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: SharedBudget | None
) -> None:
    def trial(side: str, settings: Any, seed: int, part: str) -> Outcome:
        tokens, spent = (125_000, 9_000) if side == "adamw" else (98_000, 4_700)
        found = {"peak": 1000 * spent, "state": spent, "trained": spent}
        return Outcome("finished", tokens * 1e-4 + 0.01 * seed, tokens=tokens, seconds=12.5,
                       bytes=found)  # fmt: skip

    names = ("adamw", "a name of some length")
    both = [Side(name, {}, {"name": name}) for name in names]
    found = Study(tmp_path, both, trial, trials=1, sampler="grid").run()
    show_comparison(found, Settled((), budget, 1, 5), tmp_path)
    out = capsys.readouterr().out
    assert re.search(r"Side +Peak +State +Seconds +Tokens\n", out)
    for word in ("125 k", "98 k", "9 MB", "9 kB", "12.5"):
        assert word in out
    assert max(map(len, out.splitlines())) <= 80
    show_comparison(found, Settled((), SharedBudget("tokens", 125_000), 1, 5), tmp_path)
    assert "Tokens" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "event",
    [
        {"event": "begun", "known": 3},
        {"event": "damaged", "file": "x.json"},
        {"event": "widened", "side": "a", "parameter": "training.rate", "low": 1e-4, "high": 1.0,
         "trials": 9},
        {"event": "trial", "side": "a", "settings": {"optimizer.rank": 3, "recipe": "0"}, "seed": 0,
         "part": "tune", "number": 0, "of": 6, "known": False,
         "outcome": Outcome("crashed", message="was killed by signal 9").to_json()},
        {"event": "trial", "side": "a", "settings": {}, "seed": 2, "part": "judge", "ratio": 0.5,
         "known": False, "outcome": Outcome("diverged").to_json()},
        {"event": "frozen", "settings": {}},
    ],
)  # fmt: skip
def test_every_event_is_a_line_or_none(
    event: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    CompareLines()(event)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (event["event"] != "frozen")
    assert all("recipe" not in line for line in lines)
    CompareLines(silent=True)(event)
    assert capsys.readouterr().err == ""


def test_settings_in_words() -> None:
    assert words_of({"a.rate": 0.00123456, "b.kind": "x", "recipe": "f"}) == "rate 0.001235, kind x"


def test_lines_say_how_many_trials_are_left_and_how_long_they_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 60))
    monkeypatch.setattr("modicum.cli.comparing.time.monotonic", lambda: next(clock))
    says = CompareLines(runs=5)
    trial = {"event": "trial", "side": "a", "settings": {}, "seed": 0, "part": "tune", "of": 3,
             "outcome": Outcome("finished", 1.0).to_json()}  # fmt: skip
    taken = Outcome("finished", 1.0, taken=True).to_json()
    for number, more in enumerate(
        ({"known": True}, {"known": False, "outcome": taken}, {"known": False}, {"known": False})
    ):
        says({**trial, "number": number, **more})
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("taken from another comparison")
    assert second.endswith("loss 1.0000")
    assert third.endswith("; 1 more in about 30 s")


def test_help_says_where_it_writes_and_what_sides_are_compared_with() -> None:
    command: Any = typer.main.get_command(app)
    helps = {each.name: getattr(each, "help", None) for each in command.commands["compare"].params}
    assert "in compare/, named after recipes, section and protocol" in helps["out"]
    assert "least loss, and under --protocol with the first" in helps["baseline"]
    asked = CompareCommand(("a.yaml", "runs/b.yaml"), vary="adapter=lora,dora", protocol="fair")
    assert asked.folder == Path("compare/a-b-adapter-fair")
