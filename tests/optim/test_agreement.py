"""What ranks that do the same must have alike: digests of it, and whose values they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn

from modicum.core.ranks.observed_calls import AGREEMENT, CallLog
from modicum.core.ranks.observed_groups import observing
from modicum.core.ranks.ranks import Ranks
from modicum.optim import SOAP, GaLore
from modicum.optim.agreement import _CHUNK, digests, first_ones

Calls = list[tuple[str, str, int]]


def values(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def changed(tensor: Tensor, *where: int) -> Tensor:
    """The same but for the lowest bit of one element."""
    other = tensor.clone()
    other.view(torch.int32)[where] ^= 1
    return other


def test_digests_are_of_the_bits() -> None:
    matrix = values(0, 300, 300)
    assert matrix.numel() > _CHUNK
    flipped, swapped = matrix.clone(), matrix.clone()
    flipped[:, 1::2].neg_()
    swapped[:, [0, 1]] = swapped[:, [1, 0]]
    zero = torch.zeros(4)
    others = [flipped, swapped, changed(matrix, 299, 299), changed(matrix, 0, 0), matrix.mT]
    others += [-matrix, matrix.flip(0), zero, -zero, values(1, 300, 300), matrix[:299]]
    found = digests([matrix, *others])
    assert found.unique().numel() == len(found)
    assert torch.equal(digests([matrix.mT.contiguous().mT, *others]), found)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bfloat16, torch.int64], ids=str)
def test_digests_are_of_any_dtype(dtype: torch.dtype) -> None:
    places = torch.arange(8).to(dtype)
    assert digests([places, places.clone(), places.flip(0)]).unique().numel() == 2
    assert digests([places[:0]]).tolist() == [0]


def seen(log: CallLog) -> Calls:
    return [(call.kind, call.label, call.bytes) for call in log.calls]


def of_three(ranks: Ranks) -> tuple[list[Tensor], bool, bool, Calls]:
    """The last rank has another second tensor."""
    tensors = [values(0, 3), values(ranks.rank // 2, 4, 2), torch.arange(5)]
    everybody: Any = dist.group.WORLD
    with observing(CallLog()) as log:
        others, again = (first_ones(tensors, everybody) for _ in range(2))
        assert not first_ones([], everybody)
    return tensors, others, again, seen(log)


@pytest.mark.ranks
def test_the_first_ones_values_travel_where_one_rank_has_others(pool: Pool) -> None:
    digest = ("all-reduce", AGREEMENT, 2 * 2 * 16 * 3 // 3)
    for tensors, others, again, calls in pool.run(of_three, ranks=3):
        assert all(map(torch.equal, tensors, (values(0, 3), values(0, 4, 2), torch.arange(5))))
        assert (others, again) == (True, False)
        assert [call[:2] for call in calls] == [digest[:2], ("broadcast", "bases"), digest[:2]]
        assert calls[0] == calls[2] == digest


def stepped(ranks: Ranks, kind: Any, fields: dict[str, Any], alike: bool) -> Any:
    """Weights and state after three steps, with the calls of each."""
    shapes = ((5, 4), (3, 6))
    weights = [nn.Parameter(values(number, *shape)) for number, shape in enumerate(shapes)]
    optimizer = kind(weights, **fields)
    optimizer.replicas = dist.group.WORLD
    calls = []
    for step in range(3):
        for number, weight in enumerate(weights):
            seed = 10 * step + number + (0 if alike else 100 * ranks.rank)
            weight.grad = values(seed, *weight.shape)
        with observing(CallLog()) as log:
            optimizer.step()
        calls.append(seen(log))
    return [w.detach() for w in weights], [optimizer.state[w] for w in weights], calls


# Of two ranks each sends as many bytes as there are: 16 of each tensor.
SOAP_CALL, GALORE_CALL = ("all-reduce", AGREEMENT, 16 * 3 * 2), ("all-reduce", AGREEMENT, 16)
CASES: list[Any] = [
    (SOAP, {}, [[SOAP_CALL]] * 3),
    (SOAP, {"frequency": 2}, [[SOAP_CALL], [], [SOAP_CALL]]),
    (GaLore, {"rank": 2, "update_gap": 2}, [[GALORE_CALL] * 2, [], [GALORE_CALL] * 2]),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "fields", "expected"), CASES, ids=["SOAP", "at times", "GaLore"])
def test_ranks_that_are_alike_send_digests_alone(
    pool: Pool, kind: Any, fields: dict[str, Any], expected: list[Calls]
) -> None:
    (weights, state, calls), (same, state_too, calls_too) = pool.run(stepped, kind, fields, True)
    assert calls == calls_too == expected
    assert all(map(torch.equal, weights, same))
    for one, other in zip(state, state_too, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.ranks
def test_what_unlike_ranks_decompose_is_the_first_ones(pool: Pool) -> None:
    """Gradients differ, as decompositions on hosts of different kinds may."""
    results = pool.run(stepped, SOAP, {}, False)
    for one, other in zip(*(state for _, state, _ in results), strict=True):
        for name in ("left_basis", "right_basis", "exp_avg_sq"):
            assert torch.equal(one[name], other[name]), name
        assert not torch.equal(one["left_factor"], other["left_factor"])
