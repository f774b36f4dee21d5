"""C4's proof: what falls with the null, and one real fault."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from modicum.core.contracts.catalog import find
from modicum.proofs import ProofRun
from modicum.proofs.comm import c4 as home
from modicum.proofs.comm.fatal_bench import FATAL, _names, fatal_trials
from modicum.proofs.comm.port_bench import on_ports, port_down_trials


def _slow(at: str, ranks: int, arguments: dict[str, Any], **_: Any) -> list[Any]:
    """What ranks would find that name whoever has the fault, in eight iterations."""
    calls = dict(arguments["calls"])
    right = not calls["slow_trials"]["shift"]
    slow = [
        {"part": one["part"], "right": right, "false": 0, "said": ["a sentence"], "iterations": 8}
        for one in calls["slow_trials"]["trials"]
    ]
    return [[slow, {"iterations": 60, "said": []}, [0.99, 1.0, 1.01]]] * ranks


def _fatal(trials: list[dict[str, Any]], size: int, shift: int) -> list[dict[str, Any]]:
    found = {"seconds": 1.5, "ended": 4.0, "code_4": True}
    return [
        {"watched": True, **one, "right": not shift and one.get("watched", True), **found}
        for one in trials
    ]


def _ports(calls: list[tuple[str, dict[str, Any]]], size: int) -> list[Any]:
    arguments = dict(calls)["slow_port_trials"]
    found = {"right": not arguments["shift"], "false": 0, "iterations": 4}
    slow = [{**one, **found} for one in arguments["trials"]]
    return [slow, {"iterations": 60, "said": []}, [0.99, 1.0, 1.01]]


def _down(trials: list[dict[str, Any]], size: int, shift: int) -> list[dict[str, Any]]:
    return [{**one, "right": not shift, "ended": 8.5, "code_4": True} for one in trials]


@pytest.mark.parametrize("null", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_the_claim_falls_with_the_null(
    null: bool, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "at_ranks", _slow)
    monkeypatch.setattr(home, "fatal_trials", _fatal)
    monkeypatch.setattr(home, "on_ports", _ports)
    monkeypatch.setattr(home, "port_down_trials", _down)
    run = ProofRun(find("c4"), null=null, full=full)
    home.prove(run)
    proof = run.conclude()
    assert proof.claim_verdict == ("does not hold" if null else "holds")
    assert proof.defects == ()
    assert len(proof.figures) == (4 if full else 2)


def test_a_false_alarm_lowers_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    def alarmed(*arguments: Any, **more: Any) -> list[Any]:
        found = _slow(*arguments, **more)
        found[0][1]["said"] = ["rank 2 (host b) is slow"]
        return found

    monkeypatch.setattr(home, "at_ranks", alarmed)
    monkeypatch.setattr(home, "fatal_trials", _fatal)
    run = ProofRun(find("c4"), null=False, full=False)
    home.prove(run)
    assert run.conclude().claim_verdict == "in part"


@pytest.mark.parametrize(
    ("changed", "holds"), [({"right": False}, False), ({"ended": None}, False), ({}, True)]
)
def test_ports_that_are_down_count(
    changed: dict[str, Any], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*arguments: Any) -> list[Any]:
        return [{**one, **changed} for one in _down(*arguments)]

    monkeypatch.setattr(home, "at_ranks", _slow)
    monkeypatch.setattr(home, "fatal_trials", _fatal)
    monkeypatch.setattr(home, "on_ports", _ports)
    monkeypatch.setattr(home, "port_down_trials", down)
    run = ProofRun(find("c4"), null=False, full=True)
    home.prove(run)
    assert (run.conclude().claim_verdict == "holds") == holds


@pytest.mark.ranks
@pytest.mark.slow
def test_a_slow_port_is_named_and_one_that_is_down_ends_the_run() -> None:
    own = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
    tools = all(map(shutil.which, ("unshare", "ip", "tc")))
    if not tools or subprocess.run(own, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    trials = [{"rank": 1, "port": "in"}]
    ((slow,),) = on_ports([("slow_port_trials", {"trials": trials})], 3)
    assert slow["right"], slow["said"]
    assert slow["said"][0].startswith("the link rank 0 (host host-0) -> rank 1 (host host-1) is ")
    assert slow["rate"] < slow["usual_rate"] / 2
    (down,) = port_down_trials([{"rank": 1, "apart": True}], 3)
    assert (down["right"], down["code_4"]) == (True, True), down
    assert "stands still since" in down["said"][0]


def test_which_printed_text_names_a_rank() -> None:
    assert _names("Rank 3 is gone", 3)
    assert _names("[3] lost", 3)
    assert not _names("[rank0]: Connection closed by peer [127.0.0.1]:3103", 3)
    assert not _names("rank 31", 3)


@pytest.mark.ranks
@pytest.mark.expensive
def test_a_killed_rank_is_named_and_pytorch_alone_names_nobody() -> None:
    killed = {"kind": "killed", "rank": 2}
    watched, bare = fatal_trials([killed, {**killed, "watched": False, "within": 10.0}], 3)
    assert (watched["right"], watched["code_4"]) == (True, True)
    assert watched["said"][0].startswith("rank 2 (host ")
    assert FATAL["killed"] in watched["said"][0]
    assert not bare["right"]
    assert "losed by peer" in bare["said"][0] or "reset by peer" in bare["said"][0]
