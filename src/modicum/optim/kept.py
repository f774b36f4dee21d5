"""What a rule keeps of a parameter: tensors of any shape, in 32, 16 or 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modicum.optim.quantized import SMALLEST, dequantize, quantize_, scales

# What floats are kept in that are no codes, by the bits that are asked for.
DTYPES = {32: torch.float32, 16: torch.bfloat16}
StateShape = tuple[tuple[int, ...], torch.dtype]
"""What a tensor in an optimizer's state is: its full shape and its dtype."""


@dataclass(frozen=True)
class KeptTensor:
    """A tensor of an optimizer's state: zeros before the first step.

    Args:
        shape: of any dimensions, not necessarily the parameter's.
        dtype: what the rule has it in; integers and booleans are kept as they are.
        bits: of an element as it is kept, 32, 16 or 8; None: as many as the optimizer's state has.
        squared: whether it is a mean of squares, which have no sign.

    >>> KeptTensor((64, 64)).nbytes(32), KeptTensor((64, 64)).nbytes(8), KeptTensor((9,)).nbytes(8)
    (16384, 4160, 36)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    squared: bool = False

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def coded(self, bits: int) -> bool:
        """Whether it is kept as 8-bit codes where the optimizer's state has so many bits.

        What has few elements stays in `dtype`.
        """
        bits = self.bits or bits
        return self.dtype.is_floating_point and bits == 8 and self.elements >= SMALLEST

    def held(self, bits: int) -> torch.dtype:
        """The dtype that it is kept in."""
        if self.coded(bits):
            return torch.uint8
        if not self.dtype.is_floating_point or (self.bits or bits) != 16:
            return self.dtype
        return torch.bfloat16

    def nbytes(self, bits: int) -> int:
        """Bytes that are kept, the scales of codes included."""
        size = self.elements * self.held(bits).itemsize
        return size + (4 * scales(self.elements) if self.coded(bits) else 0)

    def copied(self, bits: int) -> int:
        """Bytes of what the rule works on in addition to what is kept: 0 where that is the same."""
        return 0 if self.held(bits) == self.dtype else self.elements * self.dtype.itemsize


def state_shapes(kept: Mapping[str, KeptTensor], bits: int) -> dict[str, StateShape]:
    """What `opened` leaves in a state, by names; codes have their scales next to them.

    >>> list(state_shapes({"m": KeptTensor((64, 64))}, 8))
    ['m', 'm_scale']
    """
    found: dict[str, StateShape] = {}
    for name, one in kept.items():
        found[name] = one.shape, one.held(bits)
        if one.coded(bits):
            found[f"{name}_scale"] = (scales(one.elements),), torch.float32
    return found


@contextmanager
def opened(
    state: dict[str, Any], kept: Mapping[str, KeptTensor], device: torch.device, bits: int
) -> Iterator[dict[str, Tensor]]:
    """What `state` has of a rule's tensors, to be changed in place; zeros where new.

    Args:
        kept: the tensors by their names.
        bits: of the optimizer's state: 32; 16 for bf16, to which floats are rounded at the end; or
            8 for those that are large enough, which are quantized again at the end.

    >>> state, kept = {}, {"m": KeptTensor((64, 64))}
    >>> for _ in range(2):
    ...     with opened(state, kept, torch.device("cpu"), 8) as found:
    ...         _ = found["m"].add_(1.0)
    >>> state["m"].dtype, dequantize(state["m"], state["m_scale"], signed=True)[0, 0].item()
    (torch.uint8, 2.0)
    """
    found: dict[str, Tensor] = {}
    for name, one in kept.items():
        if name not in state:
            found[name] = torch.zeros(one.shape, dtype=one.dtype, device=device)
        elif one.coded(bits):
            scale = state[f"{name}_scale"]
            found[name] = dequantize(state[name], scale, signed=not one.squared).to(one.dtype)
        else:
            found[name] = state[name].to(one.dtype)
    yield found
    for name, one in kept.items():
        dtype, before = one.held(bits), state.get(name)
        if not one.coded(bits):
            if before is not None and before.dtype == dtype != one.dtype:
                before.copy_(found.pop(name))
            else:
                state[name] = found.pop(name).to(dtype)
            continue
        if before is None:
            state[name] = torch.empty(one.shape, dtype=dtype, device=device)
            state[f"{name}_scale"] = torch.empty(scales(one.elements), device=device)
        values = found.pop(name).float()
        quantize_(state[name], state[f"{name}_scale"], values, signed=not one.squared)
