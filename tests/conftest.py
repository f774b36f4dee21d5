"""What every test stands on: one thread, reproducible examples, and the sample of dear tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

# Read by torch when it is first imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The ranks are processes of their own, which import `pool` by its name.
sys.path.append(str(Path(__file__).parent))
from pool import pool as pool

from modicum.cli.allocator import tuned
from modicum.core.errors import ModicumError

hypothesis.settings.register_profile(
    "modicum", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("modicum")

SAMPLE = 3  # one dear test in so many


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample-dear",
        metavar="SEED",
        help=f"leave out slow tests, and of those marked `dear` all but one in {SAMPLE}",
    )
    parser.addoption(
        "--rest-of",
        metavar="SEED",
        help="run what --sample-dear leaves out with the same seed",
    )
    parser.addoption(
        "--one-in",
        metavar="N",
        type=int,
        default=1,
        help="of the tests that are left, one in so many, by the same seed",
    )


def pytest_report_header(config: pytest.Config) -> str:
    for option in ("--sample-dear", "--rest-of"):
        if (seed := config.getoption(option)) is not None:
            return f"some of the tests: {option}={seed} --one-in={config.getoption('--one-in')}"
    return "every test"


def sampled(nodeid: str, seed: str, one_in: int = SAMPLE) -> bool:
    """Whether the sample of `seed` holds this test: a hash, so the same on every machine."""
    return hashlib.sha256(f"{seed}/{nodeid}".encode()).digest()[0] % one_in == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed, rest = config.getoption("--sample-dear"), config.getoption("--rest-of")
    if seed is None and rest is None:
        return
    halves: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        dear = item.get_closest_marker("dear")
        left_out = item.get_closest_marker("slow") or (
            dear and not sampled(item.nodeid, seed or rest)
        )
        halves[bool(left_out)].append(item)
    chosen, deselected = halves[rest is not None], halves[rest is None]
    items[:] = []
    for item in chosen:
        # A seed of its own, or the draw would depend on the one that left these tests out.
        drawn = sampled(item.nodeid, f"{seed or rest}/again", config.getoption("--one-in"))
        (items if drawn else deselected).append(item)
    config.hook.pytest_deselected(items=deselected)


@pytest.fixture(autouse=True, scope="session")
def _measured_machine() -> None:
    """This machine's records: of tests, and of the commands that they start.

    Measured in the first session on a machine, so that none of its tests waits for it.
    """
    from modicum.core.machine.record import machine_record

    with suppress(ModicumError), pytest.MonkeyPatch.context() as patched:
        machine_record()
        for name, value in tuned(os.environ).items():
            patched.setenv(name, value)
        machine_record()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 256 KiB, where this machine lets one be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
