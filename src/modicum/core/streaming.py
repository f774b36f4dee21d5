"""Blocks of a model whose home is the host, brought to a device a few at a time.

While one block is computed with, the next comes up and the one before goes home. Each block is one
buffer at home, so that it moves in one copy; on the device a handful of buffers of the largest
block's size take turns. Copies run in two threads of their own, one a direction, and where there
is CUDA on two streams from pinned memory; on the CPU both sides are plain buffers, and a pretended
link says how long a copy takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.core.errors import InputError

_ALIGNMENT = 64  # bytes: of the fastest loads


@dataclass(frozen=True)
class PretendedLink:
    """How long copies take on a machine without a device: each at least bytes / bytes_per_second.

    Args:
        bytes_per_second: of each direction.

    Raises:
        InputError: the rate is not positive.
    """

    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0:
            problem, value = "must be positive", self.bytes_per_second
            raise InputError(problem, field="bytes_per_second", value=value)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its block's buffer, in bytes."""

    start: int
    shape: torch.Size
    dtype: torch.dtype

    def of(self, buffer: Tensor) -> Tensor:
        """The tensor, as a view of a buffer of bytes."""
        size = self.shape.numel() * self.dtype.itemsize
        return buffer[self.start : self.start + size].view(self.dtype).view(self.shape)


def _places(block: Mapping[str, Tensor]) -> tuple[dict[str, _Place], int]:
    """Where the tensors of a block lie in one buffer, and its size in bytes."""
    places, end = {}, 0
    for name, tensor in block.items():
        places[name] = _Place(end, tensor.shape, tensor.dtype)
        end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
    return places, end


class BlockStreamer:
    """Moves blocks of tensors between their homes on the host and buffers on a device.

    `home(i)` are a block's tensors at home, which count whenever nothing is on its way. `take(i)`
    gives them on the device, in a buffer that is the caller's until `release(i)`; what is changed
    there stays there, unless `store(i)` sends it home. `most_resident` is how many buffers were in
    use at once, `bytes_up` and `bytes_down` what went over the link.

    Args:
        blocks: the tensors of each block by name; their values are copied.
        device: where blocks are computed with.
        depth: blocks that are on their way up while one is computed with; there are depth + 2
            buffers on the device.
        link: how long copies take, where there is no device; None: as long as they take.

    Raises:
        InputError: there are no blocks, or the depth is less than 1.

    >>> weights = [{"weight": torch.full((2,), float(i))} for i in range(3)]
    >>> with BlockStreamer(weights) as streamer:
    ...     for i in range(3):
    ...         weight = streamer.take(i, following=i + 1 if i < 2 else None)["weight"]
    ...         _ = streamer.store(i)["weight"].zero_() if i == 1 else weight.add_(0.5)
    ...         streamer.release(i)
    ...     streamer.wait()
    ...     [streamer.home(i)["weight"].tolist() for i in range(3)], streamer.most_resident <= 3
    ([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], True)
    """

    def __init__(
        self,
        blocks: Sequence[Mapping[str, Tensor]],
        device: torch.device | str = "cpu",
        *,
        depth: int = 1,
        link: PretendedLink | None = None,
    ) -> None:
        if not blocks:
            raise InputError("there are no blocks to move")
        if depth < 1:
            raise InputError("too few", field="depth", value=depth, allowed="1 or more")
        self.device, self.depth, self.link = torch.device(device), depth, link
        laid = [_places(block) for block in blocks]
        self._places = [places for places, _ in laid]
        self._sizes = [size for _, size in laid]
        cuda = self.device.type == "cuda"
        self._homes = [
            torch.empty(size, dtype=torch.uint8, pin_memory=cuda) for size in self._sizes
        ]
        for index, block in enumerate(blocks):
            for name, tensor in self.home(index).items():
                tensor.copy_(block[name].detach())
        self._free = deque(
            torch.empty(max(self._sizes), dtype=torch.uint8, device=self.device)
            for _ in range(depth + 2)
        )
        self._some_free = threading.Condition()
        self._up, self._down = (ThreadPoolExecutor(1, f"blocks-{way}") for way in ("up", "down"))
        self._streams = {way: torch.cuda.Stream(self.device) for way in ("up", "down") if cuda}
        self._coming: dict[int, Future[Tensor]] = {}
        self._going: dict[int, Future[None]] = {}
        self._taken: dict[int, list[Tensor]] = {}
        self.most_resident = self.bytes_up = self.bytes_down = 0

    def __len__(self) -> int:
        return len(self._homes)

    def __enter__(self) -> BlockStreamer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def taken(self) -> Collection[int]:
        """The blocks that were taken and not released."""
        return self._taken.keys()

    def home(self, index: int) -> dict[str, Tensor]:
        """A block's tensors on the host: views, whose values count once nothing is on its way."""
        return self._views(index, self._homes[index])

    def take(self, index: int, following: int | None = None) -> dict[str, Tensor]:
        """A block's tensors on the device; it is waited for if it is not there yet.

        Args:
            following: the block that is wanted next, and those after it; it starts coming up.
        """
        if index not in self._coming:
            self.forget()
            self._ask(index)
        buffer = self._coming.pop(index).result()
        self._taken[index] = [buffer]
        if following is not None:
            for other in range(following, min(following + self.depth, len(self))):
                if other not in self._coming and other not in self._taken:
                    self._ask(other)
        return self._views(index, buffer)

    def store(self, index: int) -> dict[str, Tensor]:
        """Send a block that was taken home as it is now; a copy of it to compute with meanwhile.

        The copy is in a buffer of its own, so what is changed in it does not go home. The block
        is released as usual.
        """
        (buffer,) = self._taken[index]
        copy = self._take_free()
        copy[: self._sizes[index]].copy_(buffer[: self._sizes[index]])
        self._taken[index] = [copy]
        self._going[index] = self._down.submit(self._bring_home, index, buffer, self._mark())
        return self._views(index, copy)

    def release(self, index: int) -> None:
        """Give back the buffer of a block that was taken."""
        mark = self._mark()
        for buffer in self._taken.pop(index):
            self._give_free(buffer, mark)

    def wait(self) -> None:
        """Wait until all that was sent home is there."""
        while self._going:
            self._going.pop(next(iter(self._going))).result()

    def forget(self) -> None:
        """Give up blocks that come up unasked, as after values at home were changed."""
        while self._coming:
            self._give_free(self._coming.pop(next(iter(self._coming))).result())

    def close(self) -> None:
        """Wait for what is on its way, and end the threads."""
        try:
            self.forget()
            self.wait()
        finally:
            self._up.shutdown()
            self._down.shutdown()

    # What the threads do

    def _ask(self, index: int) -> None:
        before = self._going.get(index)
        self._coming[index] = self._up.submit(self._bring_up, index, before)

    def _bring_up(self, index: int, before: Future[None] | None) -> Tensor:
        if before is not None:
            before.result()  # what goes home is what has to come up again
        buffer = self._take_free()
        size = self._sizes[index]
        self._copied("up", buffer[:size], self._homes[index])
        self.bytes_up += size
        return buffer

    def _bring_home(self, index: int, buffer: Tensor, mark: torch.cuda.Event | None) -> None:
        size = self._sizes[index]
        self._copied("down", self._homes[index], buffer[:size], mark)
        self.bytes_down += size
        self._give_free(buffer)

    def _copied(
        self, way: str, target: Tensor, source: Tensor, mark: torch.cuda.Event | None = None
    ) -> None:
        """Copy in this thread until it is done, on its stream where there is one."""
        start = time.perf_counter()
        if (stream := self._streams.get(way)) is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(stream):
                if mark is not None:
                    stream.wait_event(mark)
                target.copy_(source, non_blocking=True)
                stream.synchronize()
        if self.link is not None:
            takes = source.numel() / self.link.bytes_per_second
            time.sleep(max(0.0, takes - (time.perf_counter() - start)))

    # Buffers on the device

    def _take_free(self) -> Tensor:
        with self._some_free:
            self._some_free.wait_for(lambda: self._free)
            buffer = self._free.popleft()
            resident = self.depth + 2 - len(self._free)
            self.most_resident = max(self.most_resident, resident)
            return buffer

    def _give_free(self, buffer: Tensor, mark: torch.cuda.Event | None = None) -> None:
        if mark is not None:
            # Kernels that were started may still read it; the next owner's copies come after them.
            for stream in self._streams.values():
                stream.wait_event(mark)
        with self._some_free:
            self._free.append(buffer)
            self._some_free.notify_all()

    def _mark(self) -> torch.cuda.Event | None:
        """Where the device's work of this thread has got to."""
        if not self._streams:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        return {name: place.of(buffer) for name, place in self._places[index].items()}
