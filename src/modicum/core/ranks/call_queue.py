"""Calls that wait for their turn, and the thread that gives it to them while another one computes.

Whoever asks for a call begins it, where it is its turn. A call that has to wait begins as soon as
one before it has ended, by a thread of the queue's own: that also makes large sums, which give the
memory free that a call waits for. It is there while there is something for it to do. Whoever waits
for a result does that work itself, so that nothing is handed from thread to thread.

Calls that were asked for where a profiler counts allocations are left to the thread that asked,
since the profiler knows nothing of another one's.
"""

from __future__ import annotations

import atexit
import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import inf
from weakref import ReferenceType, WeakSet, ref

import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import WIRE, Clock
from modicum.core.ranks.observed_calls import CallNote, noting
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import peer_errors

# Between two looks at a call that is under way: a twentieth of the time since it began.
LEAST_PAUSE, MOST_PAUSE = 2e-4, 2e-3
LINGER = 0.2  # seconds for which a thread that has nothing to do stays
THREAD = "modicum wire"  # its name


class CollectiveHandle:
    """A call that was asked for, and perhaps has begun; `wait` gives its result.

    Args:
        queue: where it waits.
        begin: puts it on the wire.
        result: what came of it, once it has ended.
        sent, steps: bytes, and steps of its ring, for a pretended link.
        note: what observers are shown.
        arrived: called once, when it has ended and before its result is made.
        stretch: makes some of the result ahead; whether that was all.
        aside: whether another thread than the one that asked may begin and end it.
        priority: it travels while none of a smaller number does; 0 is the first.
    """

    def __init__(
        self,
        queue: CallQueue,
        begin: Callable[[], dist.Work],
        result: Callable[[], Tensor],
        sent: int,
        steps: int,
        note: CallNote | None = None,
        *,
        arrived: Callable[[], None] | None = None,
        stretch: Callable[[], bool] | None = None,
        aside: bool = False,
        priority: int = 0,
    ) -> None:
        self._queue, self._begin, self._result, self._stretch = queue, begin, result, stretch
        self._sent, self._steps, self._note, self._arrived = sent, steps, note, arrived
        self._work: dist.Work | None = None
        self._begun, self._due = inf, -inf
        self.value: Tensor | None = None
        self.aside, self.large, self.priority = aside, aside and stretch is not None, priority

    @property
    def done(self) -> bool:
        """Whether `wait` would return at once."""
        if self.value is not None:
            return True
        return (
            self._work is not None and self._work.is_completed() and time.monotonic() >= self._due
        )

    def wait(self) -> Tensor:
        """The result, once it is there.

        Raises:
            PeerLost: another rank is gone.
        """
        if self.value is None:
            self._queue.finish(self)
        assert self.value is not None
        return self.value

    def begin(self, link: Link | None) -> None:
        """Put the call on the wire; its queue does that when it is its turn."""
        self._begun, note = time.monotonic(), self._note
        if link is not None:
            self._due = link.reserve(self._sent, self._steps)
            note = None if note is None else replace(note, due=self._due)
        with peer_errors(), nullcontext() if note is None else noting(note):
            self._work = self._begin()

    def end(self, leave: Callable[[], bool] | None = None) -> bool:
        """Wait for the call, and make its result.

        Args:
            leave: where it is given and holds, a large result is left as far as it is made.

        Returns:
            Whether the result is there.
        """
        assert self._work is not None
        with peer_errors():
            self._work.wait()
        if (left := self._due - time.monotonic()) > 0:
            time.sleep(left)
        if self._arrived is not None:
            self._arrived()
            self._arrived = None
        if leave is not None and self._stretch is not None:
            while not self._stretch():
                if leave():
                    return False
        self.value = self._result()
        del self._begin, self._result, self._stretch  # they hold the buffers
        return True

    def pause(self) -> float:
        """Seconds after which it is worth a look whether it is done."""
        now = time.monotonic()
        if self._due > now:
            return min(self._due - now, LINGER)
        return min(max((now - self._begun) / 20, LEAST_PAUSE), MOST_PAUSE)


class CallQueue:
    """Begins calls in the order in which they are added, so many of them at a time.

    A call does not begin while one of a smaller `priority` is under way, and of those that are
    added in a block of `batch` such ones go first. So the order is a function of what is asked for,
    and the same on all ranks, whenever calls end.

    One thread adds calls and waits for them. What goes wrong in the queue's own is raised in that
    one, when it next comes by.

    Args:
        link: a slower link to pretend.
        in_flight: calls that have begun and whose results are not there.
        clock: of the thread that waits, in whose row `wire` that counts.
    """

    def __init__(self, link: Link | None, in_flight: float, clock: Clock) -> None:
        self.link, self.in_flight, self._clock = link, in_flight, clock
        self._waiting: deque[CollectiveHandle] = deque()
        self._begun: deque[CollectiveHandle] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._made: CollectiveHandle | None = None  # whose result is being made
        self._held: list[CollectiveHandle] | None = None  # calls of a batch that is being made
        self._awaited = self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many calls have no result yet."""
        held = len(self._held or ())
        return held + len(self._waiting) + len(self._begun) + (self._made is not None)

    def add(self, handle: CollectiveHandle) -> None:
        """Put a call behind those that are there, and begin it if it is its turn."""
        with self._changed:
            (self._waiting if self._held is None else self._held).append(handle)
            self._advance()
            self._call_thread()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Begin no call of the block before its end, and then those of small priorities first.

        A call that is waited for in the block has all that were added before it begin.
        """
        if self._held is not None:  # a part of the batch around it
            yield
            return
        self._held = []
        try:
            yield
        finally:
            with self._changed:
                self._release()
                self._held = None
                self._advance()
                self._call_thread()

    def progress(self) -> None:
        """End the calls that are done, and begin those that waited for their turn."""
        with self._changed:
            self._advance()
            self._call_thread()

    def finish(self, handle: CollectiveHandle) -> None:
        """Wait for the calls up to `handle`."""
        with self._clock(WIRE), self._changed:
            self._awaited = True  # the thread does nothing meanwhile
            self._release()
            try:
                while True:
                    self._advance()
                    if handle.value is not None:
                        return
                    if self._made is not None:
                        self._changed.wait()  # the thread leaves what it makes in a millisecond
                    elif self._begun:
                        self._make(self._begun.popleft())
                    else:
                        return
            finally:
                self._awaited = False
                self._call_thread()

    def close(self) -> None:
        """End the thread, if there is one."""
        self._closed, thread = True, self._thread
        if thread is not None:
            if self._changed.acquire(timeout=1):
                self._changed.notify_all()
                self._changed.release()
            thread.join(1)

    # What follows is called with the lock held

    def _release(self) -> None:
        """Put the calls of a batch behind those that wait, in the order of their priorities."""
        if self._held:
            self._waiting.extend(sorted(self._held, key=lambda handle: handle.priority))
            self._held.clear()

    def _advance(self) -> None:
        """End and begin calls, as who asks for them may: a large result is left to the thread."""
        if self._error is not None:
            raise _without_frames(self._error)
        while self._begun and self._begun[0].done:
            if self._begun[0].large and not self._closed:
                break
            self._begun.popleft().end()
        self._begin_next()

    def _begin_next(self, *, aside: bool = False) -> None:
        while self._waiting and len(self._begun) + (self._made is not None) < self.in_flight:
            handle = self._waiting[0]
            if self._has_prior(handle):
                return
            if aside and not handle.aside:
                return
            self._waiting.popleft()
            handle.begin(self.link)
            self._begun.append(handle)

    def _has_prior(self, handle: CollectiveHandle) -> bool:
        """Whether a call that goes first is under way, where calls wait at all."""
        under_way = [*self._begun, *([] if self._made is None else [self._made])]
        first = any(other.priority < handle.priority for other in under_way)
        return first and self.in_flight < inf

    def _make(self, handle: CollectiveHandle, leave: Callable[[], bool] | None = None) -> None:
        """Wait for a call and make its result, for which the lock is given away."""
        self._made, complete = handle, True
        self._changed.release()
        try:
            complete = handle.end(leave)
        finally:
            self._changed.acquire()
            self._made = None
            if not complete:
                self._begun.appendleft(handle)
            self._changed.notify_all()

    def _needed(self) -> bool:
        """Whether the thread has something to do, now or when a call has ended."""
        if self._awaited or self._closed or self._error is not None or self._made is not None:
            return False
        if not self._begun or not self._begun[0].aside:
            return False
        return bool(self._waiting) or any(handle.large for handle in self._begun)

    def _call_thread(self) -> None:
        if not self._needed():
            return
        if self._thread is None:
            _queues.add(self)
            arguments = (ref(self), self._changed)
            thread = threading.Thread(target=_serve, args=arguments, name=THREAD, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there can be no more of them: who asks for calls does it all
                self._closed = True
            else:
                self._thread = thread
        else:
            self._changed.notify_all()

    def turn(self) -> float | None:
        """What the thread does: end what is done, and begin what had to wait.

        Returns:
            Seconds until it should look again; None: not before it is called.
        """
        try:
            while self._needed() and self._begun[0].done:
                self._make(self._begun.popleft(), lambda: self._awaited or self._closed)
                self._begin_next(aside=True)
        except BaseException as error:
            self._error = _without_frames(error)
            self._changed.notify_all()
        return self._begun[0].pause() if self._needed() else None

    def leave(self) -> bool:
        """Whether the thread may end, which then is forgotten."""
        if self._needed():
            return False
        self._thread = None
        return True


def _serve(queue: ReferenceType[CallQueue], changed: threading.Condition) -> None:
    """Give calls their turn, as long as their queue is there and has some."""
    with changed:
        while (served := queue()) is not None and not served._closed:
            pause = served.turn()
            del served  # so that nobody is kept alive by a thread that sleeps
            if changed.wait(LINGER if pause is None else pause) or pause is not None:
                continue
            if (served := queue()) is None or served.leave():
                return


def _without_frames(error: BaseException) -> BaseException:
    """The same error, which holds nobody: its frames, and its cause's, hold the process group."""
    try:
        return copy.copy(error)
    except Exception:  # one that cannot be made of its arguments
        return RuntimeError(f"{type(error).__name__}: {error}")


_queues: WeakSet[CallQueue] = WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that came back from C++ while the interpreter ends would abort the process."""
    for queue in list(_queues):
        queue.close()
