"""A process that answers one question after another, and what may happen to it between two."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
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
    if given == "reads":
        return sys.stdin.read()
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


def test_outside_of_a_context_each_question_has_a_process_of_its_own(module) -> None:
    asked = AnsweringProcess(module, work="the work")
    found = [asked.ask(0)["process"] for _ in range(2)]
    assert found[0] != found[1]
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_context_within_another_ends_nothing(module) -> None:
    with AnsweringProcess(module, work="the work") as asked:
        with asked:
            first = asked.ask(0)["process"]
        assert asked.ask(0)["process"] == first


def test_each_thread_gets_its_own_answer(module) -> None:
    with AnsweringProcess(module, work="the work") as asked, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(asked.ask, range(20)))
    assert [len(each["long"]) for each in found] == list(range(20))


def test_what_it_runs_finds_nothing_to_read(module) -> None:
    with AnsweringProcess(module, work="the work", limit_seconds=20) as asked:
        assert [asked.ask("reads") for _ in range(2)] == ["", ""]


def test_a_process_with_more_than_a_thousand_open_files_asks_too(module) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2000:  # without a limit it is -1
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000 if 0 <= soft < 2000 else soft, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with AnsweringProcess(module, work="the work") as asked:
            assert asked.ask(0)["process"] != os.getpid()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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
        f"asked = AnsweringProcess({module!r}, work='the work').__enter__()\n"
        "print(asked.ask(0)['process'])"
    )
    command = python_command(asks, None)
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not said.stderr
    for _ in range(50):
        if not Path(f"/proc/{int(said.stdout)}").exists():
            return
        time.sleep(0.1)
    pytest.fail("it is still there")
