"""A protocol on run folders: what it asks of them, and that the same call resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import modicum
from modicum import recipe_yaml
from modicum.cli.comparing import CompareCommand, show_report
from modicum.comparison import Outcome, by_protocol
from modicum.comparison.by_protocol import RATIOS, run_protocol
from modicum.comparison.comparing import Settled, settled
from modicum.core.errors import InputError
from modicum.recipe import Recipe

RATE = "training.learning_rate"
PLANTED = 1.3


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("protocol")
    rows = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(60))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    recipe = Recipe(
        model={"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280},
        data={"path": str(folder / "rows.jsonl"), "sequence_length": 16},
        training={"steps": 6, "batch_size": 4},
    )
    (folder / "small.yaml").write_text(recipe_yaml.dump(recipe))
    return folder / "small.yaml"


def asked(file: Path, budget: str | None = "tokens=10k") -> Settled:
    vary = "optimizer=adamw,sgd"
    return settled([str(file)], vary=vary, budget=budget, trials=8, seeds=3)


class Law:
    """Losses by a law of data, on which SGD has 1.3 times the data; best at a rate of its own."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, side: str, settings: Mapping[str, Any], seed: int, part: str) -> Outcome:
        self.calls.append(json.dumps([side, settings, seed, part], sort_keys=True))
        tokens = settings["training.tokens"] * (PLANTED if side == "sgd" else 1.0)
        best = {"adamw": 1e-3, "sgd": 1e-2}[side]
        worse = 0.05 * math.log10(settings[RATE] / best) ** 2
        return Outcome("finished", 1 + 60 * tokens**-0.4 + worse + 1e-4 * (seed % 3))


def test_a_planted_speed_up_is_found_and_runs_are_of_the_asked_tokens(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = Law()
    report = run_protocol(asked(file), tmp_path, "fair_optim", tune=("learning_rate",), train=law)
    tokens = {json.loads(call)[1]["training.tokens"] for call in law.calls}
    assert tokens == {round(10_000 * ratio) for ratio in RATIOS}
    assert len(set(law.calls)) == len(law.calls)
    found = {(row["side"], row["ratio"]): row["speedup"] for row in report["speedups"]}
    for ratio in RATIOS:
        assert found["adamw", ratio]["speedup"] == pytest.approx(1.0, rel=0.02)
        assert found["sgd", ratio]["speedup"] == pytest.approx(PLANTED, rel=0.02)
    assert json.loads((tmp_path / "protocol.json").read_text())["reference"] == "adamw"
    show_report(report)
    assert "1.30x" in capsys.readouterr().out


def test_another_comparison_in_the_folder_is_refused(file: Path, tmp_path: Path) -> None:
    tune = ("learning_rate",)
    run_protocol(asked(file), tmp_path, "fair_optim", tune=tune, train=Law())
    again = run_protocol(asked(file), tmp_path, "fair_optim", tune=tune, train=Law())
    assert again["speedups"]
    other = asked(file, "tokens=20k")
    with pytest.raises(InputError, match="holds another comparison"):
        run_protocol(other, tmp_path, "fair_optim", tune=tune, train=Law())


def test_several_at_once_come_to_the_same_report_and_a_damaged_record_is_made_anew(
    file: Path, tmp_path: Path
) -> None:
    tune, law = ("learning_rate",), Law()
    once = run_protocol(asked(file), tmp_path / "a", "fair_optim", tune=tune, train=Law())
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "study.json").write_text("{")
    twice = run_protocol(
        asked(file), tmp_path / "b", "fair_optim", tune=tune, train=law, parallel=3
    )
    assert twice == once
    assert len(set(law.calls)) == len(law.calls)
    made_by = json.loads((tmp_path / "b" / "study.json").read_text())["identity"]["made_by"]
    assert made_by["code"]


def test_settings_that_do_not_run_are_reported_as_such(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law = Law()

    def full(side: str, settings: Mapping[str, Any], seed: int, part: str) -> Outcome:
        if side == "sgd" and settings[RATE] > 0.01:
            return Outcome("out_of_memory", message="it does not fit")
        return law(side, settings, seed, part)

    report = run_protocol(asked(file), tmp_path, "fair_optim", tune=("learning_rate",), train=full)
    assert report["failed"]
    for row in report["failed"]:
        assert (row["side"], row["status"]) == ("sgd", "out_of_memory")
        assert row["settings"][RATE] > 0.01
    assert all(row["settings"][RATE] <= 0.01 for row in report["findings"] if row["side"] == "sgd")
    show_report(report)
    out = capsys.readouterr().out
    assert out.count("sgd at 1 of the tokens has no loss: out of memory, it does not fit") == 1
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampler": "grid"}, "--sampler: a protocol has a search of its own"),
        ({"tune": ("learning_rate", "ranc")}, "--tune: no search table of these sides"),
    ],
)
def test_what_a_protocol_does_not_take_is_refused(
    file: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    command = CompareCommand(
        (str(file),), vary="optimizer=adamw,sgd", budget="tokens=10k", out=tmp_path / "out",
        protocol="fair_optim", **options,
    )  # fmt: skip
    with pytest.raises(InputError, match=said):
        command.run()
    assert not (tmp_path / "out" / "study.json").exists()


def test_in_python_it_is_one_call(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 8, "seeds": 3}
    monkeypatch.setattr(by_protocol, "SharedRuns", lambda runs, fresh: Law())
    report = modicum.compare_by_protocol(
        str(file), tmp_path, budget="tokens=10k", tune=["learning_rate"], **given
    )
    tune = ("learning_rate",)
    assert report == run_protocol(asked(file), tmp_path, "fair_optim", tune=tune, train=Law())
    with pytest.raises(InputError, match="fair_optim"):
        modicum.compare_by_protocol(str(file), tmp_path, "fair", budget="tokens=10k", **given)


def test_what_is_no_fault_of_settings_is_no_loss(file: Path, tmp_path: Path) -> None:
    def killed(side: str, settings: Mapping[str, Any], seed: int, part: str) -> Outcome:
        return Outcome("crashed", message="was killed by signal 9")

    with pytest.raises(InputError, match="ended without a loss: was killed by signal 9"):
        run_protocol(asked(file), tmp_path, "fair_optim", train=killed)


@pytest.mark.parametrize(
    ("budget", "name", "said"),
    [(None, "fair_optim", "needs the tokens"), ("tokens=1k", "fair_optimm", "fair_optim")],
)
def test_bad_input_is_one_message(
    file: Path, tmp_path: Path, budget: str | None, name: str, said: str
) -> None:
    with pytest.raises(InputError, match=said):
        run_protocol(asked(file, budget), tmp_path, name, train=Law())
