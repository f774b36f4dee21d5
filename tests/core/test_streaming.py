from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.core.streaming import BlockStreamer, PretendedLink


def blocks(count: int = 5, width: int = 7) -> list[dict[str, Tensor]]:
    """Blocks of tensors of several dtypes and odd shapes; the middle one is larger."""
    return [
        {
            "weight": normal_(torch.empty(width + index % 2, 3), seed=index, name="weight"),
            "scale": normal_(torch.empty((), dtype=torch.bfloat16), seed=index, name="scale"),
            "codes": torch.arange(index, index + 5, dtype=torch.int8),
        }
        for index in range(count)
    ]


def test_homes_hold_the_values_and_no_memory_of_the_blocks():
    given = blocks()
    with BlockStreamer(given) as streamer:
        given[1]["weight"].zero_()
        for index, block in enumerate(blocks()):
            home = streamer.home(index)
            assert home.keys() == block.keys()
            for name, tensor in block.items():
                assert home[name].dtype == tensor.dtype
                assert torch.equal(home[name], tensor)


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_what_is_stored_goes_home_and_what_is_changed_afterwards_does_not(depth):
    with BlockStreamer(blocks(), depth=depth) as streamer:
        for _ in range(3):
            for index in range(5):
                mine = streamer.take(index, following=index + 1)
                mine["weight"].add_(1)
                copy = streamer.store(index)
                assert torch.equal(copy["weight"], mine["weight"])
                copy["weight"].fill_(torch.nan)
                streamer.release(index)
        streamer.wait()
        for index, block in enumerate(blocks()):
            assert torch.allclose(streamer.home(index)["weight"], block["weight"] + 3)
            assert torch.equal(streamer.home(index)["codes"], block["codes"])
        assert 2 <= streamer.most_resident <= depth + 2
        assert (
            streamer.bytes_up == streamer.bytes_down == 3 * 5 * 4 * 64
        )  # 84 to 96, 2 and 5 bytes a block


def test_at_most_three_blocks_are_on_the_device():
    with BlockStreamer(blocks(12), link=PretendedLink(1e6)) as streamer:
        for index in range(12):
            streamer.take(index, following=index + 1)
            if index % 3 == 0:
                streamer.store(index)
            streamer.release(index)
        streamer.wait()
        assert streamer.most_resident <= 3


def test_blocks_are_taken_in_any_order_and_those_that_came_unasked_given_up():
    with BlockStreamer(blocks()) as streamer:
        streamer.take(0, following=1)
        streamer.release(0)
        streamer.home(1)["weight"].zero_()  # after it came up: the values there are old
        streamer.forget()
        assert not streamer.take(1, following=2)["weight"].any()
        streamer.release(1)
        for index in (4, 0, 3, 2):
            weight = streamer.take(index, following=index + 1)["weight"]
            assert torch.equal(weight, blocks()[index]["weight"])
            streamer.release(index)


@contextmanager
def seconds() -> Iterator[list[float]]:
    took: list[float] = []
    start = time.perf_counter()
    yield took
    took.append(time.perf_counter() - start)


@pytest.mark.expensive
def test_copies_and_computation_run_at_the_same_time():
    # No timing of this machine: the link and the work are both sleeps.
    moved = [{"weight": torch.zeros(1000)} for _ in range(8)]
    each = 0.05
    with BlockStreamer(moved, link=PretendedLink(4000 / each)) as streamer, seconds() as took:
        for index in range(8):
            streamer.take(index, following=index + 1)["weight"].add_(1)
            streamer.store(index)
            time.sleep(each)
            streamer.release(index)
        streamer.wait()
    # One after the other would be 3 * 8 of them; at once 8, the first to come and the last to go.
    assert 9 * each <= took[0] < 18 * each


def test_errors_of_a_thread_reach_the_caller(monkeypatch):
    with BlockStreamer(blocks()) as streamer:

        def fails(*_: object) -> None:
            raise RuntimeError("no such memory")

        monkeypatch.setattr(streamer, "_copied", fails)
        with pytest.raises(RuntimeError, match="no such memory"):
            streamer.take(0)


def test_what_cannot_be_is_refused():
    with pytest.raises(InputError, match="there are no blocks to move"):
        BlockStreamer([])
    with pytest.raises(InputError, match="depth"):
        BlockStreamer(blocks(), depth=0)
    with pytest.raises(InputError, match="bytes_per_second"):
        PretendedLink(0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_streams_bring_the_same_values():
    with BlockStreamer(blocks(), "cuda") as streamer:
        for _ in range(3):
            for index in range(5):
                streamer.take(index, following=index + 1)["weight"].add_(1)
                streamer.store(index)["weight"].mul_(3)
                streamer.release(index)
        streamer.wait()
        for index, block in enumerate(blocks()):
            assert torch.allclose(streamer.home(index)["weight"], block["weight"] + 3)
