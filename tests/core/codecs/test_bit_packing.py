from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.codecs.bit_packing import (
    pack_bits,
    pack_blocks,
    packed_bytes,
    unpack_bits,
    unpack_blocks,
)

NUMBERS = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 9), max_size=300)


@given(NUMBERS)
def test_numbers_come_back(values: list[int]) -> None:
    numbers = torch.tensor(values, dtype=torch.int32)
    widths, payload = pack_blocks(numbers)
    assert unpack_blocks(widths, payload, len(values)).tolist() == values
    assert packed_bytes(numbers) == len(widths) + len(payload)


@given(st.lists(st.booleans(), max_size=200))
def test_bits_come_back(values: list[bool]) -> None:
    bits = pack_bits(torch.tensor(values, dtype=torch.bool))
    assert len(bits) == -(-len(values) // 8)
    assert unpack_bits(bits, len(values)).tolist() == values


def test_a_block_takes_the_bits_of_its_largest_number_and_no_more() -> None:
    numbers = torch.cat([torch.zeros(64), torch.full((64,), 5.0), torch.full((64,), 4096.0)])
    widths, payload = pack_blocks(numbers.int())
    assert widths.tolist() == [0, 3, 13]
    assert len(payload) == (0 + 3 + 13) * 8


@pytest.mark.parametrize(
    ("widths", "size"), [([3], 23), ([3, 3], 48), ([32], 256), ([], 0)], ids=str
)
def test_what_does_not_fit_together_is_refused(widths: list[int], size: int) -> None:
    packed = torch.zeros(size, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"widths|width of"):
        unpack_blocks(torch.tensor(widths, dtype=torch.uint8), packed, 60)
