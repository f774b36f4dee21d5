"""Monarch layers: the projection, the permutation, the transforms that they are exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import full_weight, linear_form
from modicum.linears import Monarch, MonarchLinear


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


def parts(weight: Tensor, blocks: int) -> list[Tensor]:
    """Between each group of inputs and each of outputs, cut out one by one."""
    wide = -(-weight.shape[1] // blocks)
    return [
        weight[j::blocks, k * wide : (k + 1) * wide] for k in range(blocks) for j in range(blocks)
    ]


sizes = st.integers(1, 30)


@given(outs=sizes, ins=sizes, blocks=st.integers(1, 5), rank=st.integers(1, 4))
def test_the_projection_is_the_nearest_and_keeps_what_it_made(
    outs: int, ins: int, blocks: int, rank: int
) -> None:
    weight, most = normal(outs, ins), min(-(-ins // blocks), -(-outs // blocks))
    if rank > most:
        with pytest.raises(InputError, match=f"rank: no weight of this shape.*at most {most}"):
            MonarchLinear.from_dense(weight, blocks=blocks, rank=rank)
        return
    layer = MonarchLinear.from_dense(weight, blocks=blocks, rank=rank)
    held = full_weight(layer).detach()
    dropped = [
        torch.linalg.svdvals(part)[rank:].square().sum()
        for part in parts(weight, blocks)
        if part.numel()
    ]
    assert (held - weight).square().sum().item() == pytest.approx(float(sum(dropped)), abs=1e-10)
    again = full_weight(MonarchLinear.from_dense(held, blocks=blocks, rank=rank)).detach()
    assert torch.allclose(again, held, rtol=0, atol=1e-12)
    padded = blocks * rank * (blocks * -(-ins // blocks) + blocks * -(-outs // blocks))
    assert sum(p.numel() for p in layer.parameters()) == padded
    x = normal(3, ins, seed=1)
    assert torch.allclose(layer(x), x @ held.T, rtol=0, atol=1e-12)


def test_it_is_two_block_diagonal_matrices_with_a_permutation_between_them() -> None:
    blocks, rank, ins, outs = 3, 2, 4, 5
    layer = MonarchLinear.from_dense(normal(15, 12), blocks=blocks, rank=rank)
    inner = blocks * rank
    first = torch.block_diag(*layer.first.detach().view(blocks, inner, ins))
    rows = layer.second.detach().view(outs, blocks, inner).transpose(0, 1)
    second = torch.block_diag(*rows)
    middle = torch.zeros(blocks * inner, blocks * inner, dtype=torch.float64)
    for k in range(blocks):
        for r in range(rank):
            for j in range(blocks):  # from the place (k, r, j) to (j, k, r)
                middle[j * inner + k * rank + r, k * inner + r * blocks + j] = 1
    last = torch.zeros(outs * blocks, outs * blocks, dtype=torch.float64)
    for out in range(outs):
        for j in range(blocks):  # from the place (j, out) to (out, j)
            last[out * blocks + j, j * outs + out] = 1
    assert torch.allclose(last @ second @ middle @ first, full_weight(layer), atol=1e-12)


def test_a_part_of_full_rank_holds_any_weight() -> None:
    weight = normal(12, 20)
    layer = MonarchLinear.from_dense(weight, blocks=4, rank=3)
    assert torch.allclose(full_weight(layer), weight, atol=1e-12)
    with pytest.raises(InputError, match="at most 3"):
        MonarchLinear.from_dense(weight, blocks=4, rank=4)


def test_one_block_is_a_product_of_two_matrices() -> None:
    weight = normal(9, 7)
    one = linear_form("monarch").round_trip(weight, blocks=1, rank=2)
    other = linear_form("low_rank").round_trip(weight, rank=2)
    assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("wave", [torch.cos, torch.sin])
@pytest.mark.parametrize("blocks", [4, 8])
def test_fourier_transforms_of_permuted_inputs_are_monarch(wave: nn.Module, blocks: int) -> None:
    """exp(-2 pi i o c / n) is a product in each part; of its real part cos(a + b) has rank 2."""
    size = blocks * blocks
    order = torch.arange(size).view(blocks, blocks).T.flatten()
    angles = torch.outer(torch.arange(size), order).double() * 2 * math.pi / size
    weight = wave(angles)
    held = linear_form("monarch").round_trip(weight, blocks=blocks, rank=2)
    assert (held - weight).abs().max() < 1e-12
    loss = linear_form("low_rank").round_trip(weight, rank=blocks // 2) - weight
    assert loss.norm() > 0.3 * weight.norm()


def test_at_equal_elements_random_weights_lose_as_much_as_by_an_svd() -> None:
    weight = normal(256, 256)
    monarch = linear_form("monarch").round_trip(weight, blocks=16, rank=1)
    svd = linear_form("low_rank").round_trip(weight, rank=16)
    kept = [1 - ((w - weight).norm() / weight.norm()).item() ** 2 for w in (monarch, svd)]
    assert kept[0] == pytest.approx(0.215, abs=0.01)  # of the dossier's measurement
    assert kept[1] == pytest.approx(0.211, abs=0.01)


def test_gradients_are_those_of_a_plain_einsum() -> None:
    layer = MonarchLinear.from_dense(normal(8, 8), blocks=2, rank=2)
    x = normal(5, 8, seed=1).requires_grad_()

    def plain(first: Tensor, second: Tensor) -> Tensor:
        sums = torch.einsum("nki,krji->njkr", x.view(5, 2, 4), first.view(2, 2, 2, 4))
        out = torch.einsum("njkr,ojkr->noj", sums, second.view(4, 2, 2, 2))
        return out.reshape(5, 8)

    out, wanted = normal(5, 8, seed=2), [x, layer.first, layer.second]
    expected = torch.autograd.grad(plain(layer.first, layer.second), wanted, out)
    bias = layer._parameters["bias"]
    assert bias is None
    for one, other in zip(torch.autograd.grad(layer(x), wanted, out), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_layers_that_would_not_become_smaller_stay_dense() -> None:
    value = Monarch(blocks=4)
    assert value.arguments(64, 64) == {"blocks": 4, "rank": 4}
    assert value.arguments(6, 5) is None
    assert Monarch(blocks=4, rank=8).arguments(64, 64) is None
    assert Monarch(blocks=16).arguments(2048, 2048) == {"blocks": 16, "rank": 8}
    assert Monarch(share=0.5).arguments(64, 64) == {"blocks": 4, "rank": 4}
    assert Monarch(share=0.5, rank=2).arguments(64, 64) == {"blocks": 4, "rank": 2}
    assert Monarch(share=0.01).arguments(64, 64) == {"blocks": 4, "rank": 1}
    for sides in ((192, 512), (512, 192), (50, 35)):
        for share in (0.25, 0.45, 0.9):
            asked = Monarch(share=share).arguments(*sides)
            assert asked is not None
            sizes = [
                sum(map(math.prod, MonarchLinear.shapes(*sides, 4, rank).values()))
                for rank in (asked["rank"], asked["rank"] + 1)
            ]
            assert sizes[0] <= share * math.prod(sides) < sizes[1]
    made = MonarchLinear(64, 48, blocks=4)
    assert repr(made).startswith("MonarchLinear(in_features=64, out_features=48, blocks=4, rank=3")


def test_compiled_it_computes_the_same() -> None:
    layer = MonarchLinear.from_dense(normal(10, 14).float(), torch.ones(10), blocks=3, rank=2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for rows in (1, 6):
        x = normal(rows, 14).float()
        assert torch.allclose(compiled(x), layer(x), atol=1e-5)
