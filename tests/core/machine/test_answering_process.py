"""A process that answers one question after another, and what may happen to it between two."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from modicum.core.machine.answering_process import AnsweringProcess
from modicum.core.machine.child_process import ChildFailed
from modicum.core.module_process import python_command

WHERE = """import os, sys, time
def where(given):
    print("a line that is no answer")
    if given == "dies":
        os.kill(os.getpid(), 9)
    if given == "fails":
        raise ValueError("such a number")
    if given == "sleeps":
        time.sleep(60)
    return {"process": os.getpid(), "folder": os.getcwd(),
            "rank": os.environ.get("RANK"), "long": "x" * given}
"""


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    (tmp_path / "tells_where.py").write_text(WHERE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "tells_where:where"


def test_questions_are_answered_by_one_process_that_is_no_rank(module, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "3")
    with AnsweringProcess(module, work="the work") as asked:
        first, second = asked.ask(1), asked.ask(3_000_000)
    assert first["process"] == second["process"] != os.getpid()
    assert first["rank"] is None
    assert len(second["long"]) == 3_000_000
    with pytest.raises(ProcessLookupError):
        os.kill(first["process"], 0)


def test_another_folder_gets_another_process(module, tmp_path, monkeypatch) -> None:
    with AnsweringProcess(module, work="the work") as asked:
        before = asked.ask(0)
        monkeypatch.chdir(tmp_path)
        moved = asked.ask(0)
    assert moved["process"] != before["process"]
    assert moved["folder"] == str(tmp_path)


def test_one_that_waited_too_long_is_started_again(module) -> None:
    with AnsweringProcess(module, work="the work", idle_seconds=0.2) as asked:
        first = asked.ask(0)
        time.sleep(1)
        assert asked.ask(0)["process"] != first["process"]


@pytest.mark.parametrize(
    ("question", "said"),
    [("fails", "such a number"), ("dies", "SIGKILL")],
)
def test_why_there_is_no_answer_is_said_and_the_next_one_comes(module, question, said) -> None:
    with AnsweringProcess(module, work="the work") as asked:
        first = asked.ask(0)["process"]
        with pytest.raises(ChildFailed, match=rf"the work(.|\n)*{said}"):
            asked.ask(question)
        assert asked.ask(0)["process"] != first


def test_one_that_says_nothing_for_long_is_given_up(module) -> None:
    with (
        AnsweringProcess(module, work="the work", limit_seconds=1) as asked,
        pytest.raises(ChildFailed, match="the work took over 1 s"),
    ):
        asked.ask("sleeps")


def test_one_that_was_killed_between_two_questions_is_started_again(module) -> None:
    with AnsweringProcess(module, work="the work") as asked:
        first = asked.ask(0)["process"]
        os.kill(first, signal.SIGKILL)
        time.sleep(0.2)
        assert asked.ask(0)["process"] != first


def test_it_ends_with_the_process_that_asks(module, tmp_path) -> None:
    asks = (
        "from modicum.core.machine.answering_process import AnsweringProcess\n"
        f"print(AnsweringProcess({module!r}, work='the work').ask(0)['process'])"
    )
    command = python_command(asks, None)
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not said.stderr
    for _ in range(50):
        if not Path(f"/proc/{int(said.stdout)}").exists():
            return
        time.sleep(0.1)
    pytest.fail("it is still there")
