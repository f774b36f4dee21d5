"""Running out of memory: which errors mean it, and how to get the memory back for another try.

A caught error keeps its traceback, the traceback its frames, and the frames every tensor of the
work that failed. A second try next to those would fail as well, so they are let go first.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterable, Iterator

import torch

from modicum.core.errors import DoesNotFit
from modicum.core.machine.memory import release

# What torch and the libraries beneath it say when an allocation fails, as seen under a limit of
# the address space; only the accelerator's allocator has an error type of its own.
_SAID = re.compile(
    r"DefaultCPUAllocator"  # "can't allocate memory" on Linux, "not enough memory" elsewhere
    r"|std::bad_alloc"
    r"|could not create a (primitive|memory)"  # oneDNN
    r"|Cannot allocate memory"  # mmap of a file
    r"|can't start new thread"
    r"|CUDA error: out of memory|CU(BLAS|SOLVER|SPARSE|DNN)_STATUS_ALLOC_FAILED"
)
_CHANGES = (
    "set training.recompute to blocks, which keeps the activations of one block alone",
    "set training.precision to bf16",
    "lower data.sequence_length",
    "train an adapter of a lower adapter.rank, or a model of fewer layers or a smaller width",
    "give the process more memory: raise the budget, or end what else runs on the machine",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    return any(_says_so(link) for link in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on to the first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        # torch's compiler keeps what it wraps under a name of its own.
        link = getattr(link, "inner_exception", None) or link.__cause__


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


def ran_out(work: Callable[[], object]) -> str | None:
    """Do `work`; None if memory was enough, else the error's first line, with all memory back.

    Every other error is raised as it is.

    >>> ran_out(lambda: bytearray(1 << 60))
    'MemoryError'
    >>> ran_out(lambda: bytearray(1))
    """
    try:
        work()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        _let_go(error)
    else:
        return None
    release()  # the error itself is gone by now
    return said


def _let_go(error: BaseException) -> None:
    """Empty the frames that an error, and those it came from, would keep alive."""
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is None or link.__traceback__ is None:
            continue
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        pending += [link.__cause__, link.__context__, getattr(link, "inner_exception", None)]


def halved(micro_batch_size: int, changes: Iterable[str] = _CHANGES) -> int:
    """The next smaller size to try.

    Args:
        micro_batch_size: sequences in the forward pass that did not fit.
        changes: what would make a single sequence fit, in words, the mildest first.

    Raises:
        DoesNotFit: it was one sequence already.

    >>> halved(8), halved(3)
    (4, 1)
    """
    if micro_batch_size > 1:
        return micro_batch_size // 2
    raise DoesNotFit(
        "memory runs out with a single sequence in a forward pass. What would make it fit:",
        changes,
    )
