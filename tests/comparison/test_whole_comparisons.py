"""Comparisons from the command's arguments to their table, on runs that are not trained.

Each kind of budget and the protocol, killed where a trial ends and resumed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from quick_runs import QuickRuns

import modicum
from modicum import recipe_yaml
from modicum.cli.comparing import sentences
from modicum.comparison import cache
from modicum.comparison.budgets import set_in, spent_of
from modicum.comparison.by_protocol import foreseen, run_protocol
from modicum.comparison.comparing import compare, run_settled, settled, tuned_ranges
from modicum.comparison.spaces import size_of
from modicum.core.errors import DoesNotFit, InputError, Interrupted
from modicum.planner.planning import plan_anyway
from modicum.recipe import Recipe
from modicum.report.compared import render_compared

RATE = ("learning_rate",)


@pytest.fixture(autouse=True)
def no_known_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "known-trials"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> QuickRuns:
    return QuickRuns(monkeypatch)


def lines(first: int, last: int) -> str:
    rows = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(first, last))
    return "\n".join(rows) + "\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recipe of a new model, and one that adapts a model."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "rows.jsonl").write_text(lines(0, 120))
    recipe = Recipe(
        model={"layers": 1, "width": 32, "heads": 2, "vocabulary_size": 280},
        data={"path": str(folder / "rows.jsonl"), "sequence_length": 16},
        training={"steps": 2, "batch_size": 4, "learning_rate": 1e-3},
        samples={"count": 0},
    )
    modicum.train(modicum.plan(recipe), folder / "base")
    adapted = recipe.plain() | {
        "model": {"path": str(folder / "base")},
        "adapter": {"method": "lora", "rank": 2},
    }
    found = {"new": recipe, "adapted": Recipe(**adapted)}
    for name, each in found.items():
        (folder / f"{name}.yaml").write_text(recipe_yaml.dump(each))
    return {name: folder / f"{name}.yaml" for name in found}


def dies_after(trials: int) -> Callable[[dict[str, Any]], None]:
    """A listener that is stopped once so many trials have ended."""
    heard = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "trial":
            heard.append(event)
            if len(heard) == trials:
                raise KeyboardInterrupt

    return listen


def table(folder: Path, name: str = "compare.json") -> str:
    """What was found, wherever it lies."""
    return (folder / name).read_text().replace(str(folder), "")


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("recipe", "vary", "budget"),
    [
        ("new", "optimizer=adamw,galore,frugal", "state=90kB"),
        ("new", "optimizer=adamw,galore", "peak=1MB"),
        ("adapted", "adapter=lora,pissa", "trained=12kB"),
        ("new", "optimizer=adamw,sgd", "tokens=5k"),
    ],
)
def test_a_budget_is_kept_and_a_kill_changes_nothing(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path, recipe: str, vary: str, budget: str
) -> None:
    asked = settled([str(made[recipe])], vary=vary, budget=budget, trials=5, seeds=2)
    calm = run_settled(asked, tmp_path / "calm", fresh=True)
    often = len(quick.trained)
    assert often == len(set(quick.trained)) == len(calm.trials)
    for deaths in (1, often - 3):
        with pytest.raises(Interrupted, match="the same command resumes"):
            run_settled(asked, tmp_path / "cut", fresh=True, progress=dies_after(deaths))
    run_settled(asked, tmp_path / "cut", fresh=True)
    assert table(tmp_path / "cut") == table(tmp_path / "calm")
    assert len(quick.trained) == 2 * often
    best = [(tmp_path / name / "best.yaml").read_text() for name in ("cut", "calm")]
    assert best[0] == best[1]
    assert calm.to_json()["identity"]["given"]["budget"] in render_compared(tmp_path / "cut")


@pytest.mark.expensive
@pytest.mark.parametrize(
    ("recipe", "vary", "kind", "amount"),
    [
        ("new", "optimizer=galore,frugal", "state", "90kB"),
        ("new", "optimizer=galore,trion", "peak", "700kB"),
        ("adapted", "adapter=lora,pissa", "trained", "12kB"),
    ],
)
def test_sizes_are_raised_until_the_forecast_reaches_the_bytes(
    made: dict[str, Path], recipe: str, vary: str, kind: str, amount: str
) -> None:
    asked = settled([str(made[recipe])], vary=vary, budget=f"{kind}={amount}")
    most = asked.budget.amount if asked.budget else 0
    for side in asked.sides:
        assert side.plan is not None, side.refused
        assert side.recipe is not None
        assert spent_of(side.plan, kind) <= most
        path, values = size_of(side)
        size = asked.fixed[side.name][path or ""]
        if size != values[-1]:
            larger = set_in(side.recipe, {path or "": values[values.index(size) + 1]})
            with contextlib.suppress(InputError):  # the layers have no larger one
                assert spent_of(plan_anyway(larger)[0], kind) > most


@pytest.mark.expensive
def test_a_protocol_is_killed_and_ends_with_the_same_report(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "budget": "tokens=10k"}
    asked = settled([str(made["new"])], trials=6, seeds=2, **ask)

    def run(name: str, **how: Any) -> dict[str, Any]:
        return run_protocol(asked, tmp_path / name, "fair_optim", tune=RATE, **how)

    calm = run("calm", fresh=True)
    often = len(quick.trained)
    assert often == len(set(quick.trained))
    most = foreseen(asked)
    assert often <= most["runs"] == 2 * 4 * (6 + 2 * 2)
    assert most["hours"] == pytest.approx(asked.row()["hours"] * 7.5 * 10 / 8)
    for deaths in (2, often // 2):
        with pytest.raises(Interrupted, match="the same command resumes"):
            run("cut", fresh=True, progress=dies_after(deaths))
    cut = run("cut", fresh=True)
    assert cut == calm
    assert table(tmp_path / "cut", "protocol.json") == table(tmp_path / "calm", "protocol.json")
    assert len(quick.trained) == 2 * often
    # Another study takes the side that both have, curves and all, and nothing of its times.
    vary = "optimizer=adamw,lion"
    others = settled([str(made["new"])], vary=vary, budget="tokens=10k", trials=6, seeds=2)
    found = run_protocol(others, tmp_path / "other", "fair_optim", tune=RATE)
    assert found["taken"] > 0
    assert all("adamw" not in name for name in quick.trained[2 * often :])


def test_a_budget_below_the_smallest_side_names_it(made: dict[str, Path]) -> None:
    recipe = str(made["adapted"])
    with pytest.raises(
        DoesNotFit, match=r"lora, .*adapter\.rank 1, takes .* trained 9 B"
    ) as caught:
        settled([recipe], vary="adapter=lora,pissa", budget="trained=9B")
    assert caught.value.exit_code == 3
    with pytest.raises(DoesNotFit, match=r"no side .* galore: its smallest .*optimizer\.rank 1"):
        settled([str(made["new"])], vary="optimizer=adamw,galore,sgd", budget="state=100B")
    vary = "optimizer=adamw,galore,frugal"
    asked = settled([str(made["new"])], vary=vary, budget="state=75kB")
    assert [side.name for side in asked.taking_part] == ["adamw", "frugal"]


@pytest.mark.parametrize("budget", ["trained=20kB", "tokens=1k", None])
def test_what_is_settled_for_a_side_is_not_tuned(made: dict[str, Path], budget: str | None) -> None:
    """Compacter's default is too large for these layers, and its search table has that field."""
    own = ["adapter={method: lora, rank: 2}"]
    vary = "adapter=lora,compacter"
    asked = settled([str(made["adapted"])], vary=vary, budget=budget, overrides=own)
    assert "adapter.phm_dim" in asked.fixed["compacter"]
    tuned = tuned_ranges(asked)["compacter"]
    assert next(iter(tuned)) == "training.learning_rate"
    assert not set(tuned) & set(asked.fixed["compacter"])


def test_a_budget_that_no_side_can_be_made_to_keep_is_refused(made: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="no side has a size"):
        settled([str(made["new"])], vary="optimizer=adamw,sgd", budget="state=8MB")


def test_a_test_that_is_trained_on_is_refused_before_anything_runs(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    inside, outside = tmp_path / "inside.jsonl", tmp_path / "outside.jsonl"
    inside.write_text(lines(110, 130))
    outside.write_text(lines(200, 220))
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 1, "seeds": 2}
    with pytest.raises(InputError, match=r"data\.test_path: \d+ of its 20 documents are trained"):
        compare(str(made["new"]), tmp_path / "a", overrides=[f"data.test_path={inside}"], **ask)
    assert quick.trained == []
    found = compare(
        str(made["new"]), tmp_path / "b", overrides=[f"data.test_path={outside}"], **ask
    )
    assert list(found.tests) == ["test_loss"]


def test_a_disk_that_is_full_in_a_run_is_no_outcome_of_its_settings(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 2, "seeds": 2}
    quick.ends[3] = (
        2,
        "modicum: error: runs/x: the disk is full (7 bytes free); free some space\n",
    )
    with pytest.raises(Interrupted, match="the disk is full"):
        compare(str(made["new"]), tmp_path / "full", fresh=True, **ask)
    assert len(list((tmp_path / "full" / "trials").glob("*.json"))) == 3
    compare(str(made["new"]), tmp_path / "full", fresh=True, **ask)
    compare(str(made["new"]), tmp_path / "calm", fresh=True, **ask)
    assert table(tmp_path / "full") == table(tmp_path / "calm")


def test_a_trial_that_the_system_kills_is_said_and_run_again_when_asked(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 1, "seeds": 2, "fresh": True}
    quick.ends[2] = (-9, "")
    found = compare(str(made["new"]), tmp_path / "killed", **ask)
    (killed,) = [row for row in found.trials if row.outcome.status == "crashed"]
    assert killed.outcome.message == "was killed by signal 9"
    standing = next(one for one in found.judgement.standings if one.side == killed.job.side)
    assert standing.problem == "crashed in 1 of 2 seeds"
    said = sentences(found)[-2:]
    assert said[0] == f"{killed.job.side} crashed in 1 of 2 seeds: no mean is claimed."
    assert said[1].startswith("--retry runs again")
    assert compare(str(made["new"]), tmp_path / "killed", **ask).to_json() == found.to_json()
    often = len(quick.trained)
    compare(str(made["new"]), tmp_path / "killed", retry=True, **ask)
    assert len(quick.trained) == often + 1
    compare(str(made["new"]), tmp_path / "calm", **ask)
    assert table(tmp_path / "killed") == table(tmp_path / "calm")


@pytest.mark.parametrize(
    ("code", "log", "status"),
    [
        (2, "modicum: hub:x/y: cannot be reached\n", "refused"),
        (3, "modicum: does not fit 1 GB. Cheapest first:\n  - a: 1\n", "out_of_memory"),
    ],
)
def test_what_is_refused_for_the_moment_is_run_again_when_asked(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path, code: int, log: str, status: str
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 1, "seeds": 2, "fresh": True}
    quick.ends[2] = (code, log)
    found = compare(str(made["new"]), tmp_path / "short", **ask)
    (failed,) = [row.outcome for row in found.trials if row.outcome.status != "finished"]
    assert (failed.status, failed.message) == (status, log.splitlines()[0].partition(": ")[2])
    assert any(each.startswith("--retry runs again") for each in sentences(found))
    often = len(quick.trained)
    compare(str(made["new"]), tmp_path / "short", retry=True, **ask)
    assert len(quick.trained) == often + 1
    compare(str(made["new"]), tmp_path / "calm", **ask)
    assert table(tmp_path / "short") == table(tmp_path / "calm")


def test_another_comparison_is_refused_with_what_differs_said_once(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 1, "seeds": 2}
    compare(str(made["new"]), tmp_path / "out", budget="tokens=5k", **ask)
    with pytest.raises(InputError) as caught:
        compare(str(made["new"]), tmp_path / "out", budget="tokens=6k", **ask)
    differs = str(caught.value).partition("(")[2].partition("); give it")[0]
    assert differs == (
        "training.tokens: 5000 there, 6000 here (adamw, sgd); "
        'given.budget: "5,000 tokens" there, "6,000 tokens" here'
    )


def test_one_seed_is_run_and_claims_nothing(
    made: dict[str, Path], quick: QuickRuns, tmp_path: Path
) -> None:
    found = compare(
        str(made["new"]), tmp_path / "one", vary="optimizer=adamw,sgd", trials=2, seeds=1
    )
    assert found.winner is None
    assert {one.interval for one in found.judgement.differences} == {None}
    assert "one seed gives no interval" in render_compared(tmp_path / "one")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        ({"vary": "optimizer=adamw"}, "a comparison needs two"),
        ({"vary": "optimizer=adamw,adamw"}, "names a method twice"),
        ({"trials": 0}, "trials: one at least"),
        ({"seeds": 0}, "seeds: one at least"),
        ({"tune": ["momentumm"]}, "no search table of these sides has such a field"),
        ({"tune": ["learning_rate", "momentumm"]}, "--tune: .* such a field .found: 'momentumm'"),
        ({"tune": ["momentum"]}, "no search table of adamw has such a field"),
        ({"budget": "steps=5"}, "not a budget"),
        (
            {"vary": "optimizer=galore,trion", "budget": "peak=700kB", "tune": ["rank"]},
            "the budget, peak 700 kB, settles this for galore",
        ),
        ({"budget": "seconds=300", "parallel": 2}, "seconds are the budget; one at a time"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing_behind(
    made: dict[str, Path],
    quick: QuickRuns,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ask: dict[str, Any],
    said: str,
) -> None:
    times = lambda recipes, tell, ranks: {name: [[0.1]] for name in recipes}  # noqa: E731
    monkeypatch.setattr("modicum.comparison.step_times.step_seconds", times)
    with pytest.raises(InputError, match=said):
        compare(str(made["new"]), tmp_path / "out", **({"vary": "optimizer=adamw,sgd"} | ask))
    assert quick.trained == []
    assert not (tmp_path / "out" / "study.json").exists()


@pytest.mark.parametrize("warmup", ["warmup_steps=5", "warmup_tokens=320"])  # of 4 x 16 tokens
def test_seconds_too_few_for_the_warm_up_name_the_side(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warmup: str
) -> None:
    def times(recipes: Any, tell: Any, ranks: int) -> dict[str, list[list[float]]]:
        return {"adamw": [[0.1]], "sgd": [[3.0]]}

    monkeypatch.setattr("modicum.comparison.step_times.step_seconds", times)
    with pytest.raises(InputError, match=r"sgd: an update takes 3 s, .* warm-up alone needs 5"):
        settled(
            [str(made["new"])], vary="optimizer=adamw,sgd", budget="seconds=10",
            overrides=[f"training.{warmup}"],
        )  # fmt: skip
