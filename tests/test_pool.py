from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from pool import Pool, RanksFailed

from modicum.core.ranks.ranks import Ranks

pytestmark = pytest.mark.ranks


def who(ranks: Ranks, factor: float, tensor: torch.Tensor) -> tuple[int, float, torch.Tensor]:
    return os.getpid(), ranks.sum(factor * (ranks.rank + 1))[0], tensor * ranks.rank


def some_raise(ranks: Ranks, raising: list[int]) -> float:
    if ranks.rank in raising:
        raise ValueError(f"rank {ranks.rank} tells what is wrong")
    return ranks.sum(1.0)[0]


def rank_one_sleeps(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(60)


def rank_one_dies(ranks: Ranks) -> str:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def rank_one_faults(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)


def untidy(ranks: Ranks) -> tuple[torch.dtype, float, str | None, bool]:
    found = torch.get_default_dtype(), torch.rand(1).item(), os.environ.get("LEFT_OVER")
    torch.set_default_dtype(torch.float64)
    os.environ["LEFT_OVER"] = "1"
    return *found, ranks.first_alone(lambda: True)


def unequal(ranks: Ranks) -> None:
    assert [ranks.rank] == [7]


def test_ranks_are_reused_for_calls_of_any_size(pool: Pool) -> None:
    results = {size: pool.run(who, 2.0, torch.ones(3), ranks=size) for size in (2, 3, 1, 2)}
    assert [[total for _, total, _ in results[size]] for size in (1, 2, 3)] == [
        [2.0],
        [6.0, 6.0],
        [12.0, 12.0, 12.0],
    ]
    assert torch.equal(results[3][2][2], torch.full((3,), 2.0))
    pids = [pid for pid, _, _ in results[3]]
    assert [pid for pid, _, _ in results[2]] == pids[:2]
    assert [pid for pid, _, _ in results[1]] == pids[:1]


def test_each_call_begins_afresh(pool: Pool) -> None:
    assert pool.run(untidy) == pool.run(untidy)


def test_all_tracebacks_are_shown_and_new_ranks_started(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(some_raise, [0, 2], ranks=3)
    text = str(caught.value)
    assert text.startswith("some_raise failed")
    assert "ValueError: rank 0 tells what is wrong" in text
    assert "ValueError: rank 2 tells what is wrong" in text
    assert "rank 1 of 3 did not answer" in text
    assert "in sum" in text  # where rank 1 waited
    assert pool.run(some_raise, []) == [2.0, 2.0]


def test_a_rank_that_hangs_is_named_and_killed(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 did not answer") as caught:
        pool.run(rank_one_sleeps, timeout=0.5)
    assert "in rank_one_sleeps" in str(caught.value)
    assert "rank 0 of 2" not in str(caught.value)
    assert pool.pids == []


def test_a_rank_that_dies_is_named_unless_the_test_meant_it(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match="rank 1 of 2 died with exit code -9"):
        pool.run(rank_one_dies)
    assert pool.run(rank_one_dies, lost=[1]) == ["alive", None]


def test_a_rank_that_dies_of_a_fault_tells_where(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"died with exit code -11; it wrote") as caught:
        pool.run(rank_one_faults)
    assert "in rank_one_faults" in str(caught.value)


def test_asserts_tell_both_sides(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"assert \[0\] == \[7\]"):
        pool.run(unequal)


def test_a_function_must_be_found_by_name(pool: Pool) -> None:
    with pytest.raises(TypeError, match="function of a module"):
        pool.run(lambda ranks: Path(), ranks=2)
