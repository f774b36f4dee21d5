"""Trials on a cluster of Ray, for who has many of them and more than one machine.

Every machine of the cluster has to see the comparison's folder at the same path, and modicum has to
be installed there: a trial is a run folder, wherever it is made.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from modicum.core.extras import library


class RayExecutor(Executor):
    """An executor whose work is done by Ray's workers; the cluster that is there, or a local one.

    Args:
        cores: of each trial, as Ray counts them.

    Raises:
        InputError: Ray is not installed.
    """

    def __init__(self, cores: float = 1.0) -> None:
        self._ray = library("ray", "ray", "running trials on a cluster")
        self._cores = cores
        self._began = not self._ray.is_initialized()
        if self._began:
            self._ray.init(include_dashboard=False, log_to_driver=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a worker call it; the future of what it returns or raises."""
        remote = self._ray.remote(num_cpus=self._cores, max_retries=0)(fn)
        future: Future[Any] = remote.remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the local cluster, if it was begun here."""
        if self._began:
            self._ray.shutdown()
