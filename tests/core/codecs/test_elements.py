"""Codecs: exact bytes, exact order, unbiased rounding, and transforms that undo themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modicum.core.codecs.elements import (
    Cast,
    GroupQuantizer,
    Stream,
    add_uniforms,
    codec,
    drawing_bytes,
    hadamard,
    pack,
    padded,
    transforming_bytes,
    unpack,
)
from modicum.core.machine.memory import TensorMeter
from modicum.core.random import key, mixed

QUANTIZERS = st.builds(
    GroupQuantizer, bits=st.sampled_from([4, 8]), group=st.sampled_from([2, 32, 128])
)
ROWS = st.tuples(st.integers(1, 3), st.integers(1, 300))


def numbers(count: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(count, 1, generator=generator) * 10
    return torch.randn(count, width, generator=generator) * size


def scales(rows: Tensor, quantizer: GroupQuantizer) -> Tensor:
    """The scale of each element's group, laid out as the rows."""
    groups = padded(rows, quantizer.group).view(len(rows), -1, quantizer.group)
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).flatten(1)
    return largest[:, : rows.shape[1]] / quantizer.levels


@given(quantizer=QUANTIZERS, shape=ROWS)
def test_messages_have_the_bytes_of_the_formula(
    quantizer: GroupQuantizer, shape: tuple[int, int]
) -> None:
    message = quantizer.encode(numbers(*shape), Stream())
    groups = math.ceil(shape[1] / quantizer.group)
    assert message.dtype == torch.uint8
    assert message.shape == (shape[0], groups * (4 + quantizer.group * quantizer.bits // 8))
    assert message.shape[1] == quantizer.nbytes(shape[1])


@given(quantizer=QUANTIZERS, shape=ROWS, step=st.integers(0, 5))
def test_no_element_is_off_by_a_level(
    quantizer: GroupQuantizer, shape: tuple[int, int], step: int
) -> None:
    rows = numbers(*shape)
    decoded = quantizer.decode(quantizer.encode(rows, Stream(step=step)), shape[1])
    assert decoded.shape == rows.shape
    assert ((decoded - rows).abs() <= scales(rows, quantizer) * (1 + 1e-4)).all()


@given(quantizer=QUANTIZERS, shape=ROWS)
def test_a_row_is_decoded_alone(quantizer: GroupQuantizer, shape: tuple[int, int]) -> None:
    message = quantizer.encode(numbers(*shape), Stream())
    together = quantizer.decode(message, shape[1])
    for row, alone in zip(together, message, strict=True):
        assert torch.equal(row, quantizer.decode(alone[None], shape[1])[0])


@pytest.mark.parametrize("bits_", [4, 8])
def test_rounding_is_unbiased(bits_: int) -> None:
    quantizer, draws = GroupQuantizer(bits_, 32), 10_000
    rows = numbers(1, 32)
    many = quantizer.decode(
        quantizer.encode(rows.expand(draws, -1).contiguous(), Stream(seed=5)), 32
    ).double()
    error = (many.mean(0) - rows[0].double()).abs()
    standard_error = many.std(0) / math.sqrt(draws)
    # What lies on a level is never rounded, but divided and multiplied.
    assert (error <= 4 * standard_error + 1e-6 * rows.abs().max()).all()
    assert (standard_error > 0).sum() >= 30


@pytest.mark.parametrize("bits_", [4, 8])
def test_levels_and_zeros_stay_exactly(bits_: int) -> None:
    quantizer = GroupQuantizer(bits_, 64)
    levels = torch.arange(-quantizer.levels, quantizer.levels + 1.0)[None] * 0.5
    whole = padded(levels, 64)[:, :64]
    whole[0, 0] = -0.5 * quantizer.levels
    assert torch.equal(quantizer.decode(quantizer.encode(whole, Stream()), 64), whole)
    zeros = torch.zeros(2, 70)
    assert torch.equal(quantizer.decode(quantizer.encode(zeros, Stream()), 70), zeros)


@pytest.mark.parametrize("tiny", [1e-45, 1e-38])
def test_numbers_too_small_for_a_scale_are_rounded_to_nothing_much(tiny: float) -> None:
    rows = torch.full((1, 32), tiny)
    decoded = GroupQuantizer(4, 32).decode(GroupQuantizer(4, 32).encode(rows, Stream()), 32)
    assert decoded.isfinite().all()
    assert decoded.abs().max() <= 2 * tiny


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_by_who_decodes(bad: float) -> None:
    rows = numbers(2, 96)
    rows[1, 40] = bad
    quantizer = GroupQuantizer(4, 32)
    decoded = quantizer.decode(quantizer.encode(rows, Stream()), 96)
    assert not decoded[1, 32:64].isfinite().all()
    assert decoded[0].isfinite().all()
    assert decoded[1, :32].isfinite().all()
    assert decoded[1, 64:].isfinite().all()


def test_draws_are_a_function_of_seed_step_and_name() -> None:
    rows, quantizer = numbers(2, 256), GroupQuantizer(4, 32)
    message = quantizer.encode(rows, Stream(1, 2, "a"))
    assert torch.equal(message, quantizer.encode(rows, Stream(1, 2, "a")))
    for other in (Stream(2, 2, "a"), Stream(1, 3, "a"), Stream(1, 2, "b")):
        assert not torch.equal(message, quantizer.encode(rows, other))


def test_draws_are_quarters_of_mixed_words() -> None:
    values = torch.zeros(37)
    add_uniforms(values, Stream(seed=3, step=1, name="x"))
    words = mixed(0, 10, key(3, "x", 1))
    quarters = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], 1).flatten()[:37]
    signed = torch.where(quarters >= 1 << 15, quarters - (1 << 16), quarters)
    assert torch.equal(values, (signed.double() * 2.0**-16 + 0.5 + 2.0**-17).float())


def test_draws_are_uniform_and_neighbours_are_independent() -> None:
    draws = torch.zeros(1 << 20)
    add_uniforms(draws, Stream(seed=5))
    counts = torch.histc(draws, 256, 0, 1)
    expected = len(draws) / 256
    assert ((counts - expected).square() / expected).sum() < 255 + 6 * math.sqrt(2 * 255)
    other = torch.zeros_like(draws)
    add_uniforms(other, Stream(seed=6))
    for one, two in ((draws[:-1], draws[1:]), (draws[:-4], draws[4:]), (draws, other)):
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 6 / math.sqrt(len(one))


def test_draws_do_not_depend_on_how_much_is_drawn_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, pieces = torch.zeros(1000), torch.zeros(1000)
    add_uniforms(whole, Stream(name="x"))
    monkeypatch.setattr("modicum.core.codecs.elements._CHUNK", 16)
    add_uniforms(pieces, Stream(name="x"))
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("elements", [64, 4000, 300_000, 1 << 20])
def test_the_scratch_of_coding_is_what_the_meter_sees(elements: int) -> None:
    rows = torch.zeros(1, elements - elements % 32)
    with TensorMeter("cpu") as drawing:
        add_uniforms(rows, Stream())
    with TensorMeter("cpu") as transforming:
        hadamard(rows)
    count = rows.numel()
    assert drawing.peak == pytest.approx(drawing_bytes(count), abs=128)
    # PyTorch transposes by way of a tile of 60 x 60 numbers.
    made = rows.nbytes + transforming_bytes(count)
    assert made - 128 <= transforming.peak <= made + 4 * 60 * 60 + 128


@given(st.lists(st.integers(-8, 7), min_size=2, max_size=40).filter(lambda c: len(c) % 2 == 0))
def test_two_codes_to_a_byte(codes: list[int]) -> None:
    tensor = torch.tensor([codes, codes[::-1]], dtype=torch.int8)
    assert pack(tensor).shape == (2, len(codes) // 2)
    assert torch.equal(unpack(pack(tensor)), tensor)


def test_hadamard_is_the_matrix_and_its_own_inverse() -> None:
    matrix = torch.ones(1, 1)
    for _ in range(5):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rows = numbers(3, 96)
    expected = (rows.view(-1, 32) @ matrix).view(3, 96)
    torch.testing.assert_close(hadamard(rows), expected, rtol=1e-5, atol=1e-5)
    rounding = 3e-7 * float(rows.abs().max())
    torch.testing.assert_close(hadamard(hadamard(rows)) / 32, rows, rtol=1e-6, atol=rounding)
    whole = torch.randint(-9, 9, (2, 64)).float()
    assert torch.equal(hadamard(hadamard(whole)) / 32, whole)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9])
def test_the_transform_does_not_depend_on_how_much_is_made_at_a_time(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbers(2, 32 * count)
    at_once, across = hadamard(rows), hadamard(rows.t().contiguous().t())
    monkeypatch.setattr("modicum.core.codecs.elements._BLOCKS", 4)
    assert torch.equal(hadamard(rows), at_once)
    assert torch.equal(across, at_once)


def test_sums_commute_with_the_transform() -> None:
    one, other = numbers(1, 64), numbers(1, 64, seed=1)
    together = hadamard(hadamard(one) + hadamard(other)) / 32
    apart = hadamard(hadamard(one)) / 32 + hadamard(hadamard(other)) / 32
    rounding = 3e-7 * float(together.abs().max())
    torch.testing.assert_close(together, apart, rtol=1e-6, atol=rounding)


def test_the_transform_spreads_outliers() -> None:
    """The expected table: relative error of 4 bits, with rare outliers twenty times as large."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 1 << 17, generator=generator)
    rows[torch.rand(rows.shape, generator=generator) < 1e-3] *= 20
    found = {}
    for group in (128, 2048):
        quantizer = GroupQuantizer(4, group)
        direct = quantizer.decode(quantizer.encode(rows, Stream()), rows.shape[1])
        coded = quantizer.encode(hadamard(rows), Stream())
        turned = hadamard(quantizer.decode(coded, rows.shape[1])) / 32
        found[group] = tuple(float((x - rows).norm() / rows.norm()) for x in (direct, turned))
    assert 0.3 < found[128][0] < 0.45
    assert 0.14 < found[128][1] < 0.19
    assert found[2048][0] > 0.9
    assert found[2048][1] < 0.4


def test_the_codec_of_so_many_bits() -> None:
    rows = numbers(2, 50)
    assert torch.equal(codec(32, 128).decode(codec(32, 128).encode(rows, Stream()), 50), rows)
    assert torch.equal(
        codec(16, 128).decode(codec(16, 128).encode(rows, Stream()), 50), rows.bfloat16().float()
    )
    assert (codec(32, 128).nbytes(50), codec(16, 128).nbytes(50)) == (200, 100)
    assert codec(16, 128) == Cast(16)
    # Four bits and a scale for each 2048 elements; eight bits and one for each 128.
    assert codec(4, 2048).nbytes(1 << 20) * 8 / (1 << 20) == 4 + 32 / 2048
    assert codec(8, 128).nbytes(1 << 20) * 8 / (1 << 20) == 8.25
    assert codec(4, 128).nbytes(1 << 20) * 8 / (1 << 20) == 4.25
