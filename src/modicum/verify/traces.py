"""What a stretch of a run leaves of each step: its rows, digests of its batches and of all state.

Every rank writes a line an update: what was there before it, and what it gave. Digests say that two
runs differ, and where; of a few steps all state is kept too, which says by how much.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from modicum.checkpoint import Checkpoint, CheckpointStore
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.digest import tensors_digest
from modicum.core.ranks.ranks import Ranks
from modicum.data.rank_split import micro_batches
from modicum.trainer.session import Session

# What of a row of metrics is a function of recipe and data.
RESULTS = ("loss", "extra_loss", "gradient_norm", "learning_rate", "tokens", "skipped")
FROZEN = "frozen"  # the parameters and buffers that no view of the state has
_LONG = 80  # characters of a plain value that are kept as they are

Views = Mapping[str, Mapping[str, str]]


class StepTrace:
    """The lines of one rank in a folder, one an update, and next to them states.

    A line has `step`, `rows` (of the data), `batches` (a digest), `state` (by view and entry, as it
    was before the update) and `results`. The last one has `state` alone: what the end is.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._file = folder / f"rank-{rank:05d}.jsonl"

    def add(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._file, "a", encoding="utf-8") as handle:
            handle.write(json.dumps(line) + "\n")

    def lines(self) -> dict[int, dict[str, Any]]:
        """The lines by their step."""
        lines = map(json.loads, self._file.read_text(encoding="utf-8").splitlines())
        return {line["step"]: line for line in lines}

    @property
    def first(self) -> dict[str, Any]:
        """The first line."""
        return min(self.lines().items())[1]

    @staticmethod
    def of(folder: Path) -> list[StepTrace]:
        """Those of all ranks."""
        count = len(list(folder.glob("rank-*.jsonl")))
        return [StepTrace(folder, rank) for rank in range(count)]

    def entry(self, step: int, view: str, key: str) -> Any:
        """An entry of the state after a step; None where that state was not kept."""
        folder = states_of(self.folder).path(step)
        if not folder.is_dir():
            return None
        state = Checkpoint.of(folder, check=False).state
        found = state.get(view) or state.get(f"{view}#{self.rank}")
        return found[key] if found is not None and key in found else None


def states_of(folder: Path, ranks: Ranks | None = None) -> CheckpointStore:
    """The states that are kept in a trace's folder: all of them stay."""
    return CheckpointStore(folder / "states", keep=sys.maxsize, ranks=ranks)


class Looks(RunHook):
    """Looks at a session before each update; a hook of its run."""

    def __init__(self, session: Session, trace: StepTrace, states: Sequence[int]) -> None:
        self._session, self._trace, self._states = session, trace, states
        self._line: dict[str, Any] = {}

    def attach(self) -> None:
        """Take part in the session's updates."""
        self._session.step_program.hooks.add("looks", self)

    def before_update(self, step: int) -> None:
        """Note the update's rows and batches, and the state before it."""
        session = self._session
        rows = session.data.sampler.indices(step - 1)
        self._line = {
            "step": step, "rows": list(rows), "batches": _batches(session, rows),
            "state": self._state(step - 1),
        }  # fmt: skip

    def done(self, event: Mapping[str, Any]) -> None:
        """Take in what the update gave."""
        self._trace.add(self._line | {"results": results(event)})

    def ended(self) -> None:
        """Note the state at the end."""
        step = self._session.step
        self._trace.add({"step": step + 1, "state": self._state(step)})

    def _state(self, step: int) -> dict[str, dict[str, str]]:
        """Digests of all state; all of it is kept, too, after the steps that were asked for."""
        session = self._session
        session.step_program.flush()
        if step in self._states:
            session.step_program.hooks.checkpoint()  # as before any save
            states_of(self._trace.folder, session.ranks).save(step, session.registry)
        state = {name: dict(digests(view)) for name, view in session.registry.read().items()}
        if step in self._states:
            state[FROZEN] = dict(digests(_frozen(session)))
        return state


def results(row: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row of metrics is a function of recipe and data."""
    return {name: row[name] for name in RESULTS if name in row}


def digests(view: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of each entry of a state: a tensor's digest; a plain value, or a digest where it is long.

    >>> import torch
    >>> found = dict(digests({"w": torch.zeros(2), "step": 3}))
    >>> found["step"], len(found["w"])
    ('3', 32)
    """
    for key, value in view.items():
        if isinstance(value, Tensor):
            yield key, tensors_digest([(key, value)])[:32]
            continue
        text = json.dumps(value, sort_keys=True)
        yield key, text if len(text) <= _LONG else hashlib.sha256(text.encode()).hexdigest()[:32]


def _batches(session: Session, rows: list[int]) -> str:
    """A digest of all tensors of this rank's micro-batches; generators stay as they are."""
    generators = session.registry.views["random"]
    before = generators.read()
    size = session.plan.prediction.choice.micro_batch_size
    batches = micro_batches(session.data.train, rows, size, session.ranks)
    tensors = [
        (name, value)
        for batch in batches
        for name, value in sorted(vars(batch).items())
        if isinstance(value, Tensor)
    ]
    generators.write(before)
    return tensors_digest(tensors)[:32]


def _frozen(session: Session) -> dict[str, Tensor]:
    """What of the model is in no view: the base under an adapter, tables, quantized weights."""
    model, held = session.model, session.registry.views["model"].read()
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach() for name, tensor in named.items() if name not in held}
