"""`modicum.comm.watch()`: who holds up the others, in one sentence, in any script of several ranks.

C4's diagnosis ("Boosting Large-scale Parallel Training Efficiency with C4", arXiv 2406.04594), by
durations and numbers of calls, never the clocks of two hosts. Thresholds are this package's own.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

import modicum.comm
import modicum.core.ranks
from modicum.comm.anomalies import DiagnosisLimits
from modicum.comm.watch_agent import VERDICT
from modicum.comm.watch_meeting import WatchMeeting
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.errors import InputError, Interrupted
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.environment import rank_and_size
from modicum.core.ranks.observed_groups import begin_observing, end_observing
from modicum.core.ranks.one_rank import NOBODY_WAITS, warn_of_one_rank
from modicum.core.ranks.ranks import MEETING, PeerLost, peer_errors

BEAT_SECONDS = 0.25
# For how long ranks that may do other work before are waited for.
COMING_SECONDS = MEETING.total_seconds()
# Below that a host that another one hears of once a second would seem silent.
LEAST_SILENT_SECONDS = 3.0
# After an error that another rank's end has caused: until its name comes.
VERDICT_SECONDS = 5.0
_LIBRARIES = tuple(
    str(Path(place)) + os.sep
    for place in (
        *torch.__path__,
        *modicum.core.ranks.__path__,
        *modicum.comm.__path__,
        sysconfig.get_path("stdlib"),
    )
)


def watch(
    *,
    silent_seconds: float = 8.0,
    late_seconds: float = 30.0,
    slow_share: float = 0.05,
    record: str | Path | None = None,
    run: str | Path | None = None,
    coming_seconds: float = COMING_SECONDS,
) -> Watch:
    """Name the rank that holds up the others, and end a run that stands still.

    Every rank calls it once, after `init_process_group`, before or after the model is wrapped. It
    sees the collectives of bare loops, DistributedDataParallel, FSDP2 and modicum, those of DTensor
    (a norm's in `clip_grad_norm_`) and of compiled code, and messages from one rank to another; not
    what a CUDA graph plays again, symmetric memory, messages of functional collectives,
    `monitored_barrier`, `new_group`, or what is received from whoever sends (`recv` without a
    source). On each host one process without torch looks at the ranks and prints what it finds on
    standard error: a rank that is dead or failed, stopped, late (with the call that it has not
    entered, where it is in the code, and since when), or slow in every iteration; a link between
    two ranks whose messages take twice as long as before, or do not come; all links of a port, or
    between groups of ranks, where all of them do. A dead rank ends the run at once, a stopped one,
    one of whose host nothing is heard, or a link on which nothing comes, after `silent_seconds`:
    all ranks that are left end with exit code 4. Under torchrun, which itself ends the others of a
    rank that died, the sentence is printed all the same.

    A process alone is warned that nothing is watched.

    Ranks of a process group count as of one role. At two ranks a late one is named; which end of a
    slow link it is, is not. Of links where only collectives travel, nothing is known. Only gloo was
    run.

    Args:
        silent_seconds: without a sign of life, until the run is ended; three at least.
        late_seconds: for which others wait until a rank that lives is named; five times as long
            where it is marked, in the first calls of a group, or holds the interpreter's lock.
        slow_share: of an iteration that the others wait for a rank, from which on it is slow.
        record: a file to which rank 0's host adds what was found, a line of JSON each. Its folder
            must be there, but where `run` is given, whose folder that run makes.
        run: the `run.json` of a run, in which rank 0's host says why it was ended, where that is
            so and no process of it has said anything.
        coming_seconds: how long a rank may take until it calls this as well; then it is named.

    Raises:
        InputError: there is no process group yet, a value is no positive number, or ranks differ;
            `record` cannot be written, or there is no room for what ranks write.
        PeerLost: a rank does not come, or is gone.

    >>> with watch() as watched:  # alone there is nobody to wait for
    ...     watched.alone
    True
    """
    limits = DiagnosisLimits(silent_seconds, late_seconds, slow_share)
    for name, value in {**asdict(limits), "coming_seconds": coming_seconds}.items():
        _check(name, value)
    if not (dist.is_available() and dist.is_initialized()):
        if rank_and_size()[1] > 1:
            raise InputError("call watch after torch.distributed.init_process_group")
        warn_of_one_rank(NOBODY_WAITS)
        return Watch(None)
    if dist.get_world_size() == 1:
        warn_of_one_rank(NOBODY_WAITS)
        return Watch(None)
    named = {"record": record, "run": run}
    files = {name: str(Path(file).resolve()) for name, file in named.items() if file}
    return Watch(WatchMeeting(limits, files, coming_seconds))


class Watch(RunHook):
    """What `watch` began in this process; it ends with `close`, a `with`, or the process.

    It is a run hook as well: given to `transformers.Trainer` as `callback()`, evaluations are
    marked, and it ends with the training.

    Attributes:
        alone: whether there is no other rank, so that nothing is watched.
    """

    def __init__(self, meeting: WatchMeeting | None) -> None:
        self.alone = meeting is None
        if meeting is None:
            return
        self._ring, self._verdict = meeting.ring, meeting.folder / VERDICT
        self._process = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._closed, self._ends_itself = threading.Event(), False
        self._hook = sys.excepthook
        sys.excepthook = self._uncaught
        begin_observing(self._ring)
        self._thread = threading.Thread(target=self._beat, name="modicum watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        # A process that multiprocessing has started ends without what atexit knows.
        self._at_end = Finalize(None, self._leave_at_end, exitpriority=0)

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Say that what happens in the block is no ordinary step: an evaluation, a save."""
        before = self.alone or self._ring.marked
        if not before:
            self._ring.mark(marked=True)
        try:
            yield
        finally:
            if not before:
                self._ring.mark(marked=False)

    def evaluation(self) -> AbstractContextManager[object]:
        """What evaluations run in: they are no ordinary steps."""
        return self.marked()

    def cause(self, seconds: float = VERDICT_SECONDS) -> str | None:
        """Who is the cause, in a sentence, after an error that another rank's end has caused.

        From here on this process is not ended by others. None: nobody has found out in so many
        seconds.
        """
        if self.alone:
            return None
        self._ends_itself = True
        self._ring.leave(BEREFT)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with suppress(OSError, ValueError, KeyError):
                return str(json.loads(self._verdict.read_bytes())["sentence"])
            time.sleep(0.05)
        return None

    def fail(self, error: BaseException) -> None:
        """Say that an error of this rank's own ends it; the others are then ended."""
        if not self.alone:
            self._ends_itself = True
            self._ring.leave(FAILED, f"{type(error).__name__}: {error}".partition("\n")[0])

    def close(self) -> None:
        """Watch this rank no more; while its process lives, nobody is surprised that it is late."""
        if self.alone or self._closed.is_set() or self._forked:
            return
        self._ring.leave(ENDED)
        self._closed.set()
        end_observing(self._ring)
        self._thread.join(2 * BEAT_SECONDS)
        if sys.excepthook == self._uncaught:
            sys.excepthook = self._hook
        atexit.unregister(self.close)
        self._at_end.cancel()

    @property
    def _forked(self) -> bool:
        """Whether this is a copy in a process that the rank has forked, whose end is its own."""
        return os.getpid() != self._process

    def _leave_at_end(self) -> None:
        """The process ends: in order, or by an error that nobody has handled."""
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code not in (None, 0):
            error = error.__context__ or error  # torch.multiprocessing turns an error into this
        if error is not None:
            self._leave_by(error)
        self.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not self.alone:
            self._leave_by(error)
        self.close()

    def _beat(self) -> None:
        """Show that this process runs and where it is; end it when that was decided."""
        while not self._closed.wait(BEAT_SECONDS):
            self._ring.beat(_place(vars(sys)["_current_frames"]().get(self._main)))
            if self._verdict.exists() and not self._ends_itself:
                sys.stderr.flush()
                os._exit(Interrupted.exit_code)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """An error ends the main thread: by another rank's end, or by itself."""
        self._leave_by(error)
        self._hook(kind, error, trace)

    def _leave_by(self, error: BaseException) -> None:
        if self._forked:
            return
        if is_of_a_peer(error):
            self._ring.leave(BEREFT)
            self._thread.join(VERDICT_SECONDS)  # which ends this process once the cause is known
        elif not isinstance(error, SystemExit):
            self.fail(error)


def _check(name: str, value: Any) -> None:
    allowed = {"silent_seconds": f"{LEAST_SILENT_SECONDS:g} or more", "slow_share": "less than 1"}
    problem = ""
    if not isinstance(value, int | float) or isinstance(value, bool):
        problem = "is no number"
    elif not math.isfinite(value) or value <= 0:
        problem = "is no positive number"
    elif name == "silent_seconds" and value < LEAST_SILENT_SECONDS:
        problem = "is too short: hosts hear of each other once a second"
    elif name == "slow_share" and value >= 1:
        problem = "is no share of an iteration"
    if problem:
        more = f", {allowed[name]}" if name in allowed else ""
        raise InputError(problem, field=name, value=value, allowed=f"a number above 0{more}")


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    if isinstance(error, PeerLost):
        return True
    trace = error.__traceback__
    try:
        with peer_errors():
            raise error
    except PeerLost:
        return True
    except BaseException:
        return False
    finally:
        error.__traceback__ = trace  # people read it, and begin where they raised it


def _place(frame: FrameType | None) -> str:
    """Where a thread is, in the innermost code that is no library's: `packing.py:88, batch`."""
    found = frame
    while frame is not None:
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            found = frame
            break
        frame = frame.f_back
    if found is None:
        return ""
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}, {found.f_code.co_name}"
