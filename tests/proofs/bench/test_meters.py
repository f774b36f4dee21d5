from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import torch

from modicum.proofs.bench.meters import StepTimes, in_turns, saved_bytes


def test_saved_bytes_count_storages_once_and_not_what_is_there_anyway() -> None:
    weight = torch.ones(4, 8, requires_grad=True)
    x = torch.ones(16, 8)
    with saved_bytes([weight]) as saved:
        y = x @ weight.t()
        y.exp().sum() + (y * y).sum()
    # The input, y (saved twice) and exp(y).
    assert saved.total == 4 * (16 * 8 + 2 * 16 * 4)
    with torch.no_grad(), saved_bytes() as nothing:
        (weight * 2).exp()
    assert nothing.total == 0


def test_steps_are_timed_in_turns_without_what_is_around_them() -> None:
    order: list[str] = []

    def slow() -> None:
        order.append("slow")
        time.sleep(0.01)

    times = in_turns(
        {"slow": slow, "quick": lambda: order.append("quick")},
        2,
        before=lambda label: time.sleep(0.02),
        after=lambda label, counts: order.append(f"{label} {counts}"),
    )
    assert order[:4] == ["slow", "slow False", "quick", "quick False"]
    assert order[4:] == ["slow", "slow True", "quick", "quick True"] * 2
    assert [len(each.seconds) for each in times.values()] == [2, 2]
    assert times["slow"].fastest > times["quick"].median
    assert StepTimes((3.0, 1.0, 2.0)).median == 2.0


def test_a_graph_that_nobody_has_any_more_is_freed_without_a_backward_pass() -> None:
    weight = torch.ones(8, requires_grad=True)
    with saved_bytes([weight]):
        output = weight.exp()  # which saves what it gives
    node: Any = output.grad_fn
    known = {1, 2}
    node.metadata["of the graph"] = known
    freed = weakref.ref(known)
    del output, node, known
    gc.collect()
    assert freed() is None


def test_saved_bytes_of_a_sparse_tensor_are_its_indices_and_values() -> None:
    values = torch.ones(3, requires_grad=True)
    places = torch.tensor([[0, 1, 1], [2, 0, 1]])
    made = torch.sparse_coo_tensor(places, values, (2, 4), check_invariants=True)
    with saved_bytes() as saved:
        torch.sparse.mm(made, torch.ones(4, 5, requires_grad=True))
    assert saved.total == 3 * (2 * 8 + 4) + 4 * 4 * 5
