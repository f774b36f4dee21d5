"""Frozen weights in four and eight bits: the codes, the products, and who may hold which rows."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modicum.core import torch_compiler
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import (
    form_of,
    frozen_linears,
    full_weight,
    linear_form,
    own_rows,
    write_weight,
)
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.kernels import product_scratch
from modicum.core.machine.memory import TensorMeter
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part, whole
from modicum.linears import Int8Linear, NF4Linear
from modicum.linears.fp16 import FP16Linear
from modicum.linears.frozen import FrozenLinear
from modicum.linears.quantized import GROUP, QuantizedLinear

KINDS: list[type[QuantizedLinear]] = [NF4Linear, Int8Linear]
both = pytest.mark.parametrize("kind", KINDS)
frozen = pytest.mark.parametrize("kind", [*KINDS, FP16Linear])
widths = st.integers(1, 3 * GROUP + 5)


def normal(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def held(layer: FrozenLinear) -> list[Tensor]:
    return list(layer.frozen_tensors())


def scales_by_hand(row: Tensor) -> list[float]:
    """The scale of each weight of a row, one group after the other, as the docstrings tell it."""
    groups = [group.abs().max().double() for group in row.split(GROUP)]
    low, high = min(groups), max(groups)
    step = (high - low) / 255
    kept = [low + step * ((g - low) / step).round() if step else low for g in groups]
    return [float(kept[place // GROUP]) for place in range(len(row))]


def test_the_levels_are_the_quantiles_of_the_paper() -> None:
    # Appendix E, and bitsandbytes' create_normal_map: evenly spaced probabilities up to the offset
    # 0.9677083, eight steps on the positive side and seven on the negative one, and zero.
    def quantiles(steps: int) -> list[float]:
        offset = 0.9677083
        places = (offset + (0.5 - offset) * k / steps for k in range(steps))
        return [NormalDist().inv_cdf(place) for place in places]

    positive, negative = quantiles(8), quantiles(7)
    expected = sorted([*positive, 0.0, *(-value for value in negative)])
    assert NF4Linear.levels == pytest.approx([v / max(positive) for v in expected], abs=1e-6)
    assert len(NF4Linear.levels) == 16


@both
@given(columns=widths, seed=st.integers(0, 99), spread=st.floats(-6.0, 3.0))
def test_every_weight_becomes_the_nearest_level(
    kind: type[QuantizedLinear], columns: int, seed: int, spread: float
) -> None:
    weight = normal(2, columns, seed) * 10.0**spread
    weight[1] *= torch.linspace(0.01, 3.0, columns)
    scales = torch.tensor([scales_by_hand(row) for row in weight])
    units, levels = weight / scales, torch.tensor(kind.levels)
    restored = kind.from_dense(weight).to_dense() / scales
    assert (restored.unsqueeze(-1) - levels).abs().amin(-1).max() < 1e-5
    least = (units.unsqueeze(-1) - levels).abs().amin(-1)
    assert torch.allclose((restored - units).abs(), least, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "least", "most"), [(NF4Linear, 0.090, 0.094), (Int8Linear, 0.0055, 0.0063)]
)
def test_the_error_on_normal_weights(
    kind: type[QuantizedLinear], least: float, most: float
) -> None:
    weight = normal(256, 1024)
    error = (linear_form(kind.form).round_trip(weight) - weight).norm() / weight.norm()
    assert least < float(error) < most


def test_two_codes_a_byte_the_first_one_high() -> None:
    weight = torch.tensor([[1.0, -1.0, 0.0, NF4Linear.levels[9], -0.7]])
    layer = NF4Linear.from_dense(weight)
    assert layer.codes.tolist() == [[15 * 16 + 0, 7 * 16 + 9, 1 * 16 + 7]]
    assert layer.scales.tolist() == [[0]]
    assert layer.ranges.view(torch.float32).tolist() == [[1.0, 0.0]]


@both
def test_groups_of_zeros_and_of_tiny_numbers_stay_finite(kind: type[QuantizedLinear]) -> None:
    weight = torch.zeros(4, 2 * GROUP)
    weight[1, :GROUP] = 1e-42
    weight[2, 0] = 5.0
    weight[3] = -3.4e38
    restored = kind.from_dense(weight).to_dense()
    assert torch.isfinite(restored).all()
    assert torch.equal(restored[0], weight[0])
    assert torch.equal(restored[2], weight[2])
    assert restored[3].tolist() == pytest.approx(weight[3].tolist(), rel=1e-6)


@both
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_made_one(kind: type[QuantizedLinear], bad: float) -> None:
    weight = normal(3, 100)
    weight[1, 70] = bad
    restored = kind.from_dense(weight).to_dense()
    assert restored[1].isnan().all()
    assert torch.isfinite(restored[[0, 2]]).all()


@both
@given(columns=widths, seed=st.integers(0, 99))
def test_a_restored_weight_is_coded_to_itself(
    kind: type[QuantizedLinear], columns: int, seed: int
) -> None:
    once = kind.from_dense(normal(3, columns, seed))
    twice = kind.from_dense(once.to_dense())
    assert torch.equal(once.codes, twice.codes)
    assert torch.allclose(once.to_dense(), twice.to_dense(), rtol=1e-6, atol=0)


@frozen
@given(rows=st.integers(1, 9), columns=widths, cut=st.integers(0, 9))
def test_codes_of_some_rows_are_those_rows_of_the_codes(
    kind: type[FrozenLinear], rows: int, columns: int, cut: int
) -> None:
    weight = normal(rows, columns)
    layer, part = kind.from_dense(weight), kind.from_dense(weight[cut:])
    for all_rows, some in zip(held(layer), held(part), strict=True):
        assert torch.equal(all_rows[cut:], some)


@both
@pytest.mark.parametrize("chunk", [1, 130, 1000])
def test_chunks_change_nothing(
    kind: type[QuantizedLinear], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = normal(7, 65)
    expected = kind.from_dense(weight)
    monkeypatch.setattr("modicum.linears.frozen.CPU_CHUNK", chunk)
    layer = kind.from_dense(weight)
    assert all(map(torch.equal, held(layer), held(expected)))
    assert torch.equal(layer.to_dense(), expected.to_dense())


@frozen
@given(
    shape=st.lists(st.integers(0, 3), max_size=2),
    columns=widths,
    rows=st.integers(1, 5),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_it_computes_what_the_dense_layer_of_its_weight_does(
    kind: type[FrozenLinear],
    shape: list[int],
    columns: int,
    rows: int,
    bias: bool,
    dtype: torch.dtype,
) -> None:
    offset = torch.linspace(-1, 1, rows) if bias else None
    layer = kind.from_dense(normal(rows, columns), offset)
    weight = layer.to_dense().to(dtype)
    inputs = normal(1, columns)[0].to(dtype).expand(*shape, columns).clone().requires_grad_()
    twin = inputs.detach().clone().requires_grad_()
    outputs = layer(inputs)
    expected = F.linear(twin, weight, None if offset is None else offset.to(dtype))
    assert outputs.dtype == dtype
    assert torch.equal(outputs, expected)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(inputs.grad, twin.grad, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@frozen
def test_a_bias_learns_and_codes_do_not(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(4, 70), torch.zeros(4))
    layer(torch.ones(2, 3, 70)).sum().backward()
    assert layer.bias.grad.tolist() == [6.0] * 4
    assert [p.requires_grad for p in held(layer)] == [False] * len(held(layer))
    assert all(p.grad is None for p in held(layer))


@frozen
def test_autocast_decides_the_dtype_forward_and_backward(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(8, 70), torch.ones(8))
    inputs = normal(5, 70).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = layer(inputs)
    half = layer.to_dense().bfloat16()
    assert torch.equal(outputs, F.linear(inputs.bfloat16(), half, torch.ones(8).bfloat16()))
    outputs.sum().backward()
    expected = torch.ones(5, 8).bfloat16() @ half
    assert inputs.grad.dtype == torch.float32
    assert torch.allclose(inputs.grad, expected.float(), rtol=1e-2, atol=1e-2)


@frozen
def test_nothing_but_codes_is_kept_for_the_backward_pass(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(64, 256))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(5, 256, requires_grad=True))
    assert {t.data_ptr() for t in kept} == {p.data_ptr() for p in held(layer)}


@frozen
def test_recomputed_it_gives_the_same_gradients(kind: type[FrozenLinear]) -> None:
    net = nn.Sequential(kind.from_dense(normal(66, 70)), nn.ReLU(), nn.Linear(66, 2))
    inputs = normal(5, 70)

    def gradients(again: bool) -> list[Tensor]:
        net.zero_grad()
        at = inputs.clone().requires_grad_()
        out = checkpoint(net, at, use_reentrant=False) if again else net(at)
        out.square().sum().backward()
        return [at.grad, net[2].weight.grad]

    assert all(map(torch.equal, gradients(False), gradients(True)))


@frozen
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("aot_eager", marks=pytest.mark.expensive),
        pytest.param("inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_it_gives_the_same_numbers(kind: type[FrozenLinear], backend: str) -> None:
    torch.compiler.reset()
    layer = kind.from_dense(normal(66, 70), torch.ones(66))
    compiled = torch_compiler.compiled(layer, backend=backend, fullgraph=True)
    inputs = normal(5, 70).requires_grad_()
    twin = inputs.detach().clone().requires_grad_()
    outputs, expected = compiled(inputs), layer(twin)
    assert torch.allclose(outputs, expected, rtol=1e-6)
    outputs.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(inputs.grad, twin.grad, rtol=1e-5)
    torch.compiler.reset()


@frozen
def test_on_meta_then_materialised_then_written(kind: type[FrozenLinear]) -> None:
    with on_meta(torch.bfloat16):
        net = nn.Sequential(kind(70, 9), nn.Linear(9, 2))
    assert all(p.is_meta for p in net.parameters())
    assert net(torch.empty(4, 70, device="meta", dtype=torch.bfloat16)).shape == (4, 2)
    materialise(net, "cpu")
    layer = net[0]
    assert [p.dtype for p in held(layer)] == [torch.uint8] * len(held(layer))
    assert layer.bias.dtype == torch.bfloat16
    assert not any(p.requires_grad for p in held(layer))
    before = [p.data_ptr() for p in held(layer)]
    write_weight(layer, normal(9, 70).bfloat16())
    assert torch.equal(full_weight(layer), kind.from_dense(normal(9, 70).bfloat16()).to_dense())
    assert [p.data_ptr() for p in held(layer)] == before


@frozen
def test_casting_the_model_leaves_the_weight_alone(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(9, 200), torch.ones(9))
    before = full_weight(layer)
    layer.to(torch.bfloat16)
    assert layer.bias.dtype == torch.bfloat16
    assert torch.equal(full_weight(layer), before)
    assert layer(torch.ones(1, 200, dtype=torch.bfloat16)).dtype == torch.bfloat16


@both
def test_its_state_is_its_codes(kind: type[QuantizedLinear]) -> None:
    layer = kind.from_dense(normal(9, 200), torch.ones(9))
    state = layer.state_dict()
    assert sorted(state) == ["bias", "codes", "ranges", "scales"]
    other = kind(200, 9)
    other.load_state_dict(state)
    assert torch.equal(full_weight(other), full_weight(layer))


@frozen
def test_only_a_weight_of_its_shape_can_be_written(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(3, 70))
    with pytest.raises(InputError, match=r"weight: .*\[3, 70\]"):
        write_weight(layer, normal(1, 70))


@frozen
def test_the_form_says_what_it_is(kind: type[FrozenLinear]) -> None:
    layer = kind.from_dense(normal(3, 70))
    form = form_of(layer)
    assert form is linear_form(kind.form)
    assert (form.exact, form.trains) == (False, False)
    assert list(frozen_linears(nn.Sequential(nn.Linear(2, 2), layer))) == ["1"]
    assert own_rows(layer) == (3, 0)
    assert repr(layer) == f"{kind.__name__}(in_features=70, out_features=3, bias=False)"


def peak_bytes(kind: type[FrozenLinear], shape: tuple[int, int], dtype: torch.dtype) -> int:
    layer = kind.from_dense(normal(*shape))
    inputs = torch.ones(1, shape[1], dtype=dtype)
    layer(inputs)  # tables are made once
    with TensorMeter("cpu") as meter:
        layer(inputs)
    return meter.peak or 0


@frozen
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(60, 120), (3000, 600)])
def test_the_workspace_is_what_the_meter_sees(
    kind: type[FrozenLinear], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    stated = linear_form(kind.form).workspace(shape[1], shape[0], dtype.itemsize)
    scratch = product_scratch(1, shape[1], shape[0], half=dtype == torch.bfloat16).forward
    expected = max(stated, shape[0] * shape[1] * dtype.itemsize + scratch)
    assert peak_bytes(kind, shape, dtype) == pytest.approx(expected, rel=0.03)


def test_on_a_gpu_the_workspace_is_that_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    nf4, dense = linear_form("nf4").workspace, 600 * 130 * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nf4(130, 600, 2, "cuda") == dense + 4 * 600 * 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("modicum.linears.quantized._has_triton", lambda: False)
    assert nf4(130, 600, 2, "cuda") == dense + 600 * (4 * 130 + 4 * 65)


class Net(nn.Module):
    """A frozen layer between trained ones, with a number of rows that no number of ranks fits."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.first = nn.Linear(5, 70)
        self.coded = linear_form(form).make(70, 7, True)
        self.last = nn.Linear(7, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.coded(self.first(inputs)).relu())


def started(form: str) -> Net:
    torch.manual_seed(0)
    net = Net(form)
    write_weight(net.coded, normal(7, 70))
    nn.init.normal_(net.coded.bias)
    return net


def gradients(net: nn.Module) -> dict[str, Tensor]:
    net(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
    return {n: whole(p.grad).clone() for n, p in net.named_parameters() if p.grad is not None}


def cut_over_ranks(ranks: Ranks, form: str) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    net = started(form)
    parts = {n: (p.shape[0], p.detach().clone()) for n, p in net.coded.named_parameters()}
    fully_shard(net.coded)
    fully_shard(net)
    for name, (_, all_rows) in parts.items():
        part, before = own_part(net.coded.get_parameter(name).detach())
        assert torch.equal(part, all_rows[before : before + len(part)])
    made, dense = gradients(net), whole(full_weight(net.coded))
    for module in (net.coded, net):
        module.reshard()
    rows, before = own_rows(net.coded)
    write_weight(net.coded, normal(7, 70, seed=5)[before : before + rows])
    return {"gradients": made, "dense": dense, "written": whole(full_weight(net.coded))}


@pytest.mark.ranks
@pytest.mark.parametrize(("form", "ranks"), [("nf4", 2), ("int8", 2), ("fp16", 2), ("nf4", 4)])
def test_ranks_that_hold_rows_compute_what_one_process_does(
    pool: Pool, form: str, ranks: int
) -> None:
    net = started(form)
    expected, dense = gradients(net), full_weight(net.coded)
    for result in pool.run(cut_over_ranks, form, ranks=ranks):
        assert torch.equal(result["dense"], dense)
        assert torch.equal(result["written"], linear_form(form).round_trip(normal(7, 70, seed=5)))
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in result["gradients"].items():  # FSDP2's own mean of equal ones
            assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7)


def under_ddp(ranks: Ranks, form: str) -> dict[str, Tensor]:
    from torch.nn.parallel import DistributedDataParallel

    net = started(form)
    if not ranks.first:
        write_weight(net.coded, torch.zeros(7, 70))  # rank 0's are sent
    made = gradients(DistributedDataParallel(net))
    return {name.removeprefix("module."): value for name, value in made.items()}


@pytest.mark.ranks
def test_torchs_data_parallel_takes_it(pool: Pool) -> None:
    expected = gradients(started("nf4"))
    for result in pool.run(under_ddp, "nf4"):
        assert result.keys() == expected.keys()
        assert all(torch.allclose(result[name], expected[name]) for name in expected)
