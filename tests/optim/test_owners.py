"""Owners: who has what, and that an owner's update is the whole one, to the bit."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from modicum.core.contracts.ledger import OptimizerQuery as At
from modicum.core.contracts.ledger import TrainedParameter
from modicum.core.errors import InputError
from modicum.core.machine.memory import tensor_bytes
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.optim import GaLore, Muon
from modicum.optim.owners import Cut, Owners, Round, assign

# Of three ranks or four the last ones hold no row of the first and the fifth.
SHAPES = ((2, 9), (13, 5), (5, 13), (8, 8), (3, 70), (70, 65), (7,), (1,), (6, 2, 3))


@given(st.dictionaries(st.integers(), st.integers(1, 100), max_size=20), st.integers(1, 5))
def test_every_matrix_has_one_owner_and_loads_are_even(costs: dict[int, int], ranks: int) -> None:
    owners = assign(costs, ranks)
    assert owners.keys() == costs.keys()
    loads = [sum(costs[key] for key in costs if owners[key] == rank) for rank in range(ranks)]
    # No rank has more than another by more than its last matrix, which is no dearer than all.
    assert max(loads) - min(loads) <= max(costs.values(), default=0)
    again = assign(dict(reversed(costs.items())), ranks)
    assert sorted(loads) == sorted(
        sum(costs[key] for key in costs if again[key] == rank) for rank in range(ranks)
    )


def test_matrices_that_come_later_leave_the_others_where_they_are() -> None:
    owners = Owners(lambda shape: shape[0] * shape[1])
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(4, 4))
    owners.add([first])
    place = owners[first]
    owners.add([second])
    assert (owners[first], owners[second].number) == (place, 1)
    assert place.here
    assert torch.ones(2) not in owners


def start(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator).to(dtype)


def stepped(ranks: Ranks, shards: int, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """Parameters after four steps by given gradients; bytes of state, and sent in a step."""
    with pytest.MonkeyPatch.context() as patch:
        return _stepped(ranks, shards, dtype, fields, patch)


def _stepped(
    ranks: Ranks,
    shards: int,
    dtype: torch.dtype,
    fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:

    def laid_out(tensor: Tensor) -> Tensor:
        if ranks.alone:
            return tensor
        placements = [Shard(0)] if mesh.ndim == 1 else [Replicate(), Shard(0)]
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    if not ranks.alone:
        mesh = Layout.of(ranks.size, shards).mesh("cpu")
    parameters = [
        nn.Parameter(laid_out(start(number, shape, dtype))) for number, shape in enumerate(SHAPES)
    ]
    optimizer, sent, exchange = GaLore(parameters, lr=0.1, **fields), [0], Round._exchange

    def counted(turn: Round, parts: dict[int, Tensor], *others: Any) -> Tensor:
        sent[-1] += sum(t.nbytes for rank, t in parts.items() if rank != turn.cut.rank)
        return exchange(turn, parts, *others)

    monkeypatch.setattr(Round, "_exchange", counted)
    for step in range(4):
        for number, parameter in enumerate(parameters):
            idle = number == 3 and step == 1  # nobody has a gradient of it
            gradient = start(1000 * step + number, SHAPES[number], dtype)
            parameter.grad = None if idle else laid_out(gradient)
        optimizer.step()
        sent.append(0)
    state = [v for s in optimizer.state.values() for v in s.values()]
    weights = [whole(parameter.detach()) for parameter in parameters]
    return weights, tensor_bytes(state), sent[0]


FIELDS: list[dict[str, Any]] = [
    {"rank": 2, "update_gap": 2, "weight_decay": 0.1},
    {"rank": 64, "update_gap": 3, "state_bits": 8, "projector_bits": 16},
    {"rank": 3, "update_gap": 2, "svd": "randomized", "stagger": True, "on_refresh": "rotate"}
    | {"state_bits": 16, "projector_bits": 16},
]


@pytest.mark.ranks
@pytest.mark.parametrize("fields", FIELDS, ids=["fp32", "8-bit", "randomized, bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_by_the_same_gradients_ranks_do_what_one_process_does(
    pool: Pool, ranks: int, shards: int, dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    expected, alone, _ = stepped(Ranks(), 1, dtype, fields)
    results = pool.run(stepped, shards, dtype, fields, ranks=ranks)
    for found, _, _ in results:
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), one.shape
    width = torch.empty((), dtype=dtype).element_size()
    shapes = tuple(TrainedParameter(f"{shape}", shape, "matrix", width) for shape in SHAPES)
    value = GaLore.value(**fields)
    assert value.ledger(At(shapes)).bytes("optimizer") == alone
    said = value.ledger(At(shapes, shards=shards))
    assert said.bytes("optimizer") == max(kept for _, kept, _ in results)
    assert [wire.bytes for wire in said.wire] == [max(sent for _, _, sent in results)]


def cut_along_columns(ranks: Ranks) -> None:
    mesh = Layout.of(ranks.size, ranks.size).mesh("cpu")
    weight = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None)
    parameter = nn.Parameter(weight)
    optimizer = GaLore([parameter], rank=2)
    parameter.grad = weight.clone()
    for _ in range(2):  # the second step says the same
        with pytest.raises(ValueError, match="along dimension 0"):
            optimizer.step()


@pytest.mark.ranks
def test_other_cuts_are_refused(pool: Pool) -> None:
    pool.run(cut_along_columns)


def sharded_twice(ranks: Ranks, sizes: tuple[int, int]) -> Any:
    """Rank and ranks of a matrix that is sharded over both dimensions of a mesh, or why not."""
    mesh = init_device_mesh("cpu", sizes)
    weight = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Shard(0)])
    try:
        cut = Cut.of(weight)
    except ValueError as error:
        return str(error)
    return cut.rank, cut.size


@pytest.mark.ranks
def test_rows_that_are_sharded_once_more_are_refused_and_a_lone_rank_shards_nothing(
    pool: Pool,
) -> None:
    for sizes in ((2, 1), (1, 2)):
        assert pool.run(sharded_twice, sizes) == [(0, 2), (1, 2)]
    for said in pool.run(sharded_twice, (2, 2), ranks=4):
        assert "sharded over several dimensions of a mesh" in said


def in_copies(ranks: Ranks) -> list[Tensor]:
    """Matrices after two steps; of several ranks each has full copies of them, as DTensors."""
    mesh = None if ranks.alone else init_device_mesh("cpu", (ranks.size,))

    def laid_out(tensor: Tensor) -> Tensor:
        if mesh is None:
            return tensor
        return distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=None)

    kinds: list[tuple[Any, dict[str, Any]]] = [(GaLore, {"rank": 2}), (Muon, {})]
    found = []
    for kind, fields in kinds:
        weight = nn.Parameter(laid_out(start(0, (6, 4), torch.float32)))
        optimizer = kind([weight], lr=0.1, **fields)
        for step in range(2):
            weight.grad = laid_out(start(1 + step, (6, 4), torch.float32))
            optimizer.step()
        found.append(whole(weight.detach()).clone())
    return found


@pytest.mark.ranks
def test_dtensors_of_which_ranks_have_copies_are_stepped_as_tensors_are(pool: Pool) -> None:
    alone = in_copies(Ranks())
    for found in pool.run(in_copies):
        for one, other in zip(found, alone, strict=True):
            torch.testing.assert_close(one, other)


def test_gradients_without_a_subspace_are_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.full((4, 4), torch.nan)
    with pytest.raises(InputError, match="not finite"):
        GaLore([weight], rank=2).step()
