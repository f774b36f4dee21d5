"""The low-rank form, alone and cut over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pool import Pool
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import form_of, full_weight, linear_form, write_weight
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part, whole
from modicum.linears import LowRankLinear, make_linear
from modicum.parallel.sharded import Sharded


def layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> LowRankLinear:
    made = LowRankLinear(7, 5, bias, dtype=dtype, rank=3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


@given(st.integers(1, 9), st.integers(1, 9), st.booleans(), st.integers(1, 4))
def test_it_is_the_linear_map_of_its_product(ins: int, outs: int, bias: bool, rank: int) -> None:
    weight = torch.randn(outs, ins, generator=torch.Generator().manual_seed(ins + 10 * outs))
    offset = torch.ones(outs) if bias else None
    if rank > min(ins, outs):
        with pytest.raises(
            InputError, match=f"rank: no weight of this shape.*at most {min(ins, outs)}"
        ):
            LowRankLinear.from_dense(weight, offset, rank=rank)
        return
    made = LowRankLinear.from_dense(weight, offset, rank=rank)
    for shape in ((ins,), (4, ins), (2, 3, ins), (0, ins)):
        x = torch.ones(shape)
        expected = nn.functional.linear(x, full_weight(made), offset)
        assert torch.allclose(made(x), expected, atol=1e-5)
    if rank == min(ins, outs):
        assert torch.allclose(full_weight(made), weight, atol=1e-5)
    assert made.rank == rank
    assert sum(p.numel() for p in made.parameters()) == rank * (ins + outs) + bias * outs


def test_without_a_rank_it_has_half_the_elements() -> None:
    made = make_linear("low_rank", 12, 12, bias=True, dtype=torch.bfloat16)
    assert isinstance(made, LowRankLinear)
    assert (made.rank, made.down.shape, made.up.shape) == (3, (3, 12), (12, 3))
    assert made.down.dtype == made.bias.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert linear_form("low_rank").from_dense(torch.eye(12), None).rank == 3
    form = linear_form("low_rank")
    real = sum(p.numel() * p.element_size() for p in made.parameters())
    assert form.weight_bytes(12, 12, True, 2) == real
    assert repr(made) == "LowRankLinear(in_features=12, out_features=12, rank=3, bias=True)"


def test_the_form_is_known_and_takes_no_other_weight() -> None:
    form = form_of(layer())
    assert form is linear_form("low_rank")
    assert form.trains
    assert not form.exact
    with pytest.raises(InputError, match="no other weight"):
        write_weight(layer(), torch.ones(5, 7))


def test_low_precision_multiplies_wide_and_rounds_once() -> None:
    made = layer(torch.bfloat16)
    product = made.up.float() @ made.down.float()
    assert torch.equal(made.to_dense(), product.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer()(torch.ones(2, 7)).dtype == torch.bfloat16


def test_gradients_are_those_of_the_function() -> None:
    made = layer(torch.float64)
    inputs = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)

    def output(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(dict(made.named_parameters()), values, strict=True))
        return torch.func.functional_call(made, named, (x,))

    assert torch.autograd.gradcheck(output, (inputs, *made.parameters()))


def test_it_is_built_without_memory() -> None:
    with on_meta(torch.bfloat16):
        made = LowRankLinear(7, 5, rank=3)
    assert made.up.is_meta
    materialise(made, "cpu")
    made.load_state_dict(layer().state_dict())
    assert torch.equal(made.up, layer().up.bfloat16())


def cut_over_ranks(ranks: Ranks) -> dict[str, Tensor]:
    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), reshard_after_forward=True)
    with on_meta():
        model = nn.Sequential(LowRankLinear(7, 5, rank=3), nn.Tanh(), LowRankLinear(5, 4, rank=1))
    strategy.cut(model, [model[0], model[2]], torch.device("cpu"))
    materialise(model, "cpu")
    full = _filled()
    with torch.no_grad():
        for (_, mine), (_, theirs) in zip(
            model.named_parameters(), full.named_parameters(), strict=True
        ):
            part, before = own_part(mine)
            part.copy_(theirs[before : before + part.shape[0]])
    strategy.start(model)
    dense = {name: whole(full_weight(model.get_submodule(name)).detach()) for name in "02"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        strategy.before_backward(last=True)
        model(x.chunk(ranks.size)[ranks.rank]).square().sum().backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad()
    strategy.rest(model)
    named = {name: whole(p.detach()) for name, p in model.named_parameters()}
    return named | {f"dense {name}": weight for name, weight in dense.items()}


def _filled() -> nn.Sequential:
    model = nn.Sequential(LowRankLinear(7, 5, rank=3), nn.Tanh(), LowRankLinear(5, 4, rank=1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.ranks
def test_cut_over_ranks_it_learns_what_one_process_learns(pool: Pool) -> None:
    """With rank 1 and two ranks, one of them holds no row of `down`."""
    alone = _filled()
    expected = {f"dense {name}": full_weight(alone.get_submodule(name)).detach() for name in "02"}
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    for step in range(3):
        x = torch.randn(6, 7, generator=torch.Generator().manual_seed(step))
        alone(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected |= {name: p.detach() for name, p in alone.named_parameters()}
    for found in pool.run(cut_over_ranks, ranks=2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-5), name
