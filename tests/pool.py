"""Ranks that are started once and run many tests' functions.

    def both(ranks: Ranks, factor: float) -> float:        # module-level, in any test file
        return ranks.sum(factor * (ranks.rank + 1))[0]

    @pytest.mark.ranks
    def test_sums(pool: Pool) -> None:
        assert pool.run(both, 10.0, ranks=2) == [30.0, 30.0]

`pool.run(function, *arguments, ranks=2, timeout=180, lost=())` runs `function(Ranks, *arguments)`
at every rank of a new gloo group and returns what each rank returned. Arguments and results are
plain values, paths, tensors, recipes: what can be pickled and is importable (`modicum.*`). The
function is found by its file and name, so that its file is imported afresh in the ranks, where
nothing that a fixture or `monkeypatch` did here holds. Each call begins with seed 0, fp32, one
thread, the environment as torchrun would set it and a default group of its own; `joined()` yields
that group.

A rank that raises fails the test with its traceback. A rank that does not answer is killed, and
the failure says where it was. After either, all ranks are started anew, which is cheap, since they
are forked from one process that has torch imported (two or three seconds, once). `lost` names the
ranks that a test kills itself; their result is None.
"""

from __future__ import annotations

import ast
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PRELOADED = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "modicum.core.ranks.ranks",
    "pytest",
]
# Once one rank has failed, the others have so long until they count as hanging too.
GRACE_SECONDS = 1.0
# Letters of what a dead rank wrote that a failure shows.
MOST_TOLD = 12_000


class RanksFailed(AssertionError):
    """A rank raised, died or did not answer."""


class _Plain(ForkingPickler):
    """Sends tensors as bytes: torch would send handles of memory that dies with its process."""

    _extra_reducers: dict[Any, Any] = {}  # noqa: RUF012 - the base's attribute


@dataclass
class Rank:
    """A process of the pool, seen from the test."""

    process: BaseProcess
    connection: Connection
    stacks: Path


class Pool:
    """The ranks of one test session; see the top of this file."""

    def __init__(self, folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._folder = folder
        self._ranks: list[Rank] = []
        self._port = 0
        self._calls = 0

    @property
    def pids(self) -> list[int]:
        """The processes that are alive, rank by rank."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int = 2,
        timeout: float = 180.0,
        lost: Collection[int] = (),
    ) -> list[Any]:
        """What `function(Ranks, *arguments)` returned at each of so many ranks.

        Raises:
            RanksFailed: a rank raised, died without being in `lost`, or did not answer in time.
        """
        where = _place(function)
        while len(self._ranks) < ranks:
            self._start()
        self._calls += 1
        whole = True
        try:
            called = self._ranks[:ranks]
            for rank in called:
                _send(rank.connection, (self._calls, ranks, *where, arguments))
            answers = self._answers(called, timeout, lost)
            whole = not lost and all(answer[0] for answer in answers.values())
            problems = [
                f"--- rank {number} of {ranks} {answers[number][1]}"
                for number in sorted(answers)
                if not answers[number][0]
            ]
            if problems:
                raise RanksFailed("\n".join([f"{where[1]} failed", *problems]))
        except BaseException:
            whole = False
            raise
        finally:
            if not whole:
                self.close()
        return [answers[number][1] for number in range(ranks)]

    def close(self) -> None:
        """Kill all ranks; the next call starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def _start(self) -> None:
        number = len(self._ranks)
        ours, theirs = self._context.Pipe()
        stacks = self._folder / f"stacks-{number}.txt"
        process = self._context.Process(
            target=_serve, args=(theirs, number, self._port, str(stacks)), daemon=True
        )
        process.start()
        theirs.close()
        self._ranks.append(Rank(process, ours, stacks))
        if number == 0:
            self._port = _receive(ours)

    def _answers(
        self, called: list[Rank], timeout: float, lost: Collection[int]
    ) -> dict[int, tuple[bool, Any]]:
        """Each rank's (whether it went well, its result or what is wrong)."""
        answers: dict[int, tuple[bool, Any]] = {}
        open_ = {rank.connection: number for number, rank in enumerate(called)}
        end = time.monotonic() + timeout
        while open_:
            ready = wait(list(open_), max(0.0, end - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                number = open_.pop(connection)
                try:
                    answers[number] = _receive(connection)
                except (EOFError, ConnectionError):
                    process = called[number].process
                    process.join(5)
                    told = f"died with exit code {process.exitcode}{_last_stack(called[number])}"
                    answers[number] = (True, None) if number in lost else (False, told)
                if not answers[number][0]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        for number in open_.values():
            answers[number] = (False, _hanging(called[number], bool(answers)))
        return answers


def _hanging(rank: Rank, after_others: bool) -> str:
    """Where a rank is that does not answer; it writes that down itself."""
    if rank.process.pid is not None:
        os.kill(rank.process.pid, signal.SIGUSR1)
    stack, end = "", time.monotonic() + 2.0
    while "(most recent call first)" not in stack and time.monotonic() < end:
        time.sleep(0.05)
        stack = rank.stacks.read_text(encoding="utf-8") if rank.stacks.exists() else ""
    why = "did not answer" + (", perhaps as it waits for another" if after_others else "")
    return f"{why}; it was in\n{stack}"


def _last_stack(rank: Rank) -> str:
    """Where a rank was that died of a fault, which it wrote down itself."""
    stack = rank.stacks.read_text(encoding="utf-8") if rank.stacks.exists() else ""
    return f"; it wrote\n{stack[-MOST_TOLD:]}" if stack else ""


def _place(function: Callable[..., Any]) -> tuple[str | None, str]:
    """Where the ranks find a function: its file, None for one that is importable, and its name."""
    module, name = function.__module__, function.__qualname__
    if "<" in name or "." in name:
        raise TypeError(f"ranks can only run a function of a module, and {name} is none")
    if module.split(".")[0] == "modicum":
        return None, f"{module}:{name}"
    return inspect.getfile(function), name


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(_Plain.dumps(value))


def _receive(connection: Connection) -> Any:
    return _Plain.loads(connection.recv_bytes())


# What follows runs in the ranks.


def _serve(connection: Connection, number: int, port: int, stacks: str) -> None:
    """A rank's life: one call after another, until it is killed or the test session is gone."""
    import torch.distributed as dist

    _end_with_session()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TQDM_DISABLE": "1"}
    # Rank 0 keeps the store in which all groups meet.
    store = dist.TCPStore("127.0.0.1", port, is_master=number == 0, wait_for_workers=False)
    if number == 0:
        _send(connection, store.port)
    environment = dict(os.environ)
    gc.collect()
    gc.freeze()  # what is there now stays, so that later collections are short
    with open(stacks, "w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 2)  # what C++ says before it aborts stands nowhere else
        faulthandler.register(signal.SIGUSR1, file)
        faulthandler.enable(file)
        while True:
            try:
                call, size, path, name, arguments = _receive(connection)
            except (EOFError, OSError):
                return
            os.environ.clear()
            os.environ.update(environment)
            try:
                answer = (True, _one_call(store, call, number, size, path, name, arguments))
                payload = _Plain.dumps(answer)
            except BaseException:
                payload = _Plain.dumps((False, f"raised\n{traceback.format_exc()}"))
            connection.send_bytes(payload)


def _one_call(
    store: Any, call: int, number: int, size: int, path: str | None, name: str, arguments: Any
) -> Any:
    """Join a new group, and run the function in a state that earlier calls did not touch."""
    import torch
    import torch.distributed as dist

    from modicum.core.ranks.ranks import Ranks

    if dist.is_initialized():
        # Only now, since at the end of the last call another rank may still have needed this one.
        dist.destroy_process_group()
        gc.collect()  # what refers to the old group goes now, and not in the midst of this call
    if path is None:
        module, name = name.split(":")
        function = getattr(importlib.import_module(module), name)
    else:
        function = getattr(_loaded(path), name)
    _reset()
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    if size > 1:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"call {call}", store),
            rank=number,
            world_size=size,
            timeout=timedelta(seconds=300),
        )
        dist.barrier()  # a rank that dies at once would else break up the others' meeting
    with torch.random.fork_rng(devices=[]):
        return function(Ranks(number, size, number, size), *arguments)


def _reset() -> None:
    """What a call may have changed in torch and elsewhere, as at the start."""
    import torch

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # imports all of the compiler
    torch.manual_seed(0)
    random.seed(0)
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()


@functools.cache
def _loaded(path: str) -> ModuleType:
    """A test file as a module, whose asserts tell both sides as they do under pytest."""
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, path)
    rewrite_asserts(tree, source, path)
    name = f"ranks_{abs(hash(path))}_{Path(path).stem}"
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # dataclasses look their module up
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    return module


def _end_with_session() -> None:
    """End this process, in whatever exchange it is, when the test session ends in whatever way."""
    session = multiprocessing.parent_process()

    def watch() -> None:
        if session is not None:
            session.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Ranks that are started when a test first needs them, and end with the session."""
    with tempfile.TemporaryDirectory() as folder:
        made = Pool(Path(folder))
        yield made
        made.close()
