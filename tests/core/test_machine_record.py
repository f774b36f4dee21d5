from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

from modicum.core.errors import InputError, Interrupted, ModicumError
from modicum.core.machine import identity, record
from modicum.core.machine.probe_line import RUNS, runs_of
from modicum.core.machine.record import (
    MachineRecord,
    OtherRuns,
    ProbeFailed,
    Reads,
    machine_record,
    remembered,
)
from modicum.trainer import probe

# It measures nothing, and counts how often it was asked.
PROBE = """
import json, os, pathlib, sys, time
with open(pathlib.Path(__file__).with_name("asked"), "a") as file:
    file.write(f"{os.environ.get('RANK')} {os.environ['OMP_NUM_THREADS']} {sys.argv[1:]}\\n")
time.sleep(0.3)
print("and something else")
parts = {
    "every": {"loaded_bytes": 7_000_000, "compiler_bytes": 5_000_000, "kept": [0.01, 0.05],
        "efficiency": 0.6, "half_efficiency": 2.4, "with_tokenizer_bytes": 6_000_000,
        "without_gradients_bytes": 3_000_000},
    "images": {"images": {"loaded_bytes": 5_500_000, "kept": [0.4, 0.5], "efficiency": 0.5,
        "half_efficiency": 1.7}},
    "sequences": {"sequences": {"loaded_bytes": 5_200_000, "kept": [0, 1], "efficiency": 0.3}},
    "recomputation": {"kept_again": [0.2, 0.3]},
    "compiled": {"compiled_bytes": 800_000},
}
found = [figures for part, figures in parts.items() if part in sys.argv]
print(json.dumps({name: value for figures in found for name, value in figures.items()}))
"""
IMAGES = {"loaded_bytes": 5_500_000, "kept": [0.4, 0.5], "efficiency": 0.5, "half_efficiency": 1.7}
FIGURES = {
    "loaded_bytes": 7_000_000,
    "compiler_bytes": 5_000_000,
    "kept": [0.01, 0.05],
    "efficiency": 0.6,
    "half_efficiency": 2.4,
    "with_tokenizer_bytes": 6_000_000,
    "kept_again": [0.2, 0.3],
    "without_gradients_bytes": 3_000_000,
    "compiled_bytes": 800_000,
    "images": IMAGES,
    "sequences": {"loaded_bytes": 5_200_000, "kept": [0, 1], "efficiency": 0.3},
    "when": "then",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another user's cache, where nothing was measured, and another probe."""
    probe = tmp_path / "probe"
    probe.mkdir()
    (probe / "fake_probe.py").write_text(PROBE)
    monkeypatch.setenv("PYTHONPATH", str(probe))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(record, "PROBE", "fake_probe")
    forget(monkeypatch)
    return probe


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process would begin."""
    monkeypatch.setattr(record, "_known", {})


def asked(folder: Path) -> int:
    file = folder / "asked"
    return len(file.read_text().splitlines()) if file.exists() else 0


def quiet(_: str) -> None:
    pass


def test_a_machine_is_measured_once_and_read_from_then_on(folder, monkeypatch, capsys):
    first = machine_record()
    assert (first.loaded_bytes, first.kept, first.efficiency) == (7_000_000, (0.01, 0.05), 0.6)
    assert first.expected == pytest.approx(1.03)
    assert capsys.readouterr().err.startswith("modicum: Measuring this machine, once;")
    assert machine_record() is first
    forget(monkeypatch)
    assert machine_record() == first
    assert capsys.readouterr().err == ""
    assert asked(folder) == 1
    assert identity.record_file().parent == folder.parent / "cache" / "modicum" / "machines"


def test_what_is_loaded_already_is_not_counted_again(monkeypatch):
    made = MachineRecord(7_000_000, (0.0, 0.0), 0.5, compiler_bytes=5_000_000)
    for loaded, bytes_left, last in ((False, 7_000_000, 5_000_000), (True, 2_000_000, 0)):
        monkeypatch.setattr(record, "compiler_is_loaded", lambda loaded=loaded: loaded)
        assert (made.still_loaded(), made.loaded_last()) == (bytes_left, last)


def test_a_run_loads_and_keeps_what_runs_that_read_the_same_do(monkeypatch):
    monkeypatch.setattr(record, "compiler_is_loaded", lambda: True)
    made = machine_record(say=quiet)
    found = {reads: made.of_run(reads) for reads in get_args(Reads)}
    loaded = {reads: (each.loaded_bytes, each.still_loaded()) for reads, each in found.items()}
    assert loaded == {
        "new tokenizer": (7_000_000, 2_000_000),
        "tokenizer": (6_000_000, 1_000_000),
        "images": (5_500_000, 500_000),
        "sequences": (5_200_000, 200_000),
    }
    assert [each.kept for each in found.values()] == [
        (0.01, 0.05),
        (0.01, 0.05),
        (0.4, 0.5),
        (0, 1),
    ]
    again = [each.kept_where(recompute=True) for each in found.values()]
    assert again == [(0.2, 0.3), (0.2, 0.3), (0.4, 0.5), (0, 1)]
    rates = [(each.efficiency, each.efficiency_in(half=True)) for each in found.values()]
    assert rates == [(0.6, 2.4), (0.6, 2.4), (0.5, 1.7), (0.3, 1.2)]
    assert made.kept_where(recompute=False) == (0.01, 0.05)
    # Where there are no gradients nothing loads the compiler; where it is there already, it stays.
    forward = made.of_run("images", gradients=False)
    assert (forward.still_loaded(), forward.kept) == (3_000_000, (0.4, 0.5))
    # A profile of another machine does not say.
    assert MachineRecord(7, (0.1, 0.2), 0.5).of_run("tokenizer", gradients=False).loaded_bytes == 7
    assert MachineRecord(7, (0.1, 0.2), 0.5).of_run("images") == MachineRecord(7, (0.1, 0.2), 0.5)


def test_what_few_runs_need_is_measured_when_one_of_them_does(folder, monkeypatch, capsys):
    made = machine_record()
    assert (made.kept_again, made.images, made.sequences) == (None, None, None)
    assert made.kept_where(recompute=True) == made.kept_where(recompute=True) == (0.2, 0.3)
    assert made.of_run("images").loaded_bytes == 5_500_000
    # An earlier reading learns of it as well, as does another process.
    assert made.of_run("images").kept_where(recompute=True) == (0.4, 0.5)
    compiled = made.of_run("tokenizer", compiled=True)
    assert compiled.loaded_bytes == made.of_run("tokenizer").loaded_bytes + 800_000
    forget(monkeypatch)
    found = machine_record(parts=["recomputation", "images", "compiled"])
    assert (found.kept_again, found.images) == (
        (0.2, 0.3),
        OtherRuns(5_500_000, (0.4, 0.5), 0.5, 1.7),
    )
    assert (found.loaded_bytes, found.when) == (made.loaded_bytes, made.when)
    words = [line.split("[")[1] for line in (folder / "asked").read_text().splitlines()]
    assert words == [
        "'cpu', 'every']",
        "'cpu', 'recomputation', '--loaded=7000000']",
        "'cpu', 'images', '--loaded=7000000']",
        "'cpu', 'compiled', '--loaded=7000000']",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == [
        "modicum: Measuring more of this machine, once: a run whose blocks run again in the "
        "backward pass; it takes seconds on a fast processor, minutes on a slow one.",
        "modicum: Measuring more of this machine, once: a run on images; it takes "
        "seconds on a fast processor, minutes on a slow one.",
        "modicum: Measuring more of this machine, once: a run whose blocks are compiled; it takes "
        "seconds on a fast processor, minutes on a slow one.",
    ]


def test_parts_that_are_named_are_measured_at_once(folder):
    made = machine_record(parts=["images"], say=quiet)
    assert made.has(["images"])
    assert not made.has(["recomputation"])
    assert (folder / "asked").read_text().endswith("['cpu', 'every', 'images']\n")


def test_a_record_that_is_given_measures_nothing(folder):
    given = MachineRecord(7, (0.1, 0.2), 0.5)
    assert given.kept_where(recompute=True) == (0.1, 0.2)
    assert given.with_part("images") is given
    assert asked(folder) == 0


def test_it_is_measured_anew_when_asked_to(folder, capsys):
    machine_record()
    machine_record(again=True, say=quiet)
    assert asked(folder) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"record": null}',
        '{"record": []}',
        pytest.param("[" * 100_000, id="lists in lists"),
        json.dumps({"record": FIGURES | {"loaded_bytes": float("inf")}}),
        json.dumps({"record": FIGURES | {"loaded_bytes": -1}}),
        json.dumps({"record": FIGURES | {"compiler_bytes": 8_000_000}}),
        json.dumps({"record": FIGURES | {"half_efficiency": 0}}),
        json.dumps({"record": FIGURES | {"with_tokenizer_bytes": 4_000_000}}),
        json.dumps({"record": FIGURES | {"images": IMAGES | {"loaded_bytes": -1}}}),
        json.dumps({"record": FIGURES | {"without_gradients_bytes": -1}}),
        json.dumps({"record": FIGURES | {"sequences": IMAGES | {"kept": [float("nan")] * 2}}}),
        json.dumps({"record": FIGURES | {"images": IMAGES | {"efficiency": 0}}}),
        json.dumps({"record": FIGURES | {"images": {"loaded_bytes": 1}}}),
        json.dumps({"record": FIGURES | {"kept": [0.5, 0.1]}}),
        json.dumps({"record": FIGURES | {"kept": [0.1]}}),
        json.dumps({"record": FIGURES | {"kept_again": [0.3, 0.2]}}),
        json.dumps({"record": FIGURES | {"kept_again": [-0.1, 0.2]}}),
        json.dumps({"record": FIGURES | {"kept": [float("nan"), 0.1]}}),
        json.dumps({"record": FIGURES | {"efficiency": 0}}),
        json.dumps({"record": {k: v for k, v in FIGURES.items() if k != "when"}}),
    ],
)
def test_a_file_that_cannot_be_used_is_measured_anew(folder, monkeypatch, content):
    file = identity.record_file()
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"record": FIGURES}))
    assert machine_record(say=quiet).when == "then"
    forget(monkeypatch)
    file.write_text(content)
    assert machine_record(say=quiet).loaded_bytes == 7_000_000
    assert asked(folder) == 1
    assert json.loads(file.read_text())["record"]["kept"] == [0.01, 0.05]


def test_what_a_record_depends_on_has_a_file_of_its_own(monkeypatch):
    files = {identity.record_file()}
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "TCMALLOC_X", "MALLOC_CONF"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "glibc.pthread.rseq=1")
            files.add(identity.record_file())
            assert name in identity.depends_on()
    with monkeypatch.context() as patched:
        patched.setattr(identity.torch, "__version__", "9.9.9")
        files.add(identity.record_file())
    with monkeypatch.context() as patched:
        patched.setattr(identity.torch, "get_num_threads", lambda: 99)
        files.add(identity.record_file())
    with monkeypatch.context() as patched:
        patched.setattr(identity.sys, "version", "3.99.0 (main)")
        files.add(identity.record_file())
    assert len(files) == 9
    monkeypatch.setenv("UNRELATED", "1")
    assert identity.record_file() in files


def test_another_environment_is_measured_on_its_own(folder, monkeypatch):
    machine_record(say=quiet)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    machine_record(say=quiet)
    assert asked(folder) == 2


def test_an_accelerator_has_a_record_of_its_own_by_its_name(folder, monkeypatch):
    monkeypatch.setattr(identity.torch.cuda, "get_device_name", lambda: "H200")
    assert machine_record(say=quiet) == machine_record("cpu")
    machine_record("cuda", say=quiet)
    assert asked(folder) == 2
    assert (folder / "asked").read_text().splitlines()[1].endswith("['cuda', 'every']")
    assert identity.depends_on("cuda")["accelerator"] == "H200"
    assert "accelerator" not in identity.depends_on()
    assert identity.record_file("cuda") != identity.record_file()


ASK = """
from modicum.core.machine import record
record.PROBE = "fake_probe"
print(record.machine_record().when)
"""


@pytest.mark.expensive
def test_processes_that_ask_at_once_measure_once(folder):
    started = [
        subprocess.Popen([sys.executable, "-c", ASK], stdout=subprocess.PIPE) for _ in range(2)
    ]
    first, second = (process.communicate()[0] for process in started)
    assert first == second != b""
    assert asked(folder) == 1


def test_a_rank_s_probe_is_a_process_alone_with_the_threads_of_the_run(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(identity.torch, "get_num_threads", lambda: 3)
    machine_record(say=quiet)
    assert (folder / "asked").read_text() == "None 3 ['cpu', 'every']\n"


def test_without_a_cache_that_can_be_written_the_temporary_folder_is_taken(
    folder, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    first = machine_record(say=quiet)
    forget(monkeypatch)
    assert machine_record() == first
    assert asked(folder) == 1
    assert remembered("seven", lambda: [7]) == [7]
    assert remembered("seven", lambda: pytest.fail("measured again")) == [7]
    [made] = (tmp_path / "tmp").iterdir()
    assert made.name == f"modicum-machines-{os.getuid()}"
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("made", ["shared", "link"])
def test_a_temporary_folder_that_others_can_write_is_not_believed(tmp_path, monkeypatch, made):
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    there = tmp_path / f"modicum-machines-{os.getuid()}"
    (tmp_path / "theirs").mkdir()
    if made == "link":
        there.symlink_to(tmp_path / "theirs")
    else:
        there.mkdir()
        there.chmod(0o777)
    figures = (there / identity.record_file().name).with_suffix(".kernels.json")
    figures.write_text('{"seven": [8]}')
    assert remembered("seven", lambda: [7]) == [7]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match="is not this user's alone"):
        machine_record(say=quiet)


@pytest.mark.parametrize(
    ("probe", "told"),
    [
        ("raise SystemExit('no room here')", "no room here"),
        ("print('1 2 3')", "1 2 3"),
        ("print('{}')", "{}"),
        ("", "fake_probe failed"),
        ('print(\'{"loaded_bytes": 1, "kept": [2, 1], "efficiency": 1}\')', "loaded_bytes"),
    ],
)
def test_a_probe_that_fails_is_one_error_with_its_last_words(folder, probe, told):
    (folder / "fake_probe.py").write_text(probe)
    with pytest.raises(ProbeFailed, match="could not be measured") as caught:
        machine_record(say=quiet)
    assert isinstance(caught.value, ModicumError)
    assert told in str(caught.value)
    assert not identity.record_file().exists()


def test_the_probe_finds_what_this_process_finds_and_no_more(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.syspath_prepend(str(folder))  # as a notebook may have found the package
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('of the current folder')")
    monkeypatch.chdir(here)
    assert machine_record(say=quiet).loaded_bytes == 7_000_000


def test_a_process_that_cannot_be_started_is_one_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(ProbeFailed, match="no process could be started"):
        machine_record(say=quiet)


def test_a_probe_that_does_not_end_is_stopped(folder, monkeypatch):
    (folder / "fake_probe.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(record, "LIMIT_SECONDS", 0.2)
    with pytest.raises(ProbeFailed, match=r"took over 0\.2 s"):
        machine_record(say=quiet)


def test_a_probe_that_is_ended_from_outside_is_one_sentence(folder, monkeypatch):
    (folder / "fake_probe.py").write_text("import os; os.kill(os.getpid(), 15)")
    with pytest.raises(ProbeFailed, match=r"was ended by SIGTERM, from outside; the same command"):
        machine_record(say=quiet)


def test_a_part_of_the_probe_that_is_stopped_stops_the_probe(tmp_path, monkeypatch):
    def stopped(_: Path) -> dict[str, float]:
        raise Interrupted("stopped by SIGTERM")

    if (child := os.fork()) == 0:
        probe._alone(tmp_path / "part", stopped)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


def test_a_probe_that_measures_part_after_part_is_not_stopped(folder, monkeypatch):
    part = "time.sleep(0.2); print(1, file=sys.stderr, flush=True)"
    busy = f"import sys, time\nfor _ in range(8): {part}"
    (folder / "fake_probe.py").write_text(f"{busy}\n{PROBE}")
    monkeypatch.setattr(record, "LIMIT_SECONDS", 1.4)  # less than all of them take
    assert machine_record(say=quiet).loaded_bytes == 7_000_000


def test_on_a_terminal_a_line_says_how_far_the_measuring_is(folder, monkeypatch, capsys):
    slow = "import sys, time\nprint('a\\nb', file=sys.stderr, flush=True); time.sleep(1.2)"
    (folder / "fake_probe.py").write_text(f"{slow}\n{PROBE}")
    machine_record(say=quiet)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    machine_record(again=True, say=quiet)
    shown = capsys.readouterr().err
    assert re.search(r"\r\x1b\[K  \d+ s, 2 of 9 parts measured", shown)
    assert shown.endswith("\r\x1b[K")


def test_what_is_measured_again_says_what_is_other_than_before(monkeypatch, capsys):
    monkeypatch.setenv("MALLOC_CONF", "a")
    machine_record()
    monkeypatch.setenv("MALLOC_CONF", "b")
    machine_record()
    monkeypatch.setenv("LD_PRELOAD", "")
    machine_record()
    said = [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == [
        "modicum: Measuring this machine, once",
        "modicum: Measuring this machine again (other than before: MALLOC_CONF), once",
        "modicum: Measuring this machine again (other than before: LD_PRELOAD), once",
    ]


def test_who_waits_for_another_process_that_measures_says_so(folder, monkeypatch):
    lock = identity.record_file().with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    held = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX)"
    held += "; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", held, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        said: list[str] = []

        def hear(text: str) -> None:
            said.append(text)
            if len(said) == 1:
                assert other.stdin is not None
                other.stdin.close()

        machine_record(say=hear)
    assert said[0] == "Another process measures this machine; waiting for its figures."
    assert said[1].startswith("Measuring this machine")


def test_the_probe_has_as_many_parts_as_the_line_says(tmp_path, monkeypatch):
    figures = dict.fromkeys(("compiler", "grown", "tensors", "efficiency"), 1.0) | {"width": 64}
    names: list[str] = []

    def alone(out: Path, _: object) -> dict[str, float]:
        names.append(out.name)
        return figures | {"small": float(len(names))}

    monkeypatch.setattr(probe, "_alone", alone)
    for parts in (["every"], ["images"], ["sequences"], ["recomputation"], list(RUNS)):
        names.clear()
        probe._figures(tmp_path, "cpu", parts)
        assert len(names) == len(set(names)) == runs_of(parts)


def test_a_record_that_is_assumed_is_not_measured(folder):
    given = MachineRecord(1, (0.0, 0.0), 1.0)
    record.assume(given)
    assert machine_record() is given
    assert asked(folder) == 0


def test_figures_are_remembered_by_name_and_damaged_ones_measured_anew():
    assert remembered("one", lambda: [1, 2], 2) == [1, 2]
    assert remembered("two", lambda: [3]) == [3]
    assert remembered("one", lambda: pytest.fail("measured again"), 2) == [1, 2]
    file = identity.record_file().with_suffix(".kernels.json")
    assert json.loads(file.read_text()) == {"one": [1, 2], "two": [3]}
    several = ('{"one": []}', '{"one": [1, 2, 3]}', "[" * 100_000)
    for damaged in ("{", "[]", '{"one": "1"}', '{"one": [null]}', *several):
        file.write_text(damaged)
        assert remembered("one", lambda: [4]) == [4]
        assert json.loads(file.read_text())["one"] == [4]


def test_where_the_disk_keeps_no_locks_each_process_measures_for_itself(folder, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    assert machine_record(say=quiet).loaded_bytes == 7_000_000
    assert asked(folder)
