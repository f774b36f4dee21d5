"""Trials as run folders: what is trained, what is read of a run, and how one ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quick_runs import STEPS, QuickRuns

import modicum
from modicum import recipe_yaml
from modicum.comparison import cache
from modicum.comparison.comparing import compare, settled
from modicum.comparison.run_trials import RECIPE, RunTrials, outcome_of, recipe_digest
from modicum.comparison.step_times import LEFT_OUT, ROUNDS, kept_step_seconds, step_seconds
from modicum.comparison.study import RESULT
from modicum.core.errors import DoesNotFit, InputError, Interrupted
from modicum.recipe import Recipe
from modicum.trainer.folder import DATA, OFFERED, RunFolder

RATE = "training.learning_rate"


@pytest.fixture(autouse=True)
def no_known_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken from what this machine has trained before, and nothing is left there."""
    monkeypatch.setattr(cache, "FOLDER", str(tmp_path / "known-trials"))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows = (json.dumps({"text": f"{n} cats and {n % 7} dogs"}) for n in range(120))
    file.write_text("\n".join(rows) + "\n")
    return Recipe(
        model={"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280},
        data={"path": str(file), "sequence_length": 16, "validation_fraction": 0.2},
        training={"steps": 6, "batch_size": 4, "warmup_steps": 2},
        evaluation={"keep_best": True, "patience": 3, "rows": 2},
    )


def test_a_trial_is_judged_by_its_last_weights_on_all_rows(recipe: Recipe, tmp_path: Path) -> None:
    tested = recipe.changed(data__test_fraction=0.1)
    trial = RunTrials(tmp_path, {"a": tested}, tested=True)
    made = trial.recipe("a", {RATE: 0.5, RECIPE: "0f"}, 7, "judge")
    assert (made.training.learning_rate, made.training.seed) == (0.5, 7)
    assert made.evaluation.rows == "all"
    assert not made.evaluation.keep_best
    assert made.evaluation.patience is None
    assert made.evaluation.test
    assert not trial.recipe("a", {}, 7, "tune").evaluation.test
    tuned = trial.settled("a", {"training.warmup_fraction": 0.1})
    assert (tuned.training.warmup_steps, tuned.training.warmup_fraction) == (0, 0.1)


def test_settings_that_no_recipe_has_are_a_refusal(recipe: Recipe, tmp_path: Path) -> None:
    outcome = RunTrials(tmp_path, {"a": recipe})("a", {RATE: -1.0}, 0, "tune")
    assert outcome.status == "refused"
    assert "training.learning_rate" in outcome.message
    assert not (tmp_path / "runs").exists()


def folder_of(path: Path, record: dict[str, Any]) -> Path:
    """A run folder as a process left it."""
    path.mkdir()
    (path / "recipe.yaml").write_text("training: {steps: 3}\n")
    (path / "run.json").write_text(json.dumps({"modicum": "0", **record}))
    return path


@pytest.mark.parametrize(
    ("record", "code", "status"),
    [
        ({"status": "failed", "failed_by": "TrainingDiverged", "error": "e"}, 2, "diverged"),
        ({"status": "failed", "failed_by": "InputError", "error": "e"}, 2, "refused"),
        ({"status": "failed", "failed_by": "DoesNotFit", "error": "e", "steps": 3}, 3,
         "out_of_memory"),
        ({"status": "failed", "failed_by": "KeyError", "error": "e"}, 1, "crashed"),
        ({"status": "running"}, -9, "crashed"),
    ],
)  # fmt: skip
def test_how_a_run_ended_is_its_status(
    tmp_path: Path, record: dict[str, Any], code: int, status: str
) -> None:
    outcome = outcome_of(folder_of(tmp_path / "run", record), code)
    assert outcome.status == status
    assert outcome.loss is None
    assert outcome.message == ("was killed by signal 9" if code < 0 else "e")


def test_a_run_without_validation_data_is_refused(tmp_path: Path) -> None:
    outcome = outcome_of(folder_of(tmp_path / "run", {"status": "finished"}), 0)
    assert outcome.status == "refused"
    assert "no validation data" in outcome.message


def test_of_a_stream_as_many_rows_are_looked_at_as_its_recipe_says(
    recipe: Recipe, tmp_path: Path
) -> None:
    streamed = recipe.changed(data__streaming=True, data__tokenizer=str(tmp_path))
    made = RunTrials(tmp_path, {"a": streamed}).recipe("a", {}, 0, "tune")
    assert made.evaluation.rows == 2


def test_of_a_run_that_never_began_the_last_words_are_said(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("modicum: warming\nmodicum: it is too large\n")
    outcome = outcome_of(tmp_path / "run", 3)
    assert (outcome.status, outcome.message) == ("out_of_memory", "it is too large")


@pytest.mark.parametrize(
    ("code", "log", "status", "message"),
    [
        (3, "modicum: does not fit 1 GB. Cheapest first:\n  - a: 1\nThe first:\n    a: 1\n",
         "out_of_memory", "does not fit 1 GB. Cheapest first:"),
        (2, "modicum: error: no such hub\nits last line\n", "refused", "no such hub"),
        (2, "no name of ours\n", "refused", "no name of ours"),
        (1, "modicum: rank 1 failed:\nKeyError: 7\n", "crashed", "KeyError: 7"),
    ],
)  # fmt: skip
def test_of_a_refusal_the_line_that_it_begins_with_is_said(
    tmp_path: Path, code: int, log: str, status: str, message: str
) -> None:
    (tmp_path / "run.log").write_text(log)
    outcome = outcome_of(tmp_path / "run", code)
    assert (outcome.status, outcome.message) == (status, message)


def test_a_recipe_is_known_by_its_fields(recipe: Recipe) -> None:
    spelled_out = Recipe(**recipe.plain())
    assert recipe_digest(spelled_out) == recipe_digest(recipe)
    assert recipe_digest(recipe.changed(training__steps=7)) != recipe_digest(recipe)


@pytest.mark.expensive
def test_a_trial_trains_once_and_leaves_no_weights(recipe: Recipe, tmp_path: Path) -> None:
    trial = RunTrials(tmp_path, {"a": recipe})
    first = trial("a", {RATE: 1e-2}, 3, "tune")
    assert first.status == "finished"
    assert first.tokens
    assert first.data_hash.startswith("sha256:")
    assert min(first.bytes.values()) > 0
    run = Path(first.folder)
    assert not (run / "checkpoints").exists()
    assert not (run / "model").exists()
    before = (run / "metrics.jsonl").stat().st_mtime_ns
    assert trial("a", {RATE: 1e-2}, 3, "tune") == first
    assert (run / "metrics.jsonl").stat().st_mtime_ns == before
    again = trial.recipe("a", {RATE: 1e-2}, 3, "tune")
    trial.data.offer(again, tmp_path / "r")  # what the first has prepared
    known = (tmp_path / "r" / OFFERED / "tokens.bin").stat().st_ino
    plain = modicum.train(modicum.plan(again), tmp_path / "r")
    assert (tmp_path / "r" / DATA / "tokens.bin").stat().st_ino == known
    losses = [row["loss"] for row in RunFolder(tmp_path / "r").rows("evaluations.jsonl")]
    assert plain["status"] == "finished"
    assert first.loss == pytest.approx(losses[-1], abs=1e-6)


def test_data_is_offered_to_runs_that_read_the_same(recipe: Recipe, tmp_path: Path) -> None:
    kept, run = RunTrials(tmp_path, {"a": recipe}).data, tmp_path / "run"
    kept.offer(recipe, run)
    assert not run.exists()
    (run / DATA).mkdir(parents=True)
    (run / DATA / "tokens.bin").write_bytes(b"ids")
    kept.keep(recipe, run)
    assert not (run / DATA).exists()
    kept.offer(recipe.changed(training__learning_rate=0.5), tmp_path / "same")
    kept.offer(recipe.changed(training__seed=5), tmp_path / "other")
    assert (tmp_path / "same" / OFFERED / "tokens.bin").read_bytes() == b"ids"
    assert not (tmp_path / "other").exists()
    RunFolder(tmp_path / "same").take_offered()
    kept.keep(recipe, tmp_path / "same")  # there is one already
    assert (tmp_path / "same" / DATA / "tokens.bin").exists()
    kept.remove()
    assert not (tmp_path / "data").exists()


@pytest.mark.expensive
def test_a_run_that_is_stopped_saves_and_resumes(recipe: Recipe, tmp_path: Path) -> None:
    long = recipe.changed(training__steps=4000)
    trial, ended = RunTrials(tmp_path, {"a": long}), []

    def work() -> None:
        try:
            trial("a", {}, 0, "tune")
        except Interrupted as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    [run] = _until(lambda: [f.parent for f in tmp_path.glob("runs/*/metrics.jsonl")])
    trial.stop()
    thread.join(120)
    assert len(ended) == 1
    done = len(RunFolder(run).rows("metrics.jsonl"))
    assert 0 < done < 4000
    assert RunFolder(run).read_record()["status"] == "interrupted"


def _until(look: Any, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it did not come to this"
        time.sleep(0.05)
    return found


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python has it: who starts tests in the background may have had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.expensive
def test_a_comparison_is_killed_and_ends_with_the_same_table(
    recipe: Recipe, tmp_path: Path, ctrl_c: None
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml.dump(recipe))
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "trials": 1, "seeds": 2}
    heard: list[dict[str, Any]] = []

    def killed(event: dict[str, Any]) -> None:
        heard.append(event)
        if sum(each["event"] == "trial" for each in heard) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        compare(str(file), tmp_path / "cut", progress=killed, **ask)
    runs = {run: run.stat().st_mtime_ns for run in tmp_path.glob("cut/runs/*/metrics.jsonl")}
    assert runs
    resumed = compare(str(file), tmp_path / "cut", **ask)
    for run, when in runs.items():
        assert run.stat().st_mtime_ns == when
    once = compare(str(file), tmp_path / "once", fresh=True, **ask)
    assert resumed.judgement == once.judgement
    assert [row["same"] for row in once.data.values()] == [True, True]
    first: dict[int, set[float]] = {}  # losses before the first update: of the same weights
    for row in once.trials:
        rows = RunFolder(Path(row.outcome.folder)).rows("evaluations.jsonl")
        first.setdefault(row.job.seed, set()).add(rows[0]["loss"])
        assert [each["step"] for each in rows] == [0, 6]
    assert {seed: len(losses) for seed, losses in first.items()} == dict.fromkeys(first, 1)
    best = recipe_yaml.load(tmp_path / "once" / "best.yaml")
    assert best.optimizer["method"] in ("adamw", "sgd")
    assert (tmp_path / "once" / RESULT).is_file()
    with pytest.raises(InputError, match="holds another comparison"):
        compare(str(file), tmp_path / "once", overrides=["training.batch_size=2"], **ask)


def test_fewer_than_two_sides_end_with_what_is_wrong(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml.dump(recipe))
    with pytest.raises(InputError, match="fewer than two sides can take part"):
        settled([str(file)], vary="adapter=none,lora")
    with pytest.raises(DoesNotFit, match="fewer than two sides can take part"):
        settled([str(file)], vary="optimizer=adamw,sgd", overrides=["budget.memory=1MB"])
    elsewhere = [f"model={{path: {tmp_path / 'none'}}}"]
    with pytest.raises(InputError, match=r"adamw, sgd: .*no such folder") as caught:
        settled([str(file)], vary="optimizer=adamw,sgd", overrides=elsewhere)
    assert str(caught.value).count("no such folder") == 1


def test_runs_that_are_timed_look_at_one_row(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, looked_at = QuickRuns(monkeypatch), []

    def train(runs: RunTrials, run: Path, made: Recipe) -> int:
        looked_at.append(made.evaluation.rows)
        return quick(run, made)

    monkeypatch.setattr(RunTrials, "_train", train)
    assert step_seconds({"a": recipe}) == {"a": [[0.5] * (STEPS - LEFT_OUT)] * ROUNDS}
    assert looked_at == [1] * ROUNDS


def test_times_of_no_update_are_not_kept(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {"a": [[], []]}
    monkeypatch.setattr("modicum.comparison.step_times.step_seconds", lambda *_: nothing)
    assert kept_step_seconds(tmp_path, {"a": recipe}, lambda text: None) == nothing
    assert list(tmp_path.iterdir()) == []


def test_seconds_are_measured_once_for_a_folder(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, measured = tmp_path / "small.yaml", []
    file.write_text(recipe_yaml.dump(recipe))

    def timed(recipes: dict[str, Recipe], tell: Any, ranks: int) -> dict[str, list[list[float]]]:
        measured.append(sorted(recipes))
        return {name: [[0.1 * len(measured) * (1 + (name == "sgd"))]] for name in recipes}

    monkeypatch.setattr("modicum.comparison.step_times.step_seconds", timed)
    ask: dict[str, Any] = {"vary": "optimizer=adamw,sgd", "budget": "seconds=10"}
    begun = settled([str(file)], folder=tmp_path / "c", **ask)
    assert [begun.fixed[name]["training.steps"] for name in ("adamw", "sgd")] == [95, 47]
    assert settled([str(file)], folder=tmp_path / "c", **ask).fixed == begun.fixed
    assert len(measured) == 1
    other = settled([str(file)], folder=tmp_path / "c", overrides=["model.width=32"], **ask)
    assert other.fixed["adamw"]["training.steps"] == 47
    assert settled([str(file)], folder=tmp_path / "c", **ask).fixed == begun.fixed
    settled([str(file)], **ask)
    assert len(measured) == 3
    (tmp_path / "c" / "step-times.json").write_text("[]")
    with pytest.raises(InputError, match=r"step-times\.json: holds no times of updates; remove it"):
        settled([str(file)], folder=tmp_path / "c", **ask)


@pytest.mark.expensive
def test_a_size_above_what_layers_take_becomes_the_largest(recipe: Recipe, tmp_path: Path) -> None:
    base, file = tmp_path / "base", tmp_path / "small.yaml"
    modicum.train(modicum.plan(recipe), base)
    adapted = recipe.plain() | {"model": {"path": str(base)}, "adapter": {"method": "lora"}}
    file.write_text(recipe_yaml.dump(Recipe(**adapted)))
    asked = settled([str(file)], vary="adapter=lora,mos,pissa", budget="tokens=1k")
    mos = next(side for side in asked.taking_part if side.name == "mos")
    assert asked.fixed["mos"]["adapter.rank"] == 2  # of one layer: one public row, one of its own
    assert mos.recipe is not None
    assert mos.recipe.adapter is not None
    assert (mos.recipe.adapter["method"], mos.recipe.adapter["rank"]) == ("mos", 2)
    assert "adapter.rank" not in asked.fixed["lora"]


def test_what_it_would_take_is_known_before(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(recipe_yaml.dump(recipe))
    asked = settled([str(file)], vary="optimizer=adamw,sgd", budget="tokens=1k", trials=3, seeds=2)
    row = asked.row()
    assert row["runs"] == 10
    assert [side["steps"] for side in row["sides"]] == [16, 16]  # of 4 x 16 tokens
    adamw, sgd = (side["bytes"] for side in row["sides"])
    assert adamw["trained"] == sgd["trained"]
    assert adamw["state"] > 1.9 * sgd["state"]
    assert row["hours"] > 0


@pytest.mark.expensive
def test_forms_of_layers_are_made_as_large_as_the_budget(recipe: Recipe, tmp_path: Path) -> None:
    file, forms = tmp_path / "small.yaml", ["dense", "low_rank", "monarch", "sst", "lost"]
    wide = {"layers": 4, "width": 192, "heads": 6, "kv_heads": 2, "vocabulary_size": 280}
    file.write_text(recipe_yaml.dump(recipe.changed(model=wide)))
    asked = settled([str(file)], vary=f"linear={','.join(forms)}", budget="trained=3MB")
    assert [side.name for side in asked.taking_part] == forms
    assert asked.references == ("dense",)
    trained = {row["side"]: row["bytes"]["trained"] for row in asked.row()["sides"]}
    assert trained.pop("dense") > 2 * 3e6
    assert asked.unequal["dense"].endswith("it has no size that could be changed")
    for name, size in trained.items():
        assert 0.96 * 3e6 <= size <= 3e6, name
        assert (name in asked.unequal) == (size < 0.97 * 3e6), name
        [(path, value)] = asked.fixed[name].items()
        assert path == ("linear.rank" if name == "sst" else "linear.share")
        side = next(side for side in asked.sides if side.name == name)
        assert side.recipe is not None
        assert side.recipe.linear == {"method": name, path.partition(".")[2]: value}
