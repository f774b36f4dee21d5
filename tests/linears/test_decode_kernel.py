"""The kernel in Triton against PyTorch's operations: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modicum.linears import decode_kernel
from modicum.linears.int8 import Int8Linear
from modicum.linears.nf4 import NF4Linear
from modicum.linears.quantized import GROUP, QuantizedLinear, _scales, _values, decode

pytest.importorskip("triton", reason="builds of PyTorch for CPUs have no Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter rounds to bf16 otherwise than a GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    decode_kernel._kernel.cache_clear()
    yield
    decode_kernel._kernel.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 70), (3, 64), (7, 2051), (1, 1), (2, 1025)])
@pytest.mark.parametrize("kind", [NF4Linear, Int8Linear])
def test_it_is_to_the_bit_what_pytorch_makes(
    kind: type[QuantizedLinear], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = kind.from_dense(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    expected = decode(*layer.frozen_tensors(), shape[1], kind.form, dtype)
    layer.to(DEVICE)
    made = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
    scales = _scales(layer.scales, layer.ranges)
    levels = _values(kind.form, DEVICE)
    decode_kernel.decode_into(made, layer.codes, scales, levels, GROUP)
    assert torch.equal(made.cpu(), expected)


def test_nothing_to_make_is_no_error() -> None:
    layer = NF4Linear.from_dense(torch.ones(2, 64))
    scales = _scales(layer.scales, layer.ranges)[:0]
    levels = _values("nf4", torch.device("cpu"))
    decode_kernel.decode_into(torch.empty(0, 64), layer.codes[:0], scales, levels, GROUP)
