"""Tiles: codes, zero points, changes that they take, and who may hold which rows of tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.frozen_product import frozen_product, weight_of
from modicum.core.layers.linear_forms import form_of, full_weight, linear_form, own_rows
from modicum.core.layers.linear_forms import write_weight as write
from modicum.core.machine.kernels import product_scratch
from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part, whole
from modicum.linears import TileLinear, Tiles
from modicum.linears.coded_tiles import _pack, _unpack

BITS = (2, 3, 4)
sizes = st.integers(1, 40)


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_hand(weight: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """Each tile by itself, in fp64: even levels from its least to its largest weight."""
    held = weight.double().clone()
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            tile = held[top : top + rows, left : left + columns]
            scale = (tile.max() - tile.min()) / (2**bits - 1)
            codes = ((tile - tile.min()) / scale).round() if scale else torch.zeros_like(tile)
            tile.copy_(tile.min() + scale * codes)
    return held.float()


@given(
    outs=sizes,
    ins=sizes,
    bits=st.sampled_from(BITS),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_weight_becomes_the_nearest_level_of_its_tile(
    outs: int, ins: int, bits: int, rows: int, columns: int, seed: int
) -> None:
    weight = normal(outs, ins, seed)
    asked = {"bits": bits, "tile_rows": rows, "tile_columns": columns, "zero_points": "fp32"}
    layer = TileLinear.from_dense(weight, **asked)
    assert torch.allclose(layer.to_dense(), by_hand(weight, bits, rows, columns), atol=1e-5)
    assert [t.shape[0] for t in layer.frozen_tensors()] == [-(-outs // rows)] * 3
    assert layer.arguments() == asked


@given(bits=st.sampled_from(BITS), count=st.integers(1, 30), seed=st.integers(0, 99))
def test_codes_of_any_number_of_bits_are_packed_tightly(bits: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(2**bits, (3, count), generator=generator, dtype=torch.uint8)
    packed = _pack(codes, bits)
    assert packed.shape == (3, bits * -(-count // 8))
    assert torch.equal(_unpack(packed, bits)[:, :count], codes)


@pytest.mark.parametrize(
    ("bits", "least", "most"), [(2, 0.36, 0.40), (3, 0.155, 0.175), (4, 0.072, 0.082)]
)
def test_the_error_on_normal_weights(bits: int, least: float, most: float) -> None:
    weight = normal(256, 1024)
    error = (linear_form("tiles").round_trip(weight, bits=bits) - weight).norm() / weight.norm()
    assert least < float(error) < most


@pytest.mark.parametrize(("numbers", "bound"), [("fp32", 6e-8), ("fp16", 4.9e-4), ("bf16", 4e-3)])
def test_a_zero_point_is_rounded_by_no_more_than_is_said(numbers: str, bound: float) -> None:
    layer = TileLinear.from_dense(normal(64, 64), zero_points=numbers)
    before = layer.zero_points.double()
    each = normal(8, 16, seed=1)
    change = each.repeat_interleave(8, 0).repeat_interleave(4, 1)
    shifted = layer.shift(change)
    assert shifted is not None
    layer.zeros.copy_(shifted["zeros"])
    wanted = before + each.double()
    assert ((layer.zero_points.double() - wanted).abs() <= bound * wanted.abs()).all()
    if numbers != "fp32":
        assert not torch.equal(layer.zero_points.double(), wanted)


@given(
    numbers=st.sampled_from(["fp16", "bf16", "fp32"]),
    bits=st.sampled_from(BITS),
    offset=st.floats(-50, 50),
    spread=st.floats(-4, 2),
    seed=st.integers(0, 99),
)
def test_what_tiles_represent_is_coded_to_itself(
    numbers: str, bits: int, offset: float, spread: float, seed: int
) -> None:
    asked = {"bits": bits, "tile_rows": 2, "tile_columns": 2, "zero_points": numbers}
    once = TileLinear.from_dense(offset + normal(6, 6, seed) * 10**spread, **asked)
    twice = TileLinear.from_dense(once.to_dense(), **asked)
    assert torch.equal(twice.zero_points, once.zero_points)
    assert torch.allclose(twice.to_dense(), once.to_dense(), rtol=1e-6)


def test_a_weight_beyond_fp16_is_refused_and_bf16_holds_it() -> None:
    weight = normal(8, 8) + 1e5
    with pytest.raises(InputError, match=r"too large for zero points of fp16; take bf16 or fp32"):
        TileLinear.from_dense(weight)
    held = TileLinear.from_dense(weight, zero_points="bf16").to_dense()
    assert torch.allclose(held, weight, rtol=5e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_spoils_its_own_tile_alone(bad: float) -> None:
    weight = normal(16, 8)
    weight[3, 5] = bad
    held = TileLinear.from_dense(weight, zero_points="fp32").to_dense()
    assert not held[:8, 4:].isfinite().any()
    assert held[:8, :4].isfinite().all()
    assert held[8:].isfinite().all()


def test_a_tile_of_one_number_keeps_it() -> None:
    weight = torch.full((8, 8), 0.375)
    weight[:, 4:] = 0.0
    assert torch.equal(TileLinear.from_dense(weight, bits=2).to_dense(), weight)


@pytest.mark.parametrize("chunk", [1, 130, 1000])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TileLinear.from_dense(normal(37, 65), bits=3)
    monkeypatch.setattr("modicum.linears.frozen.CPU_CHUNK", chunk)
    layer = TileLinear.from_dense(normal(37, 65), bits=3)
    pairs = zip(layer.frozen_tensors(), expected.frozen_tensors(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert torch.equal(layer.to_dense(), expected.to_dense())


def test_casting_the_model_leaves_the_weight_alone() -> None:
    layer = TileLinear.from_dense(normal(9, 20), torch.ones(9))
    before = full_weight(layer)
    layer.to(torch.bfloat16)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(full_weight(layer), before)


def test_who_computes_next_to_it_gets_its_weight() -> None:
    layer = TileLinear.from_dense(normal(9, 21), bits=3, tile_rows=4, zero_points="bf16")
    product = frozen_product(layer)
    assert product is not None
    assert product.form == "tiles:9:3:4:4:bf16"
    held = weight_of(product.form, product.held, 21, torch.float32)
    assert torch.equal(held, full_weight(layer))
    assert form_of(layer) is linear_form("tiles")


def test_bits_that_it_does_not_know_are_refused() -> None:
    with pytest.raises(InputError, match="bits"):
        Tiles(bits=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(60, 120), (3000, 600)])
def test_the_workspace_is_what_the_meter_sees(shape: tuple[int, int], dtype: torch.dtype) -> None:
    layer = TileLinear.from_dense(normal(*shape))
    inputs = torch.ones(1, shape[1], dtype=dtype)
    layer(inputs)  # tables are made once
    with TensorMeter("cpu") as meter:
        layer(inputs)
    stated = linear_form("tiles").workspace(shape[1], shape[0], dtype.itemsize)
    scratch = product_scratch(1, shape[1], shape[0], half=dtype == torch.bfloat16).forward
    expected = max(stated, shape[0] * shape[1] * dtype.itemsize + scratch)
    assert meter.peak == pytest.approx(expected, rel=0.05)


class Net(nn.Module):
    """A frozen layer whose rows of tiles no number of ranks fits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 30)
        self.coded = TileLinear(30, 21, bits=3, tile_rows=4)
        self.last = nn.Linear(21, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.coded(self.first(inputs)).relu())


def started() -> Net:
    torch.manual_seed(0)
    net = Net()
    write(net.coded, normal(21, 30))
    assert net.coded.bias is not None
    nn.init.normal_(net.coded.bias)
    return net


def gradients(net: nn.Module) -> dict[str, Tensor]:
    net(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
    return {n: whole(p.grad).clone() for n, p in net.named_parameters() if p.grad is not None}


def rows_of_tiles_over_ranks(ranks: Ranks) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    net = started()
    parts = {n: p.detach().clone() for n, p in net.coded.named_parameters()}
    fully_shard(net.coded)
    fully_shard(net)
    for name, all_rows in parts.items():
        part, before = own_part(net.coded.get_parameter(name).detach())
        assert torch.equal(part, all_rows[before : before + len(part)])
    made, dense = gradients(net), full_weight(net.coded)
    for module in (net.coded, net):
        module.reshard()
    (count, before), other = own_rows(net.coded), normal(21, 30, seed=5)
    write(net.coded, other[before : before + count])
    written = whole(full_weight(net.coded))
    shifted = net.coded.shift(torch.ones(count, 30))
    assert shifted is not None
    own_part(net.coded.zeros.detach())[0].copy_(shifted["zeros"])
    return {
        "rows": (count, before),
        "gradients": made,
        "dense": whole(dense),
        "written": written,
        "shifted": whole(full_weight(net.coded)),
    }


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_hold_rows_of_tiles_compute_what_one_process_does(
    pool: Pool, ranks: int
) -> None:
    net, other = started(), TileLinear.from_dense(normal(21, 30, seed=5), bits=3, tile_rows=4)
    expected, dense = gradients(net), full_weight(net.coded)
    results = pool.run(rows_of_tiles_over_ranks, ranks=ranks)
    # 6 rows of tiles of 4 outputs, of which the last has one: 3 and 3, or 2, 2, 2 and none.
    held = {2: [(12, 0), (9, 12)], 4: [(8, 0), (8, 8), (5, 16), (0, 21)]}[ranks]
    assert [result["rows"] for result in results] == held
    for result in results:
        assert torch.equal(result["dense"], dense)
        assert torch.equal(result["written"], other.to_dense())
        assert torch.allclose(result["shifted"], other.to_dense() + 1, atol=2e-3)
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in result["gradients"].items():  # FSDP2's own mean of equal ones
            assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-6)
