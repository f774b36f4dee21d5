"""Trials on a local cluster of Ray, where that is installed; how calls end, on a pretended one."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modicum.comparison import Outcome, Side, Study, TrialRange
from modicum.comparison.ray_executor import RayExecutor
from modicum.core.errors import InputError, Interrupted

SIDES = [Side(name, {"rate": TrialRange(1e-3, 1e-1, 1e-2)}, {"n": name}) for name in "ab"]


class FileTrial:
    """A formula that leaves word of the process that computed it.

    Args:
        kills: whether its first call ends its process.
    """

    def __init__(self, folder: Path, *, kills: bool = False) -> None:
        self.folder, self.kills = folder, kills

    def __call__(self, side: str, settings: object, seed: int, part: str) -> Outcome:
        (self.folder / f"{side}-{part}-{seed}-{os.getpid()}").touch()
        if self.kills and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Outcome("finished", {"a": 1.0, "b": 2.0}[side] + 0.01 * seed)


@pytest.mark.slow
def test_trials_run_in_other_processes_and_come_to_the_same(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    seen = tmp_path / "seen"
    seen.mkdir()
    trial = FileTrial(seen)
    with RayExecutor() as executor:
        found = Study(tmp_path / "ray", SIDES, trial, trials=3, executor=executor).run()
    processes = {file.name.rpartition("-")[2] for file in seen.iterdir()}
    assert str(os.getpid()) not in processes
    assert found.judgement == Study(tmp_path / "here", SIDES, trial, trials=3).run().judgement


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_sentence_and_the_study_resumes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    seen = tmp_path / "seen"
    seen.mkdir()
    trial = FileTrial(seen, kills=True)
    with (
        pytest.raises(Interrupted, match=r"was killed.*the same command resumes"),
        RayExecutor(1000) as executor,
    ):
        Study(tmp_path / "ray", SIDES, trial, trials=3, executor=executor).run()
    found = Study(tmp_path / "ray", SIDES, trial, trials=3).run()
    assert found.judgement == Study(tmp_path / "here", SIDES, trial, trials=3).run().judgement


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's, of a call that raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__("a traceback of several lines")
        self.cause = cause


class PretendedRay:
    """Ray, as far as the executor uses it, whose work ends when a test says so."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, cores: float) -> None:
        self.cores, self.asked = cores, list[dict[str, Any]]()
        self.work, self.cancelled, self.ended = list[Any](), list[Any](), False

    def is_initialized(self) -> bool:
        return False

    def init(self, **options: Any) -> None:
        assert options["include_dashboard"] is False

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Resources": {"CPU": self.cores}}, {"Resources": {}}]

    def remote(self, **options: Any) -> Any:
        self.asked.append(options)

        def begun(*arguments: Any) -> Any:
            future = Future[Any]()
            self.work.append(SimpleNamespace(future=lambda: future))
            return self.work[-1]

        return lambda function: SimpleNamespace(remote=begun)

    def cancel(self, work: Any, *, force: bool) -> None:
        assert force
        self.cancelled.append(work)

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    pretended = PretendedRay(cores=4.0)
    monkeypatch.setitem(sys.modules, "ray", pretended)
    return pretended


@pytest.mark.parametrize(("cores", "asked"), [(1, 1), (3, 3), (16, 4.0)])
def test_no_trial_asks_for_more_cores_than_a_machine_has(
    ray: PretendedRay, cores: int, asked: float
) -> None:
    with RayExecutor(cores) as executor:
        executor.submit(print)
    assert ray.asked == [{"num_cpus": asked, "max_retries": 0}]
    assert ray.cancelled == ray.work  # it had not ended
    assert ray.ended


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RayTaskError(InputError("no such task")), InputError),
        (RayError("the worker died"), BrokenExecutor),
        (ValueError("else"), ValueError),
    ],
)
def test_what_a_call_raises_is_its_own_and_a_lost_worker_is_said(
    ray: PretendedRay, raised: Exception, kind: type[Exception]
) -> None:
    with RayExecutor() as executor:
        futures = [executor.submit(print) for _ in range(3)]
        futures[2].cancel()
        for work in ray.work[1:]:
            work.future().set_result(7)
        ray.work[0].future().set_exception(raised)
    assert type(futures[0].exception()) is kind
    assert futures[1].result() == 7
    assert futures[2].cancelled()
    assert ray.cancelled == []
