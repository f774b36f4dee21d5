"""Ranks that end in every way there is, and what their supervisor makes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.parallel import launch, rank_process
from modicum.parallel.launch import Supervisor
from modicum.parallel.rank_environment import LOST, RankPlace, place

# What every rank's script begins with: it leaves its number and its process's in the folder.
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
(folder / f"pid-{rank}-{os.getpid()}").touch()
"""
# A rank that saves when it is asked to stop, and counts how often it is.
SAVES = (
    BEGIN
    + """
asked = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
(folder / f"ready-{rank}").touch()
while not asked:
    time.sleep(0.01)
until = time.monotonic() + 0.3
while time.monotonic() < until:
    time.sleep(0.01)
(folder / f"saved-{rank}").write_text(json.dumps(asked))
sys.exit(4)
"""
)
STUBBORN = (
    BEGIN
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready-{rank}").touch()
time.sleep(600)
"""
)


def command(script: str, folder: Path) -> list[str]:
    """A rank's command; without `site`, which takes longer than the scripts."""
    return [sys.executable, "-S", "-c", script, str(folder)]


def supervised(script: str, folder: Path, size: int = 2) -> int:
    """The exit code of the supervisor of a script's ranks; none of them is left."""
    code = Supervisor(command(BEGIN + script, folder), size).run()
    assert all(gone(pid) for pid in pids(folder))
    return code


def pids(folder: Path) -> list[int]:
    return [int(path.name.split("-")[2]) for path in folder.glob("pid-*")]


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit code."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def until(condition: Callable[[], Any], seconds: float = 120) -> None:
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last, "it has not come to that"
        time.sleep(0.01)


@contextmanager
def beside(script: str, folder: Path, size: int = 2) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in a process group of its own, as a terminal has it, once its ranks are up."""
    code = (
        "import sys\nfrom modicum.parallel.launch import Supervisor\n"
        f"sys.exit(Supervisor({command(script, folder)!r}, {size}).run())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with process:
        try:
            until(lambda: len(list(folder.glob("ready-*"))) == size)
            yield process
        finally:
            process.kill()
            for pid in pids(folder):
                if not gone(pid):
                    os.kill(pid, signal.SIGKILL)


# Ends


def test_ranks_have_their_places_and_rank_0_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "usable_cores", lambda: 7)
    script = """
print("said by", rank)
(folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))
"""
    assert supervised(script, tmp_path, 3) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("said by 0\n", "")
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for name in ("RANK", "LOCAL_RANK"):
        assert [one[name] for one in told] == ["0", "1", "2"]
    for name, value in (
        ("WORLD_SIZE", "3"), ("LOCAL_WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1"),
        ("OMP_NUM_THREADS", "2"), ("MODICUM_SUPERVISOR", str(os.getpid())),
    ):  # fmt: skip
        assert [one[name] for one in told] == [value] * 3
    assert len({one["MASTER_PORT"] for one in told}) == 1


def test_what_a_failing_rank_says_is_told_once_and_the_others_are_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
print(f"modicum: rank {rank}: no such file", file=sys.stderr)
if rank == 1:
    sys.exit(2)
time.sleep(600)
"""
    assert supervised(script, tmp_path, 3) == 2
    assert capfd.readouterr().err.splitlines() == [
        "modicum: rank 0: no such file",  # rank 0 has the terminal
        "modicum: rank 1: no such file",
    ]


def test_the_last_lines_of_a_bug_are_shown_with_the_rank_before_each(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
if rank == 0:
    time.sleep(600)
for number in range(100_000):
    print("line", number)
sys.exit(1)
"""
    assert supervised(script, tmp_path) == 1
    *lines, last = capfd.readouterr().err.splitlines()
    assert lines == [f"rank 1: line {number}" for number in range(99_800, 100_000)]
    assert last == "modicum: rank 1 failed with exit code 1; the other ranks were ended"


@pytest.mark.parametrize("code", [4, LOST])
def test_a_killed_rank_is_named_though_the_others_end_before_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    script = f"""
if rank == 0:
    sys.exit({code})
time.sleep(0.1)
print("of no interest", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert supervised(script, tmp_path) == 4
    assert capfd.readouterr().err == (
        "modicum: rank 1 was killed by SIGKILL; the other ranks were ended; the same command "
        "resumes from the last checkpoint\n"
    )


def test_a_told_error_is_the_reason_for_what_others_end_with(tmp_path: Path) -> None:
    codes = {0: "os.abort()", 1: "sys.exit(1)", 2: "sys.exit(3)", 3: "sys.exit(4)"}
    script = f"exec({codes}[rank])"
    assert supervised(script, tmp_path, 4) == 3


def test_ranks_that_only_lost_each_other_say_that_much(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert supervised(f"sys.exit({LOST})", tmp_path) == 4
    assert capfd.readouterr().err == (
        "modicum: the ranks have lost each other; the same command resumes\n"
    )


def test_a_rank_that_does_not_end_when_asked_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE", 0.2)
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready-{rank}").touch()
while rank or not (folder / "ready-1").exists():
    time.sleep(0.01)
sys.exit(5)
"""
    assert supervised(script, tmp_path) == 5


def test_a_rank_that_cannot_be_started(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(InputError, match="rank 0 cannot be started: No such file") as caught:
        Supervisor([missing], 2).run()
    assert caught.value.file == missing


# Starting again


def test_ranks_that_ask_for_it_are_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = """
if rank == 1 and len(list(folder.glob("pid-1-*"))) < 3:
    print("modicum: rank 1: too large; it is split", file=sys.stderr)
    sys.exit(75)
while len(list(folder.glob("pid-1-*"))) < 3:
    time.sleep(0.01)
"""
    assert supervised(script, tmp_path) == 0
    line = "modicum: rank 1: too large; it is split; all ranks start again\n"
    assert capfd.readouterr().err == 2 * line
    assert len(pids(tmp_path)) == 6


def test_ranks_are_not_started_again_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "RESTARTS", 2)
    assert supervised("sys.exit(75)", tmp_path, 1) == 4
    assert len(pids(tmp_path)) == 3


# Requests


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Ctrl-C"])
def test_a_request_reaches_every_rank_once_and_all_may_save(tmp_path: Path, how: str) -> None:
    with beside(SAVES, tmp_path, 3) as process:
        if how == "Ctrl-C":  # a terminal signals all of its foreground processes
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(getattr(signal, how))
        _, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (4, "")  # rank 0 has said it, where it had something to
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("saved-*")]
    assert saved == [["SIGTERM"]] * 3


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    with beside(STUBBORN, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # two at the same instant are one signal
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
        assert all(gone(pid) for pid in pids(tmp_path))
    assert process.returncode == 4
    assert told == "modicum: interrupted; the same command resumes\n"


def test_a_rank_that_fails_over_a_request_is_the_reason(tmp_path: Path) -> None:
    fails = SAVES.replace(
        "sys.exit(4)", "print('modicum: rank 1: full'); sys.exit(2 + 2 * (1-rank))"
    )
    with beside(fails, tmp_path) as process:
        process.terminate()
        _, told = process.communicate(timeout=120)
    assert (process.returncode, told) == (2, "modicum: rank 1: full\n")


def test_who_works_when_others_have_left_is_waited_for_and_who_waits_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_process, "_IDLE", 1.0)
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"ready-{rank}").touch()
while len(list(folder.glob("ready-*"))) < 2:
    time.sleep(0.01)
if rank == 1:
    sys.exit(4)
until = time.process_time() + 1
while time.process_time() < until:
    pass
(folder / "saved").touch()
time.sleep(600)
"""
    assert supervised(script, tmp_path) == 4
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("starter", ["ours", "torchrun"])
def test_ranks_end_with_a_killed_supervisor_even_in_a_call_that_does_not_return(
    tmp_path: Path, starter: str
) -> None:
    busy = BEGIN.replace("import json", f"import sys; sys.path[:0] = {sys.path!r}\nimport json")
    if starter == "torchrun":
        busy += "os.environ['TORCHELASTIC_RUN_ID'] = os.environ.pop('MODICUM_SUPERVISOR')"
    busy += """
from modicum.parallel.rank_environment import end_with_supervisor
end_with_supervisor()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
(folder / f"ready-{rank}").touch()
sum(range(10 ** 12))
"""
    with beside(busy, tmp_path) as process:
        process.kill()
        until(lambda: all(gone(pid) for pid in pids(tmp_path)))


# Places


def test_a_place_is_what_the_environment_says() -> None:
    assert place({}) == place({"RANK": "0", "WORLD_SIZE": "1"}) == RankPlace()
    assert place({"RANK": "3", "WORLD_SIZE": "4", "MODICUM_SUPERVISOR": "7"}) == RankPlace(
        3, 4, True
    )
    for wrong in ({"WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "-1"}, {"WORLD_SIZE": "many"}):
        with pytest.raises(InputError, match="--ranks N"):
            place(wrong)


def test_starting_ranks_needs_no_torch() -> None:
    code = "import sys, modicum.parallel.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
