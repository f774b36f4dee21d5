"""8-bit moments: the map, the blocks, and how near they come."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from modicum.core.random import normal_
from modicum.optim import quantized
from modicum.optim.quantized import (
    BLOCK,
    CHUNK,
    dequantize,
    dynamic_map,
    lookup,
    nearest,
    quantize_,
    scales,
)


def stored(values: Tensor, signed: bool = True) -> tuple[Tensor, Tensor]:
    codes = torch.empty(values.shape, dtype=torch.uint8)
    scale = torch.empty(scales(values.numel()))
    quantize_(codes, scale, values, signed=signed)
    return codes, scale


@pytest.mark.parametrize("signed", [True, False])
def test_the_map_is_that_of_the_paper(signed: bool) -> None:
    values = dynamic_map(signed)
    assert len(values) == len(values.unique()) == 256
    assert torch.equal(values, values.sort().values)
    assert (values[-1], 0.0 in values) == (1.0, True)
    # Every power of ten has twice the fractions of the one below, in the middle of even steps.
    positive = values[values > 0][:-1]
    counts = [
        int(((positive >= 10.0**e) & (positive < 10.0 ** (e + 1))).sum()) for e in range(-7, 0)
    ]
    assert counts == [(1 if signed else 2) * 2**place for place in range(7)]
    assert positive[-1] == pytest.approx(1 - 0.9 / (64 if signed else 128) / 2, abs=1e-6)
    assert (values < 0).sum() == (127 if signed else 0)


@given(st.integers(1, 3 * BLOCK), st.integers(0, 99), st.booleans(), st.floats(1e-20, 1e20))
def test_values_come_back_to_half_a_step(
    elements: int, seed: int, signed: bool, size: float
) -> None:
    values = normal_(torch.empty(elements), seed=seed, name="values") * size
    values = values if signed else values.abs()
    codes, scale = stored(values, signed)
    found = dequantize(codes, scale, signed=signed)
    table = dynamic_map(signed)
    for block, (part, back) in enumerate(zip(values.split(BLOCK), found.split(BLOCK), strict=True)):
        largest = part.abs().max()
        assert scale[block] == largest
        nearest = (part[:, None] / largest - table).abs().amin(dim=1)
        torch.testing.assert_close((part - back).abs() / largest, nearest, rtol=1e-4, atol=1e-6)


def test_zeros_stay_zeros_and_the_largest_stays() -> None:
    values = torch.zeros(4, BLOCK)
    values[1, 3], values[2] = 7.5, torch.linspace(0, 1, BLOCK)
    found = dequantize(*stored(values), signed=True)
    assert torch.equal(found[[0, 3]], torch.zeros(2, BLOCK))
    assert (found[1, 3], found[2, -1]) == (7.5, 1.0)


def test_chunks_are_no_seams() -> None:
    values = normal_(torch.empty(CHUNK + 3 * BLOCK + 5), seed=0, name="values")
    codes, scale = stored(values)
    for start in (0, CHUNK - BLOCK, CHUNK, CHUNK + 3 * BLOCK):
        part = values[start : start + BLOCK]
        again, largest = stored(part)
        assert torch.equal(codes[start : start + BLOCK], again)
        assert torch.equal(scale[start // BLOCK : start // BLOCK + 1], largest)
    found = dequantize(codes, scale, signed=True)
    assert (found - values).abs().max() <= 0.5 * 0.9 / 64 * values.abs().max()


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search(signed: bool) -> None:
    values, borders = lookup(signed, torch.device("cpu"))
    wide = normal_(torch.empty(20_000), seed=0, name="values")
    near = torch.cat([borders.nextafter(torch.tensor(end)) for end in (-2.0, 2.0)])
    for tried in (values, borders, near, wide.clamp(-1, 1), wide.clamp(-1, 1) * 1e-6):
        tried = tried if signed else tried.abs()
        assert torch.equal(nearest(tried, signed=signed), torch.bucketize(tried, borders).int())


def test_without_a_sign_a_block_of_zeros_alone_becomes_zero() -> None:
    values = torch.zeros(2, BLOCK)
    values[0, 0], values[0, 1] = 1.0, 1e-12
    found = dequantize(*stored(values, signed=False), signed=False)
    assert bool((found[0] > 0).all())
    assert torch.equal(found[1], values[1])


@pytest.mark.parametrize("signed", [True, False])
def test_a_default_device_changes_nothing(signed: bool) -> None:
    values = normal_(torch.empty(3 * BLOCK), seed=0, name="values")
    values = values if signed else values.abs()
    expected = stored(values, signed)
    back = dequantize(*expected, signed=signed)
    dynamic_map.cache_clear()
    lookup.cache_clear()
    quantized._first_codes.cache_clear()
    codes, scale = (torch.zeros_like(tensor) for tensor in expected)
    with torch.device("meta"):
        quantize_(codes, scale, values, signed=signed)
        found = dequantize(codes, scale, signed=signed)
    assert torch.equal(codes, expected[0])
    assert torch.equal(scale, expected[1])
    assert torch.equal(found, back)
