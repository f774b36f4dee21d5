"""Layouts, on 2 to 8 ranks that one process simulates (`LocalTensorMode`).

A tensor there holds every rank's own, operations run once for each, and collectives are computed
from them; so what a sharded computation yields is checked without starting a process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from modicum.core.ranks.layout import Layout

local_tensor = pytest.importorskip(
    "torch.distributed._local_tensor", reason="this torch simulates no ranks"
)
if not hasattr(local_tensor, "rank_map"):
    pytest.skip("this torch simulates ranks in another way", allow_module_level=True)
LocalTensor, LocalTensorMode = local_tensor.LocalTensor, local_tensor.LocalTensorMode
rank_map = local_tensor.rank_map

LAYOUTS = [
    Layout(1, 2),
    Layout(1, 3),
    Layout(1, 4),
    Layout(1, 8),
    Layout(2, 1),
    Layout(2, 2),
    Layout(2, 4),
    Layout(4, 2),
]
everywhere = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout}"[6:])


@contextmanager
def simulated(layout: Layout) -> Iterator[DeviceMesh]:
    """The mesh of a layout whose ranks are all this process."""
    dist.init_process_group("fake", rank=0, world_size=layout.ranks, store=FakeStore())
    try:
        with LocalTensorMode(layout.ranks):
            yield layout.mesh("cpu")
    finally:
        dist.destroy_process_group()


def placements(mesh: DeviceMesh, last: Placement) -> list[Placement]:
    """`last` for the shards of one replica, and copies in all replicas."""
    return [*[Replicate()] * (mesh.ndim - 1), last]


def on_each_rank(tensor: Tensor) -> list[Tensor]:
    """The tensors that the simulated ranks have."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    assert isinstance(local, LocalTensor)
    return [local._local_tensors[rank] for rank in sorted(local._local_tensors)]


def numbered(shape: tuple[int, ...]) -> Tensor:
    """1, 2, 3 and so on, as a plain tensor even where ranks are simulated."""
    local = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    return on_each_rank(local)[0] if isinstance(local, LocalTensor) else local


def cut(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """A tensor that all ranks know, of which each keeps its rows."""
    return placed(tensor, mesh, placements(mesh, Shard(0)))


def placed(tensor: Tensor, mesh: DeviceMesh, where: list[Placement]) -> DTensor:
    """A tensor that all ranks know, laid out over the mesh without sending anything."""
    same = rank_map(lambda _: tensor.clone())
    return distribute_tensor(same, mesh, where, src_data_rank=None)


def whole(tensor: DTensor) -> Tensor:
    """The gathered tensor, when all ranks have gathered the same."""
    first, *others = on_each_rank(tensor.full_tensor())
    assert all(torch.equal(first, other) for other in others)
    return first.detach()


def test_groups_must_divide_the_ranks() -> None:
    assert Layout.of(6, 3) == Layout(replicas=2, shards=3)
    with pytest.raises(ValueError, match="6 ranks cannot be split into groups of 4"):
        Layout.of(6, 4)


def test_a_layout_has_a_name() -> None:
    layouts = [Layout(), Layout(4, 1), Layout(1, 4), Layout(2, 2)]
    assert [layout.name for layout in layouts] == ["one process", "ddp", "fsdp", "hybrid"]


def test_neighbours_share_a_copy_of_the_weights() -> None:
    with simulated(Layout(2, 4)) as mesh:
        assert mesh.mesh.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert mesh.mesh_dim_names == ("replicate", "shard")
        assert mesh["shard"].mesh.tolist() == [0, 1, 2, 3]
    with simulated(Layout(1, 3)) as mesh:
        assert mesh.mesh.tolist() == [0, 1, 2]
        assert mesh.mesh_dim_names == ("shard",)


# Rows that the shards divide, rows that they do not, and fewer rows than shards.
SHAPES = [(8, 3), (7, 3), (2, 5), (1,), (5, 2, 2)]


@everywhere
def test_cut_tensors_gather_to_what_they_were(layout: Layout) -> None:
    with simulated(layout) as mesh:
        for shape in SHAPES:
            dense = numbered(shape)
            tensor = cut(dense, mesh)
            parts = on_each_rank(tensor)
            # Rank r holds the r % shards'th rows, as many as torch.chunk gives it, perhaps none.
            chunks = list(torch.chunk(dense, layout.shards))
            chunks += [dense[:0]] * (layout.shards - len(chunks))
            for rank, part in enumerate(parts):
                assert torch.equal(part, chunks[rank % layout.shards])
            assert torch.equal(whole(tensor), dense)


@everywhere
def test_the_gradient_norm_is_that_of_the_whole(layout: Layout) -> None:
    dense = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, shape in zip(dense, SHAPES, strict=True):
        parameter.grad = numbered(shape).cos()
    gradients = [parameter.grad.clone() for parameter in dense if parameter.grad is not None]
    expected = nn.utils.clip_grad_norm_(dense, 1.0)
    with simulated(layout) as mesh:
        # Every other parameter is whole on each rank, as what an adapter trains may be.
        where = [placements(mesh, Shard(0) if i % 2 == 0 else Replicate()) for i in range(5)]
        parameters = []
        for gradient, how in zip(gradients, where, strict=True):
            parameter = nn.Parameter(placed(torch.zeros_like(gradient), mesh, how))
            parameter.grad = placed(gradient, mesh, how)
            parameters.append(parameter)
        total = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        assert isinstance(total, DTensor)
        torch.testing.assert_close(whole(total), expected)
        torch.testing.assert_close(whole(nn.utils.clip_grad_norm_(parameters, 1.0)), expected)
        for parameter, clipped in zip(parameters, dense, strict=True):
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(whole(parameter.grad), clipped.grad)


STEPS, CLIP_NORM = 3, 0.5


def train(
    weight: Tensor, bias: Tensor, batches: list[tuple[Tensor, Tensor, int]], gather: bool
) -> list[float]:
    """Steps of AdamW on a linear layer; of each the ranks' losses, added, and the gradient's norm.

    The norm is there because neither AdamW nor clipping minds gradients that are too large.
    """
    optimizer = torch.optim.AdamW([weight, bias], lr=0.05, weight_decay=0.1)
    found = []
    for inputs, targets, count in batches:
        used = [weight, bias]
        if gather:
            assert isinstance(weight, DTensor)
            # What FSDP does: gather for the computation; sum the ranks' gradients, keep one's rows.
            partial = [Partial("sum")] * weight.device_mesh.ndim
            used = [tensor.full_tensor(grad_placements=partial) for tensor in used]
        loss = F.mse_loss(F.linear(inputs, *used), targets, reduction="sum") / count
        loss.backward()
        norm = nn.utils.clip_grad_norm_([weight, bias], CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found += [
            sum(one.item() for one in on_each_rank(loss)) if gather else loss.item(),
            whole(norm).item() if isinstance(norm, DTensor) else norm.item(),
        ]
    return found


@everywhere
def test_a_sharded_step_is_the_dense_step(layout: Layout) -> None:
    """With other numbers of rows on every rank, and a layer of fewer rows than some have shards."""
    generator = torch.Generator().manual_seed(1)
    rows = [rank % 3 + 1 for rank in range(layout.ranks)]
    inputs = [torch.randn(sum(rows), 6, generator=generator) for _ in range(STEPS)]
    targets = [torch.randn(sum(rows), 5, generator=generator) for _ in range(STEPS)]
    start = torch.randn(5, 6, generator=generator), torch.randn(5, generator=generator)
    dense = [tensor.clone().requires_grad_() for tensor in start]
    batches = [(x, y, sum(rows)) for x, y in zip(inputs, targets, strict=True)]
    expected = train(*dense, batches, gather=False)
    with simulated(layout) as mesh:
        sharded = [cut(tensor, mesh).requires_grad_() for tensor in start]
        local = [
            tuple(rank_map(lambda rank, whole=whole: whole.split(rows)[rank]) for whole in pair)
            for pair in zip(inputs, targets, strict=True)
        ]
        found = train(*sharded, [(x, y, sum(rows)) for x, y in local], gather=True)
        assert found == pytest.approx(expected, rel=1e-5)
        for ours, theirs in zip(sharded, dense, strict=True):
            torch.testing.assert_close(whole(ours), theirs.detach())
