"""The benchmark of nulls: it resumes, keeps what others have run, and says what never ran."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
EVERY = ["adamw8bit", "lion", "muon", "soap"]


@dataclass
class Run:
    planted: str | None = None
    defects: tuple[str, ...] = ()
    reason: str = "the claim has fallen"


@pytest.fixture
def nulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    module, common = (importlib.import_module(name) for name in ("nulls", "common"))
    for each in (module, common):
        monkeypatch.setattr(each, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "sources_digest", lambda: "these")
    return module


def prover(module: Any, monkeypatch: pytest.MonkeyPatch, ends: dict[str, Any]) -> list[str]:
    """Proofs that end as told; their names in the order in which they run."""
    ran: list[str] = []

    def prove(name: str, *, null: bool, full: bool) -> Run:
        assert null
        ran.append(name)
        end = ends.get(name, Run())
        if isinstance(end, BaseException):
            raise end
        return end  # type: ignore[no-any-return]

    monkeypatch.setattr(module, "prove", prove)
    return ran


def test_a_run_that_is_stopped_resumes(
    nulls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = prover(nulls, monkeypatch, {"muon": KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        nulls.run_nulls(EVERY, EVERY)
    found = json.loads((tmp_path / "nulls.json").read_text())
    assert list(found["proofs"]) == ["adamw8bit", "lion"]
    assert found["not_run"] == ["muon", "soap"]
    ran = prover(nulls, monkeypatch, {"soap": Run(defects=("it met its bar",))})
    found = nulls.run_nulls(EVERY, EVERY)
    assert ran == ["muon", "soap"]
    assert (found["share_noticed"], found["ran"], found["not_run"]) == (0.75, 4, [])
    assert nulls.run_nulls(EVERY, EVERY) == found
    assert ran == ["muon", "soap"]


def test_other_sources_run_again_and_what_is_not_asked_for_stays(
    nulls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = prover(nulls, monkeypatch, {})
    before = nulls.run_nulls(EVERY[:2], EVERY)["proofs"]["adamw8bit"]
    monkeypatch.setattr(nulls, "sources_digest", lambda: "others")
    after = nulls.run_nulls(["lion"], EVERY)["proofs"]
    assert ran == ["adamw8bit", "lion", "lion"]
    assert after["adamw8bit"] == before
    assert [after[name]["sources"] for name in ("adamw8bit", "lion")] == ["these", "others"]
    assert list(nulls.run_nulls(["soap"], EVERY, full=True)["proofs"]) == ["soap"]


def test_what_other_sources_have_run_counts_as_not_run(
    nulls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prover(nulls, monkeypatch, {})
    assert nulls.run_nulls(EVERY, EVERY)["share_noticed"] == 1.0
    monkeypatch.setattr(nulls, "sources_digest", lambda: "others")
    found = nulls.run_nulls(["lion"], EVERY)
    assert (found["share_noticed"], found["ran"]) == (0.25, 1)
    assert found["not_run"] == ["adamw8bit", "muon", "soap"]


def test_the_file_is_written_where_all_is_known(
    nulls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = prover(nulls, monkeypatch, {})
    nulls.run_nulls(EVERY[:3], EVERY[:3])
    nulls.run_nulls(EVERY[:3], EVERY)
    assert len(ran) == 3
    found = json.loads((tmp_path / "nulls.json").read_text())
    assert (found["share_noticed"], found["not_run"]) == (0.75, ["soap"])


def test_a_library_that_is_missing_is_no_verdict(
    nulls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = InputError("needs heavyball, which is not installed")
    ran = prover(nulls, monkeypatch, {"soap": missing})
    found = nulls.run_nulls(EVERY, EVERY)
    assert found["share_noticed"] == 0.75  # of all proofs, and one of them did not run
    assert (found["ran"], found["not_run"]) == (3, ["soap"])
    assert "heavyball" in found["proofs"]["soap"]["reason"]
    nulls.run_nulls(EVERY, EVERY)
    assert ran == [*EVERY, "soap"]


def test_all_proofs_of_the_room_of_optimizers_are_asked(nulls: Any) -> None:
    names = {
        name
        for name, record in nulls.catalog().items()
        if record.room == "optim" and nulls.has_proof(record)
    }
    assert {"adam_mini", "fair_optim", "lion", "muon", "scion", "soap"} <= names
