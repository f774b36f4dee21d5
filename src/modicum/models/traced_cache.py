"""Traces that are made once: by a process of its own, kept in the user's cache.

Fake tensors load a hundred megabytes of modules, which a process that plans and then trains would
carry along; so another one traces. What it found is known by all that it depends on: what builds
the model and with which arguments, versions, and modicum's sources. Kernels' scratch is not in it:
a trace is true on every machine.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from modicum.core.errors import InputError, ModicumError
from modicum.core.files import read_json, user_cache, write_json
from modicum.core.layers.trace_moves import Move, TracedPart, TracedPass, move_of, plain
from modicum.models.traced_ledger import TracedLedgers, TracedModel
from modicum.models.traced_moves import PassMoves

_FORMAT = 1
_LIMIT_SECONDS = 600
_PACKAGES = ("core", "linears", "adapters", "models", "tasks")
_USUAL = ([False, True, 0], [False, False, 0], [True, True, 0])
_LIBRARIES = ("torch", "transformers")
_START = (
    "import json, sys; given = json.loads(sys.argv[1]); "
    "sys.path += [path for path in given['paths'] if path not in sys.path]; "
    "from modicum.models.traced_cache import answer; print(answer(given))"
)


class TraceFailed(ModicumError):
    """The process that traces a model failed."""


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
    """

    def __init__(self, request: TraceRequest) -> None:
        self._request = request
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
        name = f"recompute {recompute:d}, backward {backward:d}, sequences {sequences}"
        file = self._request.file
        known = _read(file)
        if name in known and _usable(known[name]):
            return cast(dict[str, Any], known[name])
        wanted: list[list[Any]] = [[recompute, backward, sequences]]
        if not known:  # others are asked for next, and to start a process takes longest
            wanted += [each for each in _USUAL if each != wanted[0]]
        made = _traced_apart(self._request, wanted)
        with suppress(OSError, InputError):  # traced again next time, then
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, {"key": self._request.key, "passes": _read(file) | made})
        return cast(dict[str, Any], made[name])


def answer(given: Mapping[str, Any]) -> str:
    """What a process that traces prints: the passes that are wanted, as a line of JSON."""
    model = TraceRequest(given["build"], given["arguments"]).here()
    found = {}
    for recompute, backward, sequences in given["wanted"]:
        moves = model.moves(recompute=recompute, backward=backward)
        name = f"recompute {recompute:d}, backward {backward:d}, sequences {sequences}"
        points = moves.points if not sequences else {sequences: moves.at(sequences)}
        found[name] = {
            "weights": model.weights,
            "gradients": model.gradients,
            "dtype": model.dtype,
            "counts": model.counts,
            "points": {number: _plain_pass(each) for number, each in points.items()},
        }
    return json.dumps(found)


def _traced_apart(request: TraceRequest, wanted: Sequence[Any]) -> dict[str, Any]:
    given = {
        "build": request.build,
        "arguments": dict(request.arguments),
        "wanted": wanted,
        "paths": sys.path,
    }
    environment = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE")}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _START, json.dumps(given)],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise TraceFailed(f"tracing {request.build} took over {_LIMIT_SECONDS} s") from None
    except OSError as error:
        raise TraceFailed(f"no process could be started to trace a model: {error}") from None
    with suppress(ValueError, IndexError):
        if done.returncode == 0:
            return cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))
    last = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
    raise TraceFailed(f"the model of {request.build} could not be traced:\n{last}")


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
