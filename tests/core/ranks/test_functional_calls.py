"""Functional collectives: what is recorded of them, with results and errors as without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from modicum.core.ranks import functional_calls
from modicum.core.ranks.observed_calls import CallLog, ObservedCall
from modicum.core.ranks.observed_groups import observing
from modicum.core.ranks.ranks import Ranks

OPERATORS: Any = torch.ops._c10d_functional


def clipped(ranks: Ranks) -> tuple[list[Tensor], list[ObservedCall]]:
    """Weights after three updates of FSDP2, clipped by PyTorch's own function; calls of its."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (ranks.size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[ObservedCall] = []
    for step in range(3):
        torch.manual_seed(10 * step + ranks.rank)
        model(torch.randn(4, 6)).square().mean().backward()
        with observing(CallLog()) as log:
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            float(norm.full_tensor())
        calls += log.calls
        optimizer.step()
        optimizer.zero_grad()
    parameters: list[Any] = list(model.parameters())
    return [p.full_tensor().detach() for p in parameters], calls


def unseen(ranks: Ranks) -> list[Tensor]:
    functional_calls.functional_collectives, before = list, functional_calls.functional_collectives
    try:
        weights, calls = clipped(ranks)
    finally:
        functional_calls.functional_collectives = before
    assert calls == []
    return weights


@pytest.mark.ranks
def test_the_norm_of_fsdp2_is_seen_and_the_same_to_the_bit(pool: Pool) -> None:
    plain = pool.run(unseen)
    for (weights, calls), others in zip(pool.run(clipped), plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))
        assert [(call.kind, call.bytes) for call in calls] == [("all-reduce", 16)] * 3
        numbers = [call.sequence for call in calls]
        assert numbers == sorted(set(numbers))
        for call in calls:
            assert call.members == (0, 1)
            assert call.asked <= call.begun < call.ended
            assert call.waited > 0


def by_each(ranks: Ranks) -> list[tuple[str, bool, list[tuple[str, int]], bool]]:
    """Each operator, seen and not: same results, what was seen of it, and whether it ended."""
    mine, size = torch.arange(4.0) + ranks.rank, ranks.size
    group = str(dist.distributed_c10d._get_default_group().group_name)
    turned = torch.view_as_complex(mine.view(2, 2))
    two, sums = [mine, 2 * mine], ("sum", group)
    cases: list[tuple[str, Callable[[], Any]]] = [
        ("all_reduce", lambda: (mine, *sums)),
        ("all_reduce", lambda: (turned, *sums)),
        ("all_reduce_", lambda: (mine.clone(), *sums)),
        ("all_reduce_coalesced", lambda: (two, *sums)),
        ("all_reduce_coalesced_", lambda: ([each.clone() for each in two], *sums)),
        ("all_gather_into_tensor", lambda: (mine, size, group)),
        ("all_gather_into_tensor_coalesced", lambda: (two, size, group)),
        ("all_gather_into_tensor_out", lambda: (mine, size, group)),
        ("reduce_scatter_tensor", lambda: (mine, "sum", size, group)),
        ("reduce_scatter_tensor_coalesced", lambda: (two, "sum", size, group)),
        ("reduce_scatter_tensor_out", lambda: (mine, "sum", size, group)),
        ("all_to_all_single", lambda: (mine, [2, 2], [2, 2], group)),
        ("broadcast", lambda: (mine, 1, group)),
        ("broadcast_", lambda: (mine.clone(), 1, group)),
    ]

    def run(name: str, given: Callable[[], Any]) -> list[Tensor]:
        sizes = {"all_gather_into_tensor_out": 4 * size, "reduce_scatter_tensor_out": 4 // size}
        named = {"out": torch.empty(sizes[name])} if name in sizes else {}
        results = getattr(OPERATORS, name)(*given(), **named)
        results = [results] if isinstance(results, Tensor) else results
        return [OPERATORS.wait_tensor(each).clone() for each in results]

    found = []
    for name, given in cases:
        plain = run(name, given)
        with observing(CallLog()) as log:
            seen = run(name, given)
        again = run(name, given)
        same = all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(plain, seen, again, strict=True)
        )
        ended = all(call.done and call.waited > 0 for call in log.calls)
        found.append((name, same, [(call.kind, call.bytes) for call in log.calls], ended))
    return found


@pytest.mark.ranks
def test_each_operator_is_seen_once_with_what_it_sends(pool: Pool) -> None:
    gathered = [("all-gather", 16)]
    said = {
        "all_reduce": [("all-reduce", 16)],
        "all_reduce_": [("all-reduce", 16)],
        "all_reduce_coalesced": [("all-reduce", 32)],
        "all_reduce_coalesced_": [("all-reduce", 32)],
        "all_gather_into_tensor": gathered,
        "all_gather_into_tensor_coalesced": [("all-gather", 32)],
        "reduce_scatter_tensor": [("reduce-scatter", 8)],
        "reduce_scatter_tensor_coalesced": [("reduce-scatter", 16)],
        "reduce_scatter_tensor_out": [("reduce-scatter", 8)],
        "all_to_all_single": [("all-to-all", 8)],
    }
    for rank, found in enumerate(pool.run(by_each)):
        for name, same, calls, ended in found:
            assert same, name
            assert ended, name
            if name == "all_gather_into_tensor_out":  # which torch 2.14 alone has go by Python
                assert calls in ([], gathered)
            elif name.startswith("broadcast"):
                assert calls == [("broadcast", 16 if rank == 1 else 0)]
            else:
                assert calls == said[name], name


def derived(ranks: Ranks) -> tuple[Tensor, list[tuple[str, int]]]:
    """A gradient through functional collectives, and the calls of both passes."""
    given = torch.arange(4.0).requires_grad_()
    with observing(CallLog()) as log:
        total = functional.all_reduce(2 * given, "sum", dist.group.WORLD)
        rows = functional.reduce_scatter_tensor(total, "sum", 0, dist.group.WORLD)
    rows.square().sum().backward()  # nobody looks any more, and the group is the one that was named
    assert given.grad is not None
    return given.grad, [(call.kind, call.bytes) for call in log.calls]


@pytest.mark.ranks
def test_gradients_pass_through_what_was_seen(pool: Pool) -> None:
    for gradient, calls in pool.run(derived):
        assert calls == [("all-reduce", 16), ("reduce-scatter", 8)]
        assert torch.equal(gradient, torch.arange(4.0) * 64)


def compiled(ranks: Ranks) -> tuple[bool, list[str], list[str], int]:
    """A graph that is compiled while somebody observes, and used before, then, and after."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def plain(given: Tensor) -> Tensor:
        summed: Tensor = functional.all_reduce(given * 2, "sum", dist.group.WORLD)
        return summed + 1

    run = torch.compile(plain, fullgraph=True, backend=backend)
    with observing(CallLog()) as log:
        first = run(torch.ones(3))
    after = run(torch.ones(3))
    with observing(CallLog()) as later:
        again = run(torch.ones(3))
    same = all(torch.equal(plain(torch.ones(3)), each) for each in (first, after, again))
    kinds = [[call.kind for call in each.calls] for each in (log, later)]
    torch.compiler.reset()
    return same, kinds[0], kinds[1], len(graphs)


@pytest.mark.ranks
def test_a_compiled_graph_is_the_same_one_and_is_seen(pool: Pool) -> None:
    for found in pool.run(compiled):
        assert found == (True, ["all-reduce"], ["all-reduce"], 1)


def message_of(called: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(RuntimeError) as caught:
        called()
    return caught.type, str(caught.value).partition("\n")[0]


def refused(ranks: Ranks) -> bool:
    ones, world = torch.ones(2), dist.distributed_c10d._get_default_group().group_name
    bad: list[Callable[[], Any]] = [
        lambda: OPERATORS.all_reduce(ones, "no such rule", world),
        lambda: OPERATORS.all_reduce(ones, "sum", "no such group"),
        lambda: OPERATORS.all_reduce(ones, "sum"),
    ]
    plain = [message_of(each) for each in bad]
    with observing(CallLog()) as log:
        seen = [message_of(each) for each in bad]
    return plain == seen and log.calls == []


@pytest.mark.ranks
def test_errors_are_those_of_the_operators(pool: Pool) -> None:
    assert pool.run(refused) == [True, True]


def let_go(ranks: Ranks) -> tuple[bool, bool, list[bool]]:
    """A group that is destroyed while somebody observes, and a result that nobody waits for."""
    with observing(CallLog()) as log:
        group = dist.new_group([0, 1])
        functional.all_reduce(torch.ones(2), "sum", group).wait()
        left = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        gone = left() is None
        unasked = OPERATORS.all_reduce(torch.ones(2), "sum", dist.group.WORLD.group_name)
        dist.barrier()
    OPERATORS.wait_tensor(unasked)
    return gone, not functional_calls._groups, [call.done for call in log.calls]


@pytest.mark.ranks
def test_groups_are_let_go_and_calls_end_that_nobody_waits_for(pool: Pool) -> None:
    for gone, empty, done in pool.run(let_go):
        assert gone
        assert empty
        assert done == [True] * 3


def kernels() -> list[bool]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    operators = [*functional_calls.functional_collectives(), functional_calls.functional_wait()]
    return [has(each.name(), device) for each in operators for device in ("CPU", "CUDA")]


def test_operators_have_other_kernels_only_while_somebody_observes() -> None:
    assert not any(kernels())
    with observing(CallLog()):
        assert all(kernels())
        with observing(CallLog()):
            assert all(kernels())
    assert not any(kernels())


def test_a_kernel_that_somebody_has_given_stays() -> None:
    mine = torch.library.Library("_c10d_functional", "IMPL")
    mine.impl("all_reduce", lambda given, rule, group: given + 41, "CPU")
    try:
        with observing(CallLog()) as log:
            assert float(OPERATORS.all_reduce(torch.ones(1), "sum", "nobody asks")) == 42
        assert log.calls == []
        assert float(OPERATORS.all_reduce(torch.ones(1), "sum", "nobody asks")) == 42
    finally:
        mine._destroy()
