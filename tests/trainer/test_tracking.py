"""Trackers: what they are given, once; none stops a run. Their packages are fakes here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.trainer.conftest import full, outcome, run

from modicum.core.errors import InputError, Interrupted
from modicum.recipe import Recipe
from modicum.trainer.tracking import Tracked, TrackedListener, followed
from modicum.trainer.tracking.mlflow import MlflowTracker
from modicum.trainer.tracking.tensorboard import TensorBoardTracker
from modicum.trainer.tracking.wandb import WandbTracker

STEP = {"event": "step", "step": 3, "loss": 2.0, "tokens_per_second": 5, "skipped": True}
EVALUATION = {"event": "evaluation", "step": 3, "loss": 1.0, "seconds": 0.5}


class Fake:
    """A tracker that keeps what it is given."""

    def __init__(self, failing: bool = False) -> None:
        self.failing, self.seen, self.status = failing, [], ""

    def log(self, step: int, figures: dict[str, float]) -> None:
        if self.failing:
            raise OSError("no network")
        self.seen.append((step, figures))

    def close(self, status: str) -> None:
        self.status = status


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    return Tracked(tmp_path, "project", "name", {"training": {"steps": 3}, "long": "x" * 900})


def test_a_tracker_is_given_the_figures_of_steps_and_evaluations() -> None:
    heard, fake = [], Fake()
    listener = TrackedListener(heard.append, {"fake": fake})
    test = {"event": "test", "step": 3, "loss": 1.5, "rows": 2}
    for event in ({"event": "phase", "name": "building"}, STEP, EVALUATION, test):
        listener(event)
    listener.close("finished")
    assert [event["event"] for event in heard] == ["phase", "step", "evaluation", "test"]
    assert fake.seen == [
        (3, {"train/loss": 2.0, "train/tokens_per_second": 5.0}),
        (3, {"validation/loss": 1.0, "validation/seconds": 0.5}),
        (3, {"test/loss": 1.5, "test/rows": 2.0}),
    ]
    assert fake.status == "finished"


def test_a_tracker_that_fails_is_named_once_and_left_out() -> None:
    heard, good = [], Fake()
    listener = TrackedListener(heard.append, {"bad": Fake(failing=True), "good": good})
    listener(STEP)
    listener(EVALUATION)
    warnings = [event["message"] for event in heard if event["event"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("bad failed and is left out from here on (no network)")
    assert len(good.seen) == 2


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_written(
    kind: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"tensorboard": "torch.utils.tensorboard"}.get(kind, kind)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"tracking.to: .*modicum\[{kind}\]"):
        run(full(dataset, tracking={"to": [kind]}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_how_a_run_ended_is_said_to_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Fake] = []

    def begin(tracked: Tracked, package: Any) -> Fake:
        assert (tracked.name, tracked.project) == (tmp_path.name, "modicum")
        made.append(Fake())
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    monkeypatch.setattr("modicum.trainer.tracking.wandb.begin", begin)
    for error, status in ((Interrupted("x"), "interrupted"), (ValueError(), "failed")):
        with pytest.raises(type(error)), followed(Recipe(), tmp_path, print, ["wandb"]):
            raise error
        assert made[-1].status == status
    with followed(Recipe(), tmp_path, print, ["wandb"]) as heard:
        heard(STEP)
    assert made[-1].status == "finished"
    assert len(made[-1].seen) == 1


def test_what_a_tracker_says_when_it_is_set_up_is_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = ModuleType("wandb")
    wandb.init = lambda **_: 1 / 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with (
        pytest.raises(InputError, match=r"tracking.to: wandb could not be set up: division"),
        followed(Recipe(), tmp_path, print, ["wandb"]),
    ):
        pass


def test_tensorboard_purges_what_comes_again(tracked: Tracked) -> None:
    made = []

    class Writer:
        def __init__(self, log_dir: str, purge_step: int) -> None:
            made.append((log_dir, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            made.append((name, value, step))

        def close(self) -> None:
            made.append("closed")

    tracker = TensorBoardTracker(tracked, Writer)
    assert made == []
    tracker.log(4, {"train/loss": 1.0})
    tracker.log(5, {"train/loss": 0.5})
    tracker.close("finished")
    folder = str(tracked.folder / "tensorboard")
    assert made == [(folder, 4), ("train/loss", 1.0, 4), ("train/loss", 0.5, 5), "closed"]
    TensorBoardTracker(tracked, Writer).log(5, {"validation/loss": 1.0})
    assert made[-2] == (folder, 6)  # the figures of step 5 itself stay


def test_tensorboard_itself_writes_its_files(tracked: Tracked) -> None:
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    tracker = TensorBoardTracker(tracked, writer)
    tracker.log(1, {"train/loss": 1.0})
    tracker.close("finished")
    assert list((tracked.folder / "tensorboard").glob("events.*"))


def test_wandb_knows_a_run_that_resumes_and_is_sent_no_step_twice(tracked: Tracked) -> None:
    begun, sent, axes, summary = [], [], {}, {}

    def log(figures: dict[str, float]) -> None:
        sent.append(figures)
        summary.update(figures)

    def init(**options: Any) -> Any:
        begun.append(options)
        return SimpleNamespace(
            resumed=len(begun) > 1,
            summary=summary,
            define_metric=lambda name, step_metric: axes.update({name: step_metric}),
            log=log,
            finish=lambda exit_code: sent.append({"ended": exit_code}),
        )

    wandb = SimpleNamespace(init=init)
    first = WandbTracker(tracked, wandb)
    first.log(0, {"validation/loss": 3.0})
    for step in (1, 2, 3):
        first.log(step, {"train/loss": 1.0})
    first.close("interrupted")
    second = WandbTracker(tracked, wandb)
    second.log(2, {"validation/loss": 2.0})  # the process before did not come to it
    for step in (3, 4):
        second.log(step, {"train/loss": 1.0})
    second.close("finished")
    assert [each["train/step"] for each in sent if "train/step" in each] == [1, 2, 3, 4]
    assert [each["validation/step"] for each in sent if "validation/step" in each] == [0, 2]
    assert [each["ended"] for each in sent if "ended" in each] == [1, 0]
    assert axes == {f"{part}/*": f"{part}/step" for part in ("train", "validation", "test")}
    assert begun[0]["id"] == begun[1]["id"]
    assert (begun[0]["project"], begun[0]["name"]) == ("project", "name")
    assert begun[0]["config"]["training"] == {"steps": 3}


class Mlflow:
    """As the module: keeps what it is sent."""

    def __init__(self) -> None:
        self.begun: list[tuple[str | None, str | None]] = []
        self.metrics: dict[str, list[int]] = {}
        self.parameters: dict[str, str] = {}
        self.ended: list[str] = []

    def set_experiment(self, name: str) -> None:
        self.experiment = name

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.begun.append((run_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def log_params(self, parameters: dict[str, str]) -> None:
        self.parameters |= parameters

    def log_metrics(self, figures: dict[str, float], step: int) -> None:
        for name in figures:
            self.metrics.setdefault(name, []).append(step)

    def MlflowClient(self) -> Any:  # noqa: N802 - MLflow's name
        steps = {name: list(seen) for name, seen in self.metrics.items()}
        return SimpleNamespace(
            get_metric_history=lambda run_id, name: [
                SimpleNamespace(step=step) for step in steps.get(name, ())
            ]
        )

    def end_run(self, status: str) -> None:
        self.ended.append(status)


def test_mlflow_knows_a_run_that_resumes_and_is_sent_no_step_twice(tracked: Tracked) -> None:
    mlflow = Mlflow()
    first = MlflowTracker(tracked, mlflow)
    first.log(0, {"validation/loss": 3.0})
    for step in (1, 2):
        first.log(step, {"train/loss": 1.0})
    first.close("interrupted")
    second = MlflowTracker(tracked, mlflow)
    for step in (2, 3):
        second.log(step, {"train/loss": 1.0})
    second.log(3, {"validation/loss": 1.0})
    second.close("finished")
    assert mlflow.begun == [(None, "name"), ("r1", None)]
    assert mlflow.metrics == {"validation/loss": [0, 3], "train/loss": [1, 2, 3]}
    assert mlflow.parameters["training.steps"] == "3"
    assert len(mlflow.parameters["long"]) == 500
    assert (mlflow.experiment, mlflow.ended) == ("project", ["KILLED", "FINISHED"])


def test_damaged_names_are_one_message(tracked: Tracked) -> None:
    (tracked.folder / "tracking.json").write_text("[]")
    with pytest.raises(InputError, match=r"tracking.json: is damaged"):
        MlflowTracker(tracked, Mlflow())


@pytest.mark.expensive
def test_a_run_that_is_followed_is_the_same_run(
    dataset: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    folder = tmp_path / "run"
    run(full(dataset, tracking={"to": ["mlflow"], "name": "mine"}), folder)
    assert outcome(folder) == outcome(finished)
    assert mlflow.begun == [(None, "mine")]
    assert mlflow.metrics["train/loss"] == list(range(1, 21))
    assert mlflow.metrics["validation/loss"] == [0, 10, 20]
    assert mlflow.ended == ["FINISHED"]
    assert json.loads((folder / "tracking.json").read_text()) == {"mlflow": "r1"}
    # What follows a run is no part of what it computes.
    assert run(full(dataset), folder)["status"] == "finished"
