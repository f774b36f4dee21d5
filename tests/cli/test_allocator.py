from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from modicum.cli import allocator
from modicum.cli.allocator import HUGE, KERNELS, TUNABLES, begin_tuned, tuned

OURS = ":".join(f"{name}={value}" for name, value in (TUNABLES | HUGE).items())
IN_SMALL_PAGES = ":".join(f"{name}={value}" for name, value in TUNABLES.items())


@pytest.fixture
def glibc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """glibc 2.36; the file in which the kernel says who gets huge pages."""
    monkeypatch.setattr(allocator, "_on_glibc", lambda: True)
    monkeypatch.setattr(allocator, "_libc", lambda: "glibc 2.36")
    monkeypatch.setattr(allocator, "_HUGE_PAGES", tmp_path / "enabled")
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    return tmp_path / "enabled"


@pytest.mark.usefixtures("glibc")
def test_an_environment_without_settings_gets_all_and_keeps_the_rest():
    given = {"PATH": "/bin"}
    assert tuned(given) == {"PATH": "/bin", "GLIBC_TUNABLES": OURS, **KERNELS}
    assert given == {"PATH": "/bin"}
    assert tuned(tuned(given)) == tuned(given)


@pytest.mark.usefixtures("glibc")
def test_other_tunables_are_kept_before_ours():
    made = tuned({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"})
    assert made["GLIBC_TUNABLES"] == f"glibc.pthread.rseq=0:{OURS}"


@pytest.mark.usefixtures("glibc")
@pytest.mark.parametrize("prefix", ["ONEDNN", "DNNL"])
def test_a_capacity_of_the_users_own_is_kept(prefix):
    theirs = {f"{prefix}_PRIMITIVE_CACHE_CAPACITY": "7"}
    assert tuned(theirs) == theirs | {"GLIBC_TUNABLES": OURS}


@pytest.mark.usefixtures("glibc")
def test_threads_of_ranks_share_a_heap_and_those_of_a_run_alone_do_not():
    shared = f"{OURS}:glibc.malloc.arena_max=1"
    for given, ranks, expected in (
        ({}, 2, shared),
        ({"WORLD_SIZE": "2"}, None, shared),  # as torchrun starts them
        ({"WORLD_SIZE": "1"}, None, OURS),
        ({"WORLD_SIZE": "2"}, 1, OURS),
        ({"GLIBC_TUNABLES": OURS}, 2, shared),  # its parent runs alone
        ({"GLIBC_TUNABLES": f"glibc.pthread.rseq=0:{OURS}"}, 2, f"glibc.pthread.rseq=0:{shared}"),
        ({"GLIBC_TUNABLES": shared}, None, shared),  # what a rank starts
    ):
        made = tuned(given, ranks=ranks)
        assert made["GLIBC_TUNABLES"] == expected, given
        assert tuned(made, ranks=ranks) == made


@pytest.mark.usefixtures("glibc")
@pytest.mark.parametrize(
    "theirs",
    [
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1"},
        {"GLIBC_TUNABLES": "glibc.pthread.rseq=0:glibc.malloc.arena_max=1"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=1", "WORLD_SIZE": "2"},
        {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
        {"LD_PRELOAD": "/a.so:/usr/lib/libtcmalloc.so.4"},
        {"MALLOC_TRIM_THRESHOLD_": "0"},
        {"MALLOC_MMAP_THRESHOLD_": "65536"},
    ],
)
def test_what_the_user_has_set_is_left_alone(theirs):
    assert tuned(theirs) == theirs


@pytest.mark.parametrize(
    ("said", "libc", "settings"),
    [
        ("[always] madvise never", "glibc 2.35", OURS),
        ("always [madvise] never", "glibc 3.0", OURS),
        ("always madvise [never]", "glibc 2.36", IN_SMALL_PAGES),
        ("always [madvise] never", "glibc 2.34", IN_SMALL_PAGES),  # cannot ask for them
        ("", "musl", IN_SMALL_PAGES),
    ],
)
def test_huge_pages_are_asked_for_where_there_are_some(monkeypatch, glibc, said, libc, settings):
    monkeypatch.setattr(allocator, "_libc", lambda: libc)
    glibc.write_text(said)
    assert tuned({})["GLIBC_TUNABLES"] == settings
    glibc.unlink()  # another kernel, or a container without it
    assert tuned({})["GLIBC_TUNABLES"] == IN_SMALL_PAGES


def test_another_libc_gets_nothing(monkeypatch):
    monkeypatch.setattr(allocator, "_on_glibc", lambda: False)
    assert tuned({"PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize(("system", "libc"), [("darwin", "glibc 2.36"), ("linux", "")])
def test_glibc_is_known_by_what_the_system_says(monkeypatch, system, libc):
    monkeypatch.setattr(allocator.sys, "platform", system)
    monkeypatch.setattr(allocator.os, "confstr", lambda _: libc)
    assert not allocator._on_glibc()
    monkeypatch.setattr(allocator.sys, "platform", "linux")
    monkeypatch.setattr(allocator.os, "confstr", lambda _: "glibc 2.36")
    assert allocator._on_glibc()


OURS_TO_BEGIN = (
    "python /home/me/.venv/bin/modicum train my.yaml",
    "python -m modicum plan my.yaml",
    "python -u -X importtime -W ignore -m modicum bench machine",
    "python -m modicum compare my.yaml --vary optimizer=adamw,lion",
    "python -Wignore::DeprecationWarning -um modicum train my.yaml",
    "/opt/python3.12 -u bin/modicum train my.yaml --ranks 2",  # a rank of torchrun
)
NOT_OURS = (
    "python",
    "python bin/modicum report run",
    "python bin/modicum --help",
    "python -m pytest src/modicum -k train",
    "python bin/pytest -n 2 src/modicum plan",
    "python my_own.py modicum train",
    "python -m torch.distributed.run --nproc-per-node 2 -m modicum train my.yaml",
    "python bin/torchrun bin/modicum train my.yaml",
    "python -c import_modicum modicum train",
    "python -m modicum.trainer.probe train",
    "python -Ic pass modicum train",
)


@pytest.mark.parametrize("words", OURS_TO_BEGIN)
def test_a_command_that_plans_or_trains_is_known(words):
    assert allocator._trains(words.split())


@pytest.mark.parametrize("words", NOT_OURS)
def test_no_other_process_is_begun_anew(words):
    assert not allocator._trains(words.split())


@pytest.mark.usefixtures("glibc")
def test_a_process_begins_anew_once(monkeypatch):
    begun = []
    monkeypatch.setattr(allocator.os, "execve", lambda *told: begun.append(told))
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    words = ["python", "-m", "modicum", "train", "my.yaml"]
    begin_tuned()  # the tests' process
    assert begun == []
    begin_tuned(words)
    [(program, told, environment)] = begun
    assert (program, told) == (sys.executable, [sys.executable, *words[1:]])
    for name in ("GLIBC_TUNABLES", *KERNELS):
        monkeypatch.setenv(name, environment[name])
    begin_tuned(words)
    assert len(begun) == 1
    begin_tuned([*words, "--ranks", "2"])
    assert begun[1][2]["GLIBC_TUNABLES"].endswith(f"{OURS}:glibc.malloc.arena_max=1")


@pytest.mark.expensive
@pytest.mark.skipif(not allocator._on_glibc(), reason="the C library is another")
def test_a_command_has_the_settings_and_its_process_number():
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "modicum", "bench", "machine", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as process:
        seen = ""
        while process.poll() is None and OURS not in seen:
            try:
                # glibc cuts its own copy where the colons were.
                seen = Path(f"/proc/{process.pid}/environ").read_text().replace("\0", ":")
            except OSError:
                break
            time.sleep(0.01)
        out, _ = process.communicate()
    assert process.returncode == 0
    assert OURS in seen
    assert json.loads(out)["depends_on"]["GLIBC_TUNABLES"].endswith(OURS)
