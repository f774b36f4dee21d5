"""Traces that are made once: by a process of its own, kept in the user's cache.

Fake tensors load a hundred megabytes of modules, which a process that plans and then trains would
carry along; so another one traces. What it found is known by all that it depends on: what builds
the model and with which arguments, versions, and modicum's sources. Kernels' scratch is not in it:
a trace is true on every machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from modicum.core.errors import InputError, ModicumError
from modicum.core.files import read_json, user_cache, write_json
from modicum.core.layers.trace_failure import why_not
from modicum.core.layers.trace_moves import Move, TracedPart, TracedPass, move_of, plain
from modicum.core.machine.answering_process import AnsweringProcess
from modicum.core.machine.child_process import ChildFailed
from modicum.models.traced_ledger import TracedLedgers, TracedModel
from modicum.models.traced_moves import PassMoves

_FORMAT = 1
_PACKAGES = ("core", "linears", "adapters", "models", "tasks")
_USUAL = ((False, True), (False, False), (True, True))
_LIBRARIES = ("torch", "transformers")
_TRACING = AnsweringProcess("modicum.models.traced_cache:answer", work="the process that traces it")


class TraceFailed(ModicumError):
    """A model could not be traced, and why."""


@dataclass(frozen=True)
class TraceRequest:
    """A model that another process can build and trace.

    Args:
        build: `module:function`, which returns a `TracedModel`.
        arguments: of that function, as JSON has them.

    Raises:
        InputError: `build` is no such name.
    """

    build: str
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.build.count(":") != 1:
            raise InputError(
                "name a function as `module:function`", field="build", value=self.build
            )

    def here(self) -> TracedModel:
        """The model, built in this process."""
        module, _, name = self.build.partition(":")
        return cast(TracedModel, getattr(importlib.import_module(module), name)(**self.arguments))

    @property
    def key(self) -> dict[str, Any]:
        """All that a trace depends on."""
        return {
            "format": _FORMAT,
            "build": self.build,
            "arguments": dict(self.arguments),
            "python": sys.version.split()[0],
            "versions": {name: _version(name) for name in _LIBRARIES},
            "sources": _sources(),
        }

    @property
    def file(self) -> Path:
        """Where its traces are kept, there or not."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return user_cache("traces") / f"{digest[:32]}.json"


class StoredLedgers(TracedLedgers):
    """The ledgers of a model that was traced elsewhere.

    Asked what the traces do not tell, such as of blocks that run again, they have it traced.

    Args:
        say: called before another process traces, which takes seconds.

    Raises:
        TraceFailed: the model cannot be built or traced, with the reason.
    """

    def __init__(self, request: TraceRequest, say: Callable[[], None] = lambda: None) -> None:
        self._request, self._say = request, say
        self._passes: dict[tuple[bool, bool], PassMoves] = {}
        found = self._of(recompute=False, backward=True)
        self.weights, self.gradients = int(found["weights"]), int(found["gradients"])
        self.dtype = str(found["dtype"])

    def moves(self, *, recompute: bool = False, backward: bool = True) -> PassMoves:
        """The moves of a training pass, or of an evaluation's."""
        key = (recompute, backward)
        if key not in self._passes:
            found = self._of(recompute=recompute, backward=backward)
            counts = {str(name): int(count) for name, count in found["counts"].items()}
            points = {int(n): _pass_of(each) for n, each in found["points"].items()}

            def more(sequences: int) -> TracedPass:
                made = self._of(recompute=recompute, backward=backward, sequences=sequences)
                return _pass_of(made["points"][str(sequences)])

            self._passes[key] = PassMoves(more, counts, points)
        return self._passes[key]

    def _of(self, *, recompute: bool, backward: bool, sequences: int = 0) -> dict[str, Any]:
        """What is kept of a kind of pass, traced now where nothing is."""
        name = _name(recompute, backward, sequences)
        file = self._request.file
        if _usable(found := _read(file).get(name)):
            return cast(dict[str, Any], found)
        with _turn(file):
            known = _read(file)  # another process may have had its turn
            if _usable(found := known.get(name)):
                return cast(dict[str, Any], found)
            wanted: list[tuple[bool, bool, int]] = [(recompute, backward, sequences)]
            if not known or sequences:  # others are asked for next, and a process starts slowly
                others = [(*kind, sequences) for kind in _USUAL if kind != (recompute, backward)]
                wanted += [kind for kind in others if _name(*kind) not in known]
            self._say()
            made = _traced_apart(self._request, wanted)
            with suppress(OSError, InputError):  # traced again next time, then
                write_json(file, {"key": self._request.key, "passes": known | made})
        return cast(dict[str, Any], made[name])


def answer(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a process that traces says: the passes that are wanted, or why there are none."""
    try:
        found = _passes(TraceRequest(given["build"], given["arguments"]).here(), given["wanted"])
    except Exception as error:  # whatever a user's model says on tensors without memory
        return {"failed": why_not(error)}
    return {"passes": found}


@contextmanager
def ending_traces() -> Iterator[None]:
    """One process traces all that is asked for in here, and ends then: it holds some 600 MB."""
    with _TRACING:
        yield


def _passes(model: TracedModel, wanted: Sequence[Any]) -> dict[str, Any]:
    found = {}
    for recompute, backward, sequences in wanted:
        moves = model.moves(recompute=recompute, backward=backward)
        name = _name(recompute, backward, sequences)
        points = moves.points if not sequences else {sequences: moves.at(sequences)}
        found[name] = {
            "weights": model.weights,
            "gradients": model.gradients,
            "dtype": model.dtype,
            "counts": model.counts,
            "points": {number: _plain_pass(each) for number, each in points.items()},
        }
    return found


def _name(recompute: bool, backward: bool, sequences: int) -> str:
    return f"recompute {recompute:d}, backward {backward:d}, sequences {sequences}"


def _traced_apart(request: TraceRequest, wanted: Sequence[Any]) -> dict[str, Any]:
    given = {"build": request.build, "arguments": dict(request.arguments), "wanted": wanted}
    try:
        found = _TRACING.ask(given)
    except ChildFailed as error:
        raise TraceFailed(str(error)) from None
    if "failed" in found:
        _TRACING.end()  # what a failed trace leaves behind is not known
        raise TraceFailed(found["failed"])
    return cast(dict[str, Any], found["passes"])


@contextmanager
def _turn(file: Path) -> Iterator[None]:
    """Ranks of a run ask at once: one traces, the others wait for it and read.

    Where the disk keeps no locks, each traces for itself.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = open(file.with_suffix(".lock"), "a", encoding="utf-8")  # noqa: SIM115
    except OSError:  # each for itself, where nothing can be kept
        yield
        return
    with handle:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read(file: Path) -> dict[str, Any]:
    """The passes of a file; none where it is not there or damaged."""
    with suppress(InputError, OSError, ValueError, KeyError, TypeError):
        found = read_json(file)["passes"]
        if isinstance(found, dict):
            return found
    return {}


def _usable(found: Any) -> bool:
    with suppress(ValueError, KeyError, TypeError, AttributeError):
        points = [_pass_of(each) for each in found["points"].values()]
        return bool(points) and {"weights", "gradients", "dtype", "counts"} <= set(found)
    return False


def _plain_pass(found: TracedPass) -> list[Any]:
    parts = [[p.block, p.during, p.flops, [plain(move) for move in p.moves]] for p in found.parts]
    return [found.batch_bytes, parts]


def _pass_of(raw: Any) -> TracedPass:
    """The pass of plain values.

    Raises:
        ValueError, KeyError, TypeError: they are none.
    """
    size, parts = raw

    def moves(each: Any) -> list[Move]:
        return [move_of(move) for move in each]

    made = (TracedPart(block, during, moves(each), flops) for block, during, flops, each in parts)
    return TracedPass(size, tuple(made))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@cache
def _sources() -> str:
    """A digest of what makes models, adapters and traces."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()
