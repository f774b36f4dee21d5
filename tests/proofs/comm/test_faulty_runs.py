"""Runs of two hosts that are cut apart and resume, and what counts as wrong of them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.proofs.comm import faulty_runs
from modicum.proofs.comm.faulty_runs import (
    CUT,
    KILLED,
    NAN,
    NOTHING,
    OTHER,
    PAUSED,
    outcome,
    right,
    trial,
)


def found(kind: str, **changes: Any) -> dict[str, Any]:
    codes = {NAN: [0, 0], OTHER: [2, 2], KILLED: [4, -9]}.get(kind, [4, 4])
    return {"kind": kind, "rank": 1, "seconds": 3.0, "ended": 4.0, "codes": codes,
            "outcome": "calm", "to_the_bit": True} | changes  # fmt: skip


@pytest.mark.parametrize("kind", [CUT, KILLED, NAN, OTHER])
def test_what_is_as_it_should_be_is_right(kind: str) -> None:
    assert right(found(kind), "calm") == []


@pytest.mark.parametrize(
    ("kind", "changes", "wrong"),
    [
        (CUT, {"seconds": None}, "the sentence came after None s"),
        (CUT, {"seconds": 10.5}, "the sentence came after 10.5 s"),
        (CUT, {"ended": None}, "all had ended after None s"),
        (CUT, {"codes": [4, 1]}, "exit codes"),
        (KILLED, {"codes": [1, -9]}, "exit codes"),
        (KILLED, {"outcome": "another"}, "it did not resume to the bit"),
        (NAN, {"to_the_bit": False}, "it did not resume to the bit"),
        (NAN, {"codes": [4, 4]}, "exit codes"),
    ],
)
def test_what_is_wrong_is_said(kind: str, changes: dict[str, Any], wrong: str) -> None:
    [said] = right(found(kind, **changes), "calm")
    assert wrong in said


def test_a_host_is_heard_by_the_sentence_that_it_prints(tmp_path: Path) -> None:
    def says(text: str) -> None:
        (tmp_path / "said-0").write_text(text)

    says("rank 1 is no line of modicum's\n")
    assert not faulty_runs._names(tmp_path, KILLED, 0, 1)
    says("modicum: rank 10 (host a) is dead\n")
    assert not faulty_runs._names(tmp_path, KILLED, 0, 1)
    says("modicum: rank 1 (host a) is dead\n")
    assert faulty_runs._names(tmp_path, KILLED, 0, 1)
    assert faulty_runs._names(tmp_path, CUT, 0, 0)  # who is cut off hears nothing of the other
    assert not faulty_runs._names(tmp_path, NAN, 0, 1)


def test_an_outcome_is_of_a_run_that_has_finished_and_holds_its_bits(tmp_path: Path) -> None:
    assert outcome(tmp_path) == ""
    (tmp_path / "run.json").write_text(json.dumps({"status": "interrupted"}))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "seconds": 3.0}))
    (tmp_path / "evaluations.jsonl").write_text("")
    assert outcome(tmp_path) == ""
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished"}))
    first = outcome(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0, "seconds": 9.0}))
    assert outcome(tmp_path) == first
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5, "seconds": 9.0}))
    assert outcome(tmp_path) != first


def test_without_the_tools_it_is_said_which_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.proofs.comm.links.shutil.which", lambda name: None)
    with pytest.raises(InputError, match="unshare, ip, tc"):
        trial(NOTHING, 0, 0, {})


@pytest.mark.slow
def test_a_cut_cable_is_said_on_both_hosts_and_the_run_resumes(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
    tools = all(map(shutil.which, ("unshare", "ip", "tc")))
    if not tools or subprocess.run(own, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    data = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"the cat saw {n} trees and a stone"}) for n in range(80))
    data.write_text("\n".join(lines) + "\n")
    recipe = {
        "model": {"layers": 1, "width": 32, "heads": 2, "vocabulary_size": 270},
        "data": {"path": str(data), "column": "text", "sequence_length": 16},
        "training": {"steps": 6, "batch_size": 4, "compile": "none", "device": "cpu"},
        "parallel": {"strategy": "ddp"},
        "watchdog": {"method": "c4", "silent_seconds": 4.0},
        "evaluation": {"every": 100, "rows": 2},
        "checkpoint": {"every": 2},
        "samples": {"count": 0},
    }
    calm = trial(NOTHING, 0, 0, recipe)
    cut = trial(CUT, 1, 3, recipe)
    assert calm["outcome"]
    assert right(cut, calm["outcome"]) == []
    assert "rank 1 (host host-1) gives no sign of life" in cut["said"][0]
    for kind, rank in ((CUT, 1), (PAUSED, 0), (PAUSED, 1)):  # when nobody watches yet
        early = trial(kind, rank, 0, recipe, moment="start")
        assert right(early, calm["outcome"]) == []
        assert ", while ranks agreed on " in early["said"][1 - rank]
