"""Checkpoints of a state registry: safetensors and a JSON manifest, complete or absent.

A checkpoint is a folder `step-00000100`. It is written next to its place, synced and renamed, so
that one that is there is complete; checksums tell one that was damaged later. Nothing is pickled.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modicum.checkpoint.loading import Checkpoint
from modicum.checkpoint.manifest import Damaged
from modicum.checkpoint.publishing import part_folder, put_all_back, sweep
from modicum.checkpoint.saving import Published, Snapshot, State, WritePlan, WriteWork
from modicum.checkpoint.staging import Staging
from modicum.checkpoint.tensor_file import chunks, streamed
from modicum.core.errors import InputError
from modicum.core.files import remove
from modicum.core.ranks.ranks import TIMEOUT, Ranks


class CheckpointStore:
    """The checkpoints of a run, in `folder`, the newest `keep` of them.

    Every rank has a store, and all of them call `save`, `wait` and `newest` at the same place. The
    folder is one that all ranks see.

    Args:
        folder: made when the first checkpoint is written.
        keep: how many checkpoints stay.
        ranks: this process among those of the run.
        asynchronous: whether `save` returns as soon as the state is copied in memory, and
            written while training continues; it takes as much memory as the state has.

    >>> import tempfile, torch
    >>> store = CheckpointStore(Path(tempfile.mkdtemp()), keep=2)
    >>> for step in (1, 2, 3):
    ...     _ = store.save(step, {"model": {"w": torch.full((2,), float(step))}})
    >>> newest = store.newest()
    >>> newest.step, newest.state["model"]["w"].tolist(), len(store.steps())
    (3, [3.0, 3.0], 2)
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        ranks: Ranks | None = None,
        asynchronous: bool = False,
    ) -> None:
        self.folder, self.keep = folder, keep
        self.ranks, self.asynchronous = ranks or Ranks(), asynchronous
        self.last: int | None = None
        self._held: tuple[int | None, ...] = (None,)
        self._nonce: str | None = None
        self._plan: WritePlan | None = None
        self._staging: Staging | None = None
        self._work: WriteWork | None = None
        self._published: deque[Published] = deque()

    @property
    def staging_bytes(self) -> int:
        """Bytes of memory that copies of this rank's state are kept in; 0 until the first save."""
        return 0 if self._plan is None or self._staging is None else self._plan.layout.size

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first; `last` may still be on its way."""
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdecimal()
        )

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    # Saving

    def save(
        self,
        step: int,
        state: State,
        notes: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> Path:
        """Write a checkpoint; older ones than the newest `keep` go only when it is in place.

        A save that is still under way is waited for first.

        Args:
            step: which is noted as `last`.
            state: a registry, or views by name; each view tensors and JSON values by name.
            notes: JSON, kept next to the state; rank 0's count.
            last: nothing changes the state any more, so it is written as it is, and not copied.

        Returns:
            The folder; if the store is asynchronous, the one that there will be.

        Raises:
            InputError: the disk is full or cannot be written, now or when the save before was
                finished; earlier checkpoints are intact. All ranks raise it.
        """
        began = time.perf_counter()
        snapshot = Snapshot.of(state, self.ranks)
        changed = self._plan is None or self._plan.mine != list(snapshot.tensors)
        if self._agree(self._ended(), changed):
            self._make_plan(snapshot)
        copied = self.asynchronous and not last
        work = self._prepare(step, snapshot, notes or {}, began, copied)
        self.last, self._work = step, work
        if copied:
            work.start()
        else:
            work.run()
            self.wait()
        return work.target

    def _make_plan(self, snapshot: Snapshot) -> None:
        if self._nonce is None:
            if self.ranks.first:
                sweep(self.folder)
            self._nonce = self.ranks.broadcast(secrets.token_hex(4))
        self._staging = None  # before its successor takes memory
        self._plan = WritePlan.of(snapshot.tensors, self.ranks)

    def _prepare(
        self,
        step: int,
        snapshot: Snapshot,
        notes: Mapping[str, Any],
        began: float,
        copied: bool,
    ) -> WriteWork:
        assert self._plan is not None
        assert self._nonce is not None
        target = self.path(step)
        if copied:
            if self._staging is None:
                pinned = any(tensor.is_cuda for tensor in snapshot.tensors.values())
                self._staging = Staging(self._plan.layout, pinned=pinned)
            self._staging.take(snapshot.tensors)
            content = chunks(self._staging.content)
        else:
            content = streamed(self._plan.layout, snapshot.tensors)
        return WriteWork(
            step,
            part_folder(target, self._nonce),
            target,
            self.ranks,
            self._plan,
            snapshot.values,
            snapshot.views,
            json.loads(json.dumps(dict(notes))),
            content,
            copied,
            self._in_place,
            began,
        )

    def _in_place(self, published: Published) -> None:
        self._published.append(published)
        if published.step == self._held[-1]:
            self._held = self._held[-1:]
        for old in self.steps()[: -self.keep]:
            if old not in self._held:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def hold(self, step: int | None) -> None:
        """Let the checkpoint of a step stay next to the newest, whether it is there yet or not.

        The one that was held before goes when this one is in place, with the next save at the
        earliest.
        """
        # One that is there already never comes into place again.
        self._held = (step,) if step in self.steps() else (self._held[-1], step)

    def poll(self) -> list[Published]:
        """The checkpoints that came into place since this was last asked; reported on rank 0 alone.

        Raises:
            InputError: a save failed; raised on the rank that knows, and where `save` or `wait` is
                next, on all.
        """
        if self._work is not None and self._work.error is not None:
            raise self._work.error
        return [self._published.popleft() for _ in range(len(self._published))]

    def wait(self) -> None:
        """Wait until all that was saved is in place; every rank calls this.

        Raises:
            InputError: the save failed, on any rank.
        """
        self._agree(self._ended(), False)

    def leave(self, seconds: float = 30.0) -> None:
        """Let a save that is under way come to its end, where a rank ends without the others.

        Args:
            seconds: for so long; other ranks may never do their part.
        """
        if self._work is not None and self._work.thread is not None:
            self._work.thread.join(seconds)
            self._work.given_up = True
            self._work.thread.join(1.0)

    def _ended(self) -> Exception | None:
        """Wait for this rank's part of the save before, and on rank 0 for all; what went wrong.

        Rank 0 waits no longer than others wait for it in an exchange: one may never report.
        """
        work, self._work = self._work, None
        if work is None:
            return None
        if work.thread is not None:
            work.thread.join(TIMEOUT.total_seconds())
            work.given_up = True
            work.thread.join()
        return work.error

    def _agree(self, error: Exception | None, changed: bool) -> bool:
        """Whether something changed on any rank; an error on any is raised on all."""
        failed, anywhere = self.ranks.max(float(error is not None), float(changed))
        if not failed:
            return bool(anywhere)
        everybody = self.ranks.gather(None if error is None else str(error))
        if error is not None:
            raise error
        rank, problem = next((r, told) for r, told in enumerate(everybody) if told is not None)
        raise InputError(f"rank {rank}: {problem}")

    # Reading

    def read(self, step: int) -> Checkpoint:
        """Check one checkpoint; its state is read when it is asked for.

        Raises:
            Damaged: it is, with the file and what is wrong with it.
            InputError: another version of modicum wrote it.
        """
        return Checkpoint.of(self.path(step), self.ranks)

    def newest(self, warn: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest checkpoint that is complete; damaged ones are named to `warn` and passed over.

        Rank 0 looks, and tells the others. None where there is none, not even a damaged one.

        Raises:
            Damaged: there are checkpoints, and each of them is; with the files.
            InputError: another version of modicum wrote the newest, or it may not be read.
        """
        found: Checkpoint | None = None
        error: Exception | None = None
        if self.ranks.first:
            try:
                found = self._newest(warn)
            except InputError as problem:
                error = problem
        self._agree(error, False)
        self.last = self.ranks.broadcast(None if found is None else found.step)
        if self.last is None:
            return None
        return found or Checkpoint.of(self.path(self.last), self.ranks, check=False)

    def _newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        put_all_back(self.folder)
        found, damaged = None, []
        for step in reversed(self.steps()):
            try:
                found = self.read(step)
                break
            except Damaged as error:
                damaged.append(error)
        if damaged and found is None:
            files = ", ".join(
                f"{each.file} ({each.problem.removeprefix('damaged: ')})" for each in damaged
            )
            raise Damaged(f"every checkpoint is damaged: {files}")
        for each in damaged:
            warn(f"{each}; the checkpoint before it is used")
        return found

    def forget_after(self, step: int) -> None:
        """Remove what a run that resumes from `step` does again: later checkpoints, all damaged."""
        for later in self.steps() if self.ranks.first else ():
            if later > step:
                remove(self.path(later))
