"""Trials on a cluster of Ray, for who has many of them and more than one machine.

Every machine of the cluster has to see the comparison's folder at the same path, and modicum has to
be installed there: a trial is a run folder, wherever it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any

from modicum.core.extras import library


class RayExecutor(Executor):
    """An executor whose work is done by Ray's workers; the cluster that is there, or a local one.

    What a call raises is its future's exception; a worker that is killed is a `BrokenExecutor`, as
    of a pool of processes.

    Args:
        cores: of each trial, as Ray counts them; at most those of the largest machine, or it would
            wait for ever.

    Raises:
        InputError: Ray is not installed.
    """

    def __init__(self, cores: float = 1.0) -> None:
        self._ray = library("ray", "ray", "running trials on a cluster")
        self._began = not self._ray.is_initialized()
        if self._began:
            self._ray.init(include_dashboard=False, log_to_driver=False)
        machines = [node["Resources"].get("CPU", 0.0) for node in self._ray.nodes()]
        self._cores = min(cores, max(machines, default=0.0) or cores)
        self._left: dict[Future[Any], Any] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call it; the future of what it returns or raises."""
        remote = self._ray.remote(num_cpus=self._cores, max_retries=0)(fn)
        work, future = remote.remote(*args, **kwargs), Future[Any]()
        self._left[future] = work

        def passed(ended: Future[Any]) -> None:
            self._left.pop(future, None)
            if not future.set_running_or_notify_cancel():
                return
            error = ended.exception()
            if error is None:
                future.set_result(ended.result())
            else:
                future.set_exception(self._of_call(error))

        work.future().add_done_callback(passed)
        return future

    def _of_call(self, error: BaseException) -> BaseException:
        """What the call itself raised, without Ray's account of it; else that a worker is gone."""
        kinds = self._ray.exceptions
        if isinstance(error, kinds.RayTaskError):
            cause: BaseException = error.cause
            return cause
        gone = isinstance(error, kinds.RayError)
        return BrokenExecutor(str(error)) if gone else error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End what still runs, and the local cluster if it was begun here."""
        for work in list(self._left.values()):
            self._ray.cancel(work, force=True)
        if self._began:
            self._ray.shutdown()
