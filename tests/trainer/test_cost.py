"""What saves of a run cost and how often they are made; its money and energy."""

from __future__ import annotations

import functools
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pool import Pool
from tests.trainer.conftest import full, losses, rows, run
from tests.trainer.test_ranks import trains

from modicum.core.errors import InputError, Interrupted
from modicum.core.machine.energy import EnergyCounters
from modicum.core.ranks.ranks import Ranks
from modicum.planner.save_interval import EVERY
from modicum.report import summary
from modicum.trainer.session import Session

AUTO = {"every": "auto", "hours_between_failures": 2.0}


def record(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run.json").read_text()))


def intervals(folder: Path) -> list[Any]:
    """What each revision of the plan says of the interval."""
    found = (each["choices"] for each in rows(folder, "plan.jsonl"))
    return [row["value"] for choices in found for row in choices if row["field"] == EVERY]


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save keeps training waiting for 2 s, as the clock says it."""
    save = Session.save

    def slow(session: Session, **options: Any) -> None:
        save(session, **options)
        session.stalled = 2.0

    monkeypatch.setattr(Session, "save", slow)


@pytest.mark.expensive
@pytest.mark.usefixtures("costly")
def test_the_interval_follows_the_first_save_and_changes_nothing(
    dataset: Path, finished: Path, tmp_path: Path
) -> None:
    run(full(dataset, checkpoint=AUTO), tmp_path / "run")
    # sqrt(2 * 2 s * 7200 s) = 169.7 s
    assert intervals(tmp_path / "run")[-1] == "170s"
    assert set(intervals(tmp_path / "run")) == {5, "170s"}
    assert "loses 1 min 25 s on average" in rows(tmp_path / "run", "plan.jsonl")[-1]["why"]
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [int(name[5:]) for name in steps] == [5, 20]
    assert losses(tmp_path / "run") == losses(finished)
    saves = record(tmp_path / "run")["saves"]
    assert saves["cost_seconds"] == 2.0
    assert saves["lost_seconds"] == pytest.approx(84.85, abs=0.01)
    assert saves["share"] == pytest.approx(2 / 169.7 + 84.85 / 7200, rel=1e-3)
    assert summary(tmp_path / "run")["saves"] == saves


@pytest.mark.usefixtures("costly")
def test_a_run_that_resumes_keeps_the_interval(dataset: Path, tmp_path: Path) -> None:
    values = full(dataset, checkpoint=AUTO)

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == 8:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(values, tmp_path / "run", listener=stop)
    run(values, tmp_path / "run")
    assert set(intervals(tmp_path / "run")[2:]) == {"170s"}
    assert record(tmp_path / "run")["steps"] == 20


@pytest.mark.usefixtures("costly")
def test_of_a_stated_interval_the_lost_work_is_said(dataset: Path, tmp_path: Path) -> None:
    stated = {"every": "10m", "hours_between_failures": 2.0}
    run(full(dataset, checkpoint=stated, training={"steps": 3}), tmp_path / "other")
    assert record(tmp_path / "other")["saves"] is None  # no save on the way was measured
    stated["every"] = 2
    run(full(dataset, checkpoint=stated, training={"steps": 3}), tmp_path / "run")
    saves = record(tmp_path / "run")["saves"]
    assert saves["cost_seconds"] == 2.0
    seconds = [row["seconds"] for row in rows(tmp_path / "run")]
    assert 0 < saves["every_seconds"] <= 2 * max(seconds)
    assert intervals(tmp_path / "run") == []


def slow_on_the_second(ranks: Ranks, values: dict[str, Any], folder: Path) -> str:
    """Train as a rank, of which the second waits for its saves for longer."""
    save = Session.save

    def slow(session: Session, **options: Any) -> None:
        save(session, **options)
        session.stalled = 1.0 + session.ranks.rank

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Session, "save", slow)
        return trains(ranks, values, folder)


@pytest.mark.ranks
@pytest.mark.expensive
def test_ranks_save_by_what_the_slowest_waits(pool: Pool, dataset: Path, tmp_path: Path) -> None:
    values = full(dataset, checkpoint=AUTO)
    assert pool.run(slow_on_the_second, values, tmp_path / "run", ranks=2) == ["done", "done"]
    assert intervals(tmp_path / "run")[-1] == "170s"
    assert record(tmp_path / "run")["saves"]["cost_seconds"] == 2.0


STATED = {"price_per_hour": 36.0, "currency": "EUR", "watts": 7200}


def test_a_run_says_what_it_cost_and_may_resume_at_another_price(
    dataset: Path, finished: Path, tmp_path: Path
) -> None:
    assert record(finished)["cost"] is None
    assert summary(finished)["cost"] is None
    values = full(dataset, cost=STATED, training={"steps": 2})
    found = run(values, tmp_path / "run")
    assert found["cost"] == {
        "money": pytest.approx(found["seconds"] / 100), "currency": "EUR",
        "kwh": pytest.approx(found["seconds"] / 500), "kwh_by": "stated",
    }  # fmt: skip
    values = full(dataset, cost={"price_per_hour": 72.0}, training={"steps": 3})
    found = run(values, tmp_path / "run")
    assert found["cost"] == {"money": pytest.approx(found["seconds"] / 50), "currency": "USD"}


def counters(folder: Path, micro_joules: int, size: int = 10**9) -> Path:
    """A folder as Linux has it, with a package of two counters, the second a part of the first."""
    for name, kind in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "name").write_text(f"{kind}\n")
        (folder / name / "energy_uj").write_text(f"{micro_joules}\n")
        (folder / name / "max_energy_range_uj").write_text(f"{size}\n")
    return folder


def test_a_counter_of_energy_that_begins_anew(tmp_path: Path) -> None:
    found = EnergyCounters(rapl=counters(tmp_path, 900_000_000))
    assert found.sources == ["rapl"]
    counters(tmp_path, 950_000_000)
    assert found.joules() == pytest.approx(50.0)
    counters(tmp_path, 20_000_000)
    assert found.joules() == pytest.approx(50.0 + 70.0)
    assert EnergyCounters(rapl=tmp_path / "none").sources == []
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("secret")
    assert EnergyCounters(rapl=tmp_path).sources == []


def test_the_counter_of_an_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reads = iter([3_000, 3_000, 10_500])  # millijoules
    asked = []
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda name: asked.append(name) or "handle",
        nvmlDeviceGetTotalEnergyConsumption=lambda _: next(reads),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    known = SimpleNamespace(uuid="1b2c")
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: known)
    found = EnergyCounters(0, rapl=tmp_path)
    assert (found.sources, asked) == (["nvml"], ["GPU-1b2c"])
    assert found.joules() == pytest.approx(7.5)


def test_measured_power_is_counted_over_all_processes_or_refused(
    dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = functools.partial(EnergyCounters, rapl=tmp_path / "none")
    monkeypatch.setattr("modicum.trainer.cost_meter.EnergyCounters", nowhere)
    values = full(dataset, cost={"watts": "measured"}, training={"steps": 2})
    with pytest.raises(InputError, match=r"cost\.watts: no counter of energy.*rapl"):
        run(values, tmp_path / "run")
    there = functools.partial(EnergyCounters, rapl=counters(tmp_path / "rapl", 0))
    monkeypatch.setattr("modicum.trainer.cost_meter.EnergyCounters", there)

    def spend(event: dict[str, Any]) -> None:
        if event["event"] == "step":
            counters(tmp_path / "rapl", 1_800_000 * event["step"])

    assert run(values, tmp_path / "run", listener=spend)["cost"] == {
        "kwh": pytest.approx(1e-6), "kwh_by": "rapl",
    }  # fmt: skip
    values["training"]["steps"] = 3  # another 1.8 J
    assert run(values, tmp_path / "run", listener=spend)["cost"]["kwh"] == pytest.approx(1.5e-6)
