from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.codecs.error_bounded import CompressedTensor, is_dense
from modicum.core.errors import InputError
from modicum.core.random import normal_

CODEC = DualQuantization()
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (1,), (65,), (3, 70), (2, 3, 5), (2, 3, 7, 9), (1, 1, 300, 700), (3, 0, 2)]


def numbers(*shape: int, name: str = "a") -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


def assert_bounded(
    tensor: Tensor, bound: float, codec: DualQuantization = CODEC
) -> CompressedTensor:
    """The record, after everything that is promised of it was looked at."""
    record = codec.compress(tensor, bound)
    restored = codec.decompress(record)
    assert (restored.shape, restored.dtype) == (tensor.shape, tensor.dtype)
    if is_dense(tensor.shape, tensor.stride()):
        assert restored.stride() == tensor.stride()
    there = tensor.isfinite()
    error = (tensor.double() - restored.double())[there].abs()
    assert bool((error <= bound * (1 + 1e-6)).all())
    assert torch.equal(restored[~there].view(-1).isnan(), tensor[~there].view(-1).isnan())
    assert torch.equal(restored[tensor.isinf()], tensor[tensor.isinf()])
    assert torch.equal(restored == 0, tensor == 0)
    assert torch.equal(restored > 0, tensor > 0)
    assert torch.equal(codec.nonzero(record), tensor != 0)
    held = [part for piece in record.pieces for part in piece.parts.values()]
    assert record.nbytes == sum(len(bytes(p.view(torch.uint8).numpy().data)) for p in held)
    assert record.nbytes <= tensor.numel() * tensor.element_size()
    again = codec.decompress(record)
    assert again.stride() == restored.stride()
    assert torch.equal(again.nan_to_num(7.0), restored.nan_to_num(7.0))
    return record


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bound_holds_for_any_shape_and_dtype(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = numbers(*shape).to(dtype)
    for values in (tensor, tensor.relu()):
        for bound in (1e-3, 0.1, 3.0):
            assert_bounded(values, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_constants_huge_ranges_and_denormals(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    exponents = torch.linspace(-1, 1, 999) * min(37.0, torch.tensor(limits.max).log10().item())
    huge = (10.0**exponents * numbers(999).sign()).to(dtype)
    # fp16's smallest number is 6e-8, and its largest 65504: a scale of 1e-42 is a denormal's in
    # fp32 and bf16, and 0 in fp16.
    denormal = (numbers(500) * 40 * limits.smallest_normal / 100).to(dtype)
    for tensor in (torch.full((200,), 0.5), torch.full((200,), -1000.0), torch.zeros(200)):
        assert_bounded(tensor.to(dtype), 0.25)
        assert_bounded(tensor.to(dtype), 1e-4)
    for bound in (1e-42, 1e-30, 1e-3, 1.0, 1e30):
        assert_bounded(huge, bound)
        assert_bounded(denormal, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_no_number_is_kept_as_it_is(dtype: torch.dtype) -> None:
    tensor = numbers(4, 100).to(dtype)
    tensor[0, 3], tensor[1, 99], tensor[2, 0] = torch.nan, torch.inf, -torch.inf
    record = assert_bounded(tensor, 0.5)
    assert sum(len(piece.parts["places"]) for piece in record.pieces) == 3
    assert assert_bounded(torch.full((70,), torch.nan, dtype=dtype), 0.5).pieces[0].coding == "raw"


FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 1e-45, 3e38])


@given(
    st.lists(FLOATS, max_size=150),
    st.floats(1e-38, 1e30),
    st.sampled_from(DTYPES),
    st.integers(1, 7),
)
def test_the_bound_holds_whatever_the_numbers(
    values: list[float], bound: float, dtype: torch.dtype, width: int
) -> None:
    tensor = torch.tensor(values, dtype=torch.float32).to(dtype)
    rows = len(values) // width
    assert_bounded(tensor[: rows * width].view(rows, width), bound)


@given(st.integers(0, 2**31), st.floats(-6, 2), st.booleans(), st.sampled_from(["bits", "zlib"]))
def test_the_bound_holds_of_what_looks_like_activations(
    seed: int, exponent: float, after_relu: bool, entropy: str
) -> None:
    tensor = normal_(torch.empty(2, 3, 8, 9), seed=seed, name="a")
    tensor = tensor.relu() if after_relu else tensor.cumsum(-1)
    assert_bounded(tensor, 10.0**exponent, DualQuantization(entropy=entropy))


def test_strides_come_back() -> None:
    image = numbers(2, 5, 7, 6)
    record = assert_bounded(image.to(memory_format=torch.channels_last), 0.1)
    assert CODEC.decompress(record).is_contiguous(memory_format=torch.channels_last)
    assert_bounded(image.permute(3, 1, 0, 2), 0.1)
    apart = CODEC.decompress(CODEC.compress(image[:, ::2], 0.1))
    assert apart.is_contiguous()
    assert (apart - image[:, ::2]).abs().max() <= 0.1
    wide = numbers(5, 1).expand(5, 4)
    assert (CODEC.decompress(CODEC.compress(wide, 0.1)) - wide).abs().max() <= 0.1


def test_the_smallest_coding_is_taken() -> None:
    ramp = torch.arange(64.0)
    plane = (ramp[:, None] + 3 * ramp).expand(4, 2, 64, 64).contiguous()
    noise = numbers(4, 2, 64, 64)
    cases = {
        "sparse": noise.relu(),
        "dense": noise,
        "plane": plane + 0.1 * noise,
        "row": noise.cumsum(-1),
    }
    for coding, tensor in cases.items():
        assert assert_bounded(tensor, 0.02).pieces[0].coding == coding, coding
    assert assert_bounded(noise, 1e-9).pieces[0].coding == "raw"


def test_large_tensors_are_coded_in_pieces() -> None:
    record = assert_bounded(numbers(5, 17, 50, 60).relu(), 0.05)
    assert [piece.maps for piece in record.pieces] == [(34, 50, 60), (34, 50, 60), (17, 50, 60)]
    assert len(assert_bounded(numbers(2, 1, 300, 700).relu(), 0.05).pieces) == 4


def test_a_relu_of_white_noise_takes_a_bit_and_half_the_numbers() -> None:
    tensor = numbers(16, 8, 32, 32).relu()
    # Half of the elements, up to 4.5 / (2 * 0.05) = 45 bins: 6 bits at most where large ones stand.
    bits = 8 * CODEC.compress(tensor, 0.05).nbytes / tensor.numel()
    assert 1 + 0.5 * 5 < bits < 1 + 0.5 * 6.2


def test_zlib_is_smaller_and_says_the_same() -> None:
    tensor = numbers(4, 8, 32, 32).relu()
    plain, entropy = CODEC, DualQuantization(entropy="zlib")
    one, other = plain.compress(tensor, 0.02), entropy.compress(tensor, 0.02)
    assert other.nbytes < one.nbytes
    assert torch.equal(plain.decompress(one), entropy.decompress(other))


@pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bound_is_a_positive_number(bound: float) -> None:
    with pytest.raises(InputError, match="positive number") as error:
        CODEC.compress(torch.ones(3), bound)
    assert error.value.field == "absolute_bound"


def test_whole_numbers_are_refused() -> None:
    with pytest.raises(InputError, match=r"floating-point.*int64.*float32"):
        CODEC.compress(torch.ones(3, dtype=torch.int64), 0.1)
