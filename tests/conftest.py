"""What every test stands on: one thread, reproducible examples, the sample of expensive tests."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import get_args

import hypothesis
import pytest

# Read by torch when it is first imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What tests measure and compile is kept from one session to the next, apart from the user's own.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parents[1] / ".cache" / "tests")

# The ranks are processes of their own, which import `pool` by its name.
sys.path.append(str(Path(__file__).parent))
from pool import pool as pool
from reach import Checkout, Reached, changed_since, last_green, note_green
from seconds import TIMED, SecondsNoted, drawn_once_in

from modicum.cli.allocator import tuned
from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.core.errors import ModicumError

hypothesis.settings.register_profile(
    "modicum", deadline=None, derandomize=True, database=None, print_blob=True
)
hypothesis.settings.load_profile("modicum")

ROOT = Path(__file__).resolve().parents[1]
COMPILED_BYTES = 80_000_000  # about what is measured
SAMPLE = 8  # one expensive test in so many
# Of more methods than these the tests are sampled, so that all take as long as those of so many.
METHODS = 9


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SEED",
        help=f"leave out slow tests, of those marked `expensive` all but one in {SAMPLE}, and "
        "others that take long in proportion to their seconds (tests/seconds.json)",
    )
    parser.addoption(
        "--rest-of",
        metavar="SEED",
        help="run what --sample leaves out with the same seed",
    )
    parser.addoption(
        "--one-in",
        metavar="N",
        type=int,
        default=1,
        help="of the tests that are left, one in so many, by the same seed",
    )
    parser.addoption(
        "--since-green",
        action="store_true",
        help="of the sample, only what changes since the last commit that passed can reach; of "
        "that, slow tests too. A commit that passes is noted in git's folder",
    )
    parser.addoption(
        "--in-process",
        action="store_true",
        help="no test starts a command, so the machine is not measured as commands need it",
    )
    parser.addoption(
        "--note-seconds",
        action="store_true",
        help="write how long the tests took into tests/seconds.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--note-seconds") and worker_of(config) is None:
        config.pluginmanager.register(SecondsNoted(TIMED, ROOT))


def pytest_report_header(config: pytest.Config) -> str:
    since = last_green(ROOT) if config.getoption("--since-green") else None
    if since is not None:
        return f"what changes since {since[:10]} can reach (git's modicum-green)"
    for option in ("--sample", "--rest-of"):
        if (seed := config.getoption(option)) is not None:
            return f"some of the tests: {option}={seed} --one-in={config.getoption('--one-in')}"
    return "every test"


def sampled(nodeid: str, seed: str, one_in: float = SAMPLE) -> bool:
    """Whether the sample of `seed` holds this test: a hash, so the same on every machine."""
    digest = hashlib.sha256(f"{seed}/{nodeid}".encode()).digest()
    return int.from_bytes(digest[:4], "big") * one_in < 2**32


def method_of(item: pytest.Item) -> str | None:
    """The method whose test this is: by its parameter, or by its file."""
    parameters = getattr(item, "callspec", None)
    for value in parameters.params.values() if parameters else ():
        record = getattr(value, "record", value)
        if isinstance(record, MethodRecord):
            return record.name
    stem = item.path.stem.removeprefix("test_")
    name = stem if stem in catalog() else stem.removesuffix("_proof")
    record = catalog().get(name)
    return name if record is not None and record.room in item.path.parts else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed, rest = config.getoption("--sample"), config.getoption("--rest-of")
    if seed is None and rest is None:
        return
    since = last_green(ROOT) if config.getoption("--since-green") else None
    reached = None
    if since is not None:
        modules = {record.module: name for name, record in catalog().items() if record.module}
        modules |= {
            f"modicum.proofs.{record.room}.{name}": name for name, record in catalog().items()
        }
        reached = Checkout(ROOT).reached(changed_since(ROOT, since), modules)
    kept, left = [], []
    for item in items:
        chosen = in_sample(item, seed or rest)
        if reached is not None and not reached.everything:
            chosen = is_reached(item, reached, chosen)
        if rest is not None:
            # A seed of its own, or the draw would depend on the one that left these tests out.
            again = f"{rest}/again"
            chosen = not chosen and sampled(item.nodeid, again, config.getoption("--one-in"))
        (kept if chosen else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def never_left_out(item: pytest.Item) -> bool:
    """Whether a test is in each sample, whatever has changed."""
    return any(item.get_closest_marker(name) for name in ("committed", "draws"))


def in_sample(item: pytest.Item, seed: str) -> bool:
    """Whether a test is in the sample: all that is fast, and a share of what is expensive."""
    if never_left_out(item):
        return True
    marked = SAMPLE if item.get_closest_marker("expensive") else 1.0
    one_in = max(marked, drawn_once_in(item.nodeid))
    if method_of(item) is not None:
        one_in *= max(1.0, len(catalog()) / METHODS)
    return item.get_closest_marker("slow") is None and sampled(item.nodeid, seed, one_in)


def is_reached(item: pytest.Item, reached: Reached, in_the_sample: bool) -> bool:
    """Whether a change reaches a test."""
    if never_left_out(item):
        return True
    if reached.holds(item.path.relative_to(ROOT).as_posix()):
        battery = method_of(item) if "contracts" in item.path.parts else None
        return battery is None or battery in reached.methods or in_the_sample
    if method_of(item) in reached.methods:
        return True
    marked = item.get_closest_marker("expensive") or item.get_closest_marker("slow")
    expensive = marked is not None or drawn_once_in(item.nodeid) > 1
    battery = item.path.name == "test_battery.py"
    return bool(reached.batteries and (in_the_sample if expensive else battery))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    alone = worker_of(session.config) is None
    if session.config.getoption("--since-green") and exitstatus == 0 and alone:
        note_green(ROOT)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """This machine's records: of tests, and of the commands that they start.

    Measured in the first session on a machine, before its first test, so that none waits for it.
    Each process of a session begins with another one. Of commands, one that runs alone and without
    a budget is measured. The others get its figures: no test compares their forecast with a run.
    """
    shares = getattr(session.config.option, "numprocesses", None)
    if session.config.option.collectonly or (shares and not worker_of(session.config)):
        return
    from modicum.core.files import write_json
    from modicum.core.machine.identity import depends_on, record_file
    from modicum.core.machine.record import MachineRecord, RecordPart, assume, machine_record

    every: tuple[RecordPart, ...] = get_args(RecordPart)

    def of_tests() -> None:
        assume(replace(measured(every[:-1]), device="cpu"))

    def measured(parts: Sequence[RecordPart]) -> MachineRecord:
        """With parts; what compiled blocks take, which takes a minute, is set."""
        record = machine_record(parts=parts)
        if record.compiled_bytes is None:
            record = replace(record, compiled_bytes=COMPILED_BYTES)
            write_json(record_file(), {"depends_on": depends_on(), "record": record.figures()})
        return record

    def of_commands() -> None:
        with machine_of(ranks=1, budget=False):
            record = measured(every[:1])
        for ranks, budget in ((1, True), (2, False), (2, True)):
            with machine_of(ranks=ranks, budget=budget):
                if not (file := record_file()).exists():
                    write_json(file, {"depends_on": depends_on(), "record": record.figures()})

    asked = [of_tests] if session.config.getoption("--in-process") else [of_tests, of_commands]
    if worker_of(session.config) in ("gw1", "gw3"):
        asked.reverse()
    for measure in asked:
        with suppress(ModicumError, OSError):
            measure()


@contextmanager
def machine_of(*, ranks: int, budget: bool) -> Iterator[None]:
    """This machine as commands of so many ranks have it, with a budget or without."""
    from modicum.core.heap import map_for

    with pytest.MonkeyPatch.context() as patched:
        for name, value in tuned(os.environ, ranks=ranks).items():
            patched.setenv(name, value)
        map_for(budget=budget)
        try:
            yield
        finally:
            map_for(budget=False)


def worker_of(config: pytest.Config) -> str | None:
    """The name of this process among those that share a session; None: it is none of them."""
    given = getattr(config, "workerinput", None)
    return None if given is None else str(given["workerid"])


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
