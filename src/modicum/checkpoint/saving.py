"""One save as one rank does it: what it takes from the run, and the work that follows."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modicum.checkpoint.loading import own_name
from modicum.checkpoint.manifest import FORMAT, tensor_file, tensors_text
from modicum.checkpoint.publishing import publish, report, reports, write_part
from modicum.checkpoint.tensor_file import FileLayout
from modicum.checkpoint.tensor_slices import TensorSlice, divide
from modicum.core.contracts.state import StateRegistry
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import TIMEOUT, Ranks

# Of the thread that writes: training comes first, and the write takes three steps instead of one.
# With 10 a save of 400 MB cost training 0.22 s, with 19 0.15 s (medians of seven, taken in turn).
NICE = 19
State = StateRegistry | Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Snapshot:
    """A rank's state: its pieces of tensors, plain values by view, and which views are its own."""

    tensors: dict[TensorSlice, Tensor]
    values: dict[str, dict[str, Any]]
    views: dict[str, bool]

    @classmethod
    def of(cls, state: State, ranks: Ranks) -> Snapshot:
        """What the views give now; tensors are not copied.

        Raises:
            TypeError: something is neither a tensor that safetensors can hold nor JSON.
        """
        tensors: dict[TensorSlice, Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        views: dict[str, bool] = {}
        for view, per_rank, entries in _views(state):
            views[view] = per_rank
            name = own_name(view, ranks.rank) if per_rank else view
            plain = {}
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    piece, local = TensorSlice.of(f"{name}/{key}", value)
                    tensors[piece] = local
                else:
                    plain[key] = value
            # Through JSON, since what the run changes next must not change here.
            values[name] = json.loads(json.dumps(plain))
        return cls(tensors, values, views)


def _views(state: State) -> Iterator[tuple[str, bool, Mapping[str, Any]]]:
    if isinstance(state, StateRegistry):
        for view in state.views.values():
            yield view.name, view.per_rank, view.read()
    else:
        for name, entries in state.items():
            yield name, False, entries


@dataclass
class WritePlan:
    """Which rank writes what, while names, shapes and layouts stay as they are."""

    mine: list[TensorSlice]
    everybody: list[list[TensorSlice]]
    owned: list[list[TensorSlice]]
    layout: FileLayout

    @classmethod
    def of(cls, pieces: Iterable[TensorSlice], ranks: Ranks) -> WritePlan:
        """Agree on a plan; every rank calls this with the pieces that it holds.

        Raises:
            ValueError: the ranks' pieces do not make full tensors.
        """
        mine = list(pieces)
        told = ranks.gather([list(asdict(piece).values()) for piece in mine])
        everybody = [
            [TensorSlice(name, dtype, *map(tuple, boxes)) for name, dtype, *boxes in rank]
            for rank in told
        ]
        owned = divide(everybody)
        return cls(mine, everybody, owned, FileLayout.of(owned[ranks.rank]))

    @functools.cached_property
    def manifest_text(self) -> str:
        """What the manifest tells of the tensors."""
        return tensors_text(self.owned, (piece for rank in self.everybody for piece in rank))


@dataclass(frozen=True)
class Published:
    """A checkpoint that is in place: `seconds` since its save was begun, and all its bytes."""

    step: int
    path: Path
    seconds: float
    bytes: int


@dataclass
class WriteWork:
    """What is left to do of a save when training may continue.

    Args:
        content: of this rank's file.
        direct: whether it is memory that can be written past the page cache.
        published: called on rank 0 when the checkpoint is in place.
    """

    step: int
    part: Path
    target: Path
    ranks: Ranks
    plan: WritePlan
    values: Mapping[str, Mapping[str, Any]]
    views: Mapping[str, bool]
    notes: Mapping[str, Any]
    content: Iterable[memoryview]
    direct: bool
    published: Callable[[Published], None]
    began: float
    error: Exception | None = None
    given_up: bool = False
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Do it in a thread of its own, which takes only what training leaves of the processor.

        Raises:
            MemoryError: there is no room for a thread's stack.
        """
        thread = threading.Thread(target=self._in_background, name="checkpoint", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise MemoryError(str(error)) from error
        self.thread = thread

    def _in_background(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self.run()

    def run(self) -> None:
        """Write, and publish where this is rank 0; what goes wrong is in `error`."""
        try:
            if self.ranks.first:
                self._lead()
            else:
                self._follow()
        except Exception as error:  # raised again where the run asks for it
            self.error = error

    def _follow(self) -> None:
        rank = self.ranks.rank
        try:
            entry = write_part(
                self.part, rank, self.content, self.plan.layout.size, direct=self.direct
            )
            names = [own_name(view, rank) for view, per_rank in self.views.items() if per_rank]
            own = {name: self.values[name] for name in names}
            report(self.part, rank, {"error": None, "entry": entry, "values": own})
        except Exception as error:
            # Rank 0 waits for a report, and a full disk may need this room for it.
            with suppress(OSError):
                (self.part / tensor_file(rank)).unlink(missing_ok=True)
            problem = error.problem if isinstance(error, InputError) else repr(error)
            report(self.part, rank, {"error": problem})
            raise

    def _lead(self) -> None:
        failure: Exception | None = None
        entry: dict[str, Any] = {}
        try:
            entry = write_part(
                self.part, 0, self.content, self.plan.layout.size, direct=self.direct
            )
        except Exception as error:
            failure = error
        try:
            # Also after a failure: as long as others write, the folder cannot be removed.
            end = time.monotonic() + TIMEOUT.total_seconds()
            others = reports(self.part, range(1, self.ranks.size), lambda: self._is_over(end))
            if failure is not None:
                raise failure
            for rank, told in enumerate(others, 1):
                if told["error"] is not None:
                    raise InputError(f"rank {rank}: {told['error']}", file=self.part.parent)
            self._publish([entry, *(told["entry"] for told in others)], others)
        except BaseException:
            shutil.rmtree(self.part, ignore_errors=True)
            raise

    def _is_over(self, end: float) -> bool:
        """Whether others are waited for no longer; where training waits as well, from `end` on."""
        # By then the others, who wait in an exchange for this rank, have given up.
        return self.given_up or (self.thread is None and time.monotonic() > end)

    def _publish(self, entries: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
        values = dict(self.values)
        for told in others:
            values |= told["values"]
        manifest = {
            "format": FORMAT,
            "step": self.step,
            "ranks": self.ranks.size,
            "notes": self.notes,
            "views": self.views,
            "files": {tensor_file(rank): entry for rank, entry in enumerate(entries)},
            "values": values,
        }
        publish(self.part, self.target, manifest, self.plan.manifest_text)
        size = sum(entry["bytes"] for entry in entries)
        seconds = time.perf_counter() - self.began
        self.published(Published(self.step, self.target, seconds, size))
