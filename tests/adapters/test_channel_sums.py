"""Low-rank updates between sums of channels and copies of them, in the fused operation."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.adapters.test_fused import FORMS, bf16, layer
from torch import Tensor, nn

from modicum.adapters import BlockLoRA, QBaRA
from modicum.adapters.base import Adapter
from modicum.adapters.channel_sums import ChannelSums
from modicum.adapters.fused import Maps, low_rank, plus_low_rank
from modicum.adapters.lora import LoRA
from modicum.core.errors import InputError
from modicum.core.layers.frozen_product import frozen_product
from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import numbers

IN, OUT, SCALE = 60, 5, 1.5
MAPS: list[Maps] = [
    (ChannelSums(3), None),
    (ChannelSums(4, adjacent=False), None),
    (None, ChannelSums(5)),
    (ChannelSums(2), ChannelSums(5, adjacent=False)),
]


def factors(maps: Maps, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    before, after = (1 if each is None else each.parts for each in maps)
    made = numbers(2, IN // before, name="A"), numbers(OUT // after, 2, name="B")
    return tuple(value.to(dtype).requires_grad_(True) for value in made)  # type: ignore[return-value]


def composed(x: Tensor, base: Any, a: Tensor, b: Tensor, dropout: float, maps: Maps) -> Tensor:
    """The definition, by dense matrices of the maps."""
    before, after = maps
    seen = F.dropout(x, dropout)
    seen = seen if before is None else seen @ matrix(before, IN).T.to(seen.dtype)
    update = F.linear(F.linear(seen, a.to(seen.dtype)), b.to(seen.dtype))
    return base(x) + SCALE * (update if after is None else update @ matrix(after, OUT).to(seen))


def matrix(sums: ChannelSums, width: int) -> Tensor:
    """S [width / parts, width]."""
    found = torch.zeros(width // sums.parts, width)
    for channel in range(width):
        inner = channel // sums.parts if sums.adjacent else channel % (width // sums.parts)
        found[inner, channel] = 1
    return found


@pytest.mark.parametrize("adjacent", [True, False])
def test_sums_and_copies_are_a_map_and_its_transpose(adjacent: bool) -> None:
    sums, x, thin = ChannelSums(3, adjacent), numbers(2, 12), numbers(2, 4, name="thin")
    torch.testing.assert_close(sums.sums(x), x @ matrix(sums, 12).T)
    torch.testing.assert_close(sums.copies(thin), thin @ matrix(sums, 12))
    expected = x + 0.5 * sums.copies(thin)
    torch.testing.assert_close(sums.add_copies(x.clone(), thin, 0.5), expected)


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("around", [contextlib.nullcontext, bf16])
def test_fused_equals_the_definition(maps: Maps, form: str, dropout: float, around: Any) -> None:
    base = layer(form, IN)
    product = frozen_product(base)
    assert product is not None
    found = []
    for run in ("fused", "apart", "composed"):
        x, (a, b) = numbers(2, 9, IN).requires_grad_(True), factors(maps)
        torch.manual_seed(3)
        with around():
            if run == "composed":
                output = composed(x, base, a, b, dropout, maps)
            elif run == "fused":
                output = low_rank(x, product, a, b, SCALE, dropout, maps)
            else:
                output = base(x) + low_rank(x, None, a, b, SCALE, dropout, maps)
        (output.float() * numbers(2, 9, OUT, name="up")).sum().backward()
        found.append((output.detach().float(), x.grad, a.grad, b.grad))
    exact = around is contextlib.nullcontext
    for one in found[:2]:
        for mine, other in zip(one, found[2], strict=True):
            assert mine is not None
            assert other is not None
            close = 1e-5 if exact else 0.03
            torch.testing.assert_close(
                mine, other, rtol=close, atol=close * other.abs().max().item()
            )


@pytest.mark.parametrize("maps", MAPS[:1] + MAPS[3:])
def test_what_is_kept(maps: Maps) -> None:
    """The sums once for two layers of one input; with dropout x, which others may keep too."""
    rows, base, (a, b) = 16, layer("dense", IN), factors(maps)
    product, before = frozen_product(base), maps[0]
    assert product is not None
    assert before is not None
    x, thin = numbers(rows, IN).requires_grad_(True), 2 * rows
    for frozen, dropout, kept in (
        (False, 0.0, 4 * rows * IN // before.parts + 2 * 4 * thin),
        (False, 0.3, 4 * rows * IN + 2 * (4 * thin + rows * IN // 8)),
        (True, 0.0, 2 * 4 * thin),
    ):
        a.requires_grad_(not frozen)
        with saved_bytes([*base.parameters(), a, b]) as saved:
            outputs = [low_rank(x, product, a, b, SCALE, dropout, maps) for _ in range(2)]
        assert saved.total == kept
        del outputs


def test_sums_are_made_anew_where_the_input_is_another() -> None:
    sums, x = ChannelSums(2), numbers(3, 4).requires_grad_(True)
    first = sums.once(x)
    assert sums.once(x) is first
    assert ChannelSums(2, adjacent=False).once(x) is not first
    with torch.no_grad():
        assert not sums.once(x).requires_grad
        x.add_(1.0)
    again = sums.once(x)
    assert again is not first
    torch.testing.assert_close(again, sums.sums(x))
    assert sums.once(x.detach()) is not again


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_it_can_be_differentiated_twice(maps: Maps, dropout: float) -> None:
    def seconds(run: Any) -> Tensor:
        x = numbers(4, IN, dtype=torch.float64).requires_grad_(True)
        base, (a, b) = layer("dense", IN, dtype=torch.float64), factors(maps, torch.float64)
        torch.manual_seed(3)
        output = run(x, base, a, b)
        first = torch.autograd.grad(output.square().sum(), (x, a, b), create_graph=True)
        again = torch.autograd.grad(sum(g.square().sum() for g in first), (x, a, b))
        return torch.cat([g.flatten() for g in again])

    ours = seconds(
        lambda x, base, a, b: low_rank(x, frozen_product(base), a, b, SCALE, dropout, maps)
    )
    torch.testing.assert_close(ours, seconds(lambda *given: composed(*given, dropout, maps)))


@pytest.mark.parametrize("maps", MAPS)
def test_under_transforms_and_on_an_adapted_layer(maps: Maps) -> None:
    model = nn.Sequential(layer("dense", IN))
    LoRA(rank=1).attach(model)
    base, x, (a, b) = model[0].plain, numbers(3, IN), factors(maps)
    expected = composed(x, base, a, b, 0.0, maps)

    def output(inputs: Tensor) -> Tensor:
        return plus_low_rank(inputs, base, a, b, SCALE, 0.0, maps)

    torch.testing.assert_close(output(x), expected)
    torch.testing.assert_close(torch.func.vmap(output)(x), expected)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("value", [QBaRA(rank=2), BlockLoRA(rank=2, structure="fold")])
def test_on_a_quantized_base_it_learns_and_merges_into_dense(form: str, value: Adapter) -> None:
    model = nn.Sequential(linear_form(form).from_dense(numbers(8, IN, name="W"), None))
    adapter = value.with_fields(targets=("0",), dropout=0.0).attach(model)
    assert adapter.instead == {}
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=3e-2)
    x, targets, losses = numbers(16, IN), numbers(16, 8, name="targets"), []
    for _ in range(20):
        loss = (model(x) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    expected = model.eval()(x)
    with pytest.raises(InputError, match="dense"):
        adapter.merge()
    adapter.merge(dense=torch.float32)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
