"""What COMET is compared with: exact training, one bound for all, and a fixed number of bits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.codecs.error_bounded import ErrorBoundedCodec
from modicum.core.layers.saved_tensors import Shares
from modicum.memory.base import ActivationPolicy, Seen, SharesRange

_GROUP = 256


class Everything(ActivationPolicy):
    """Keeps all as it is: the baseline, through the same machinery."""

    def first_bound(self, largest: float) -> float:
        return 1.0

    def measures(self, update: int) -> bool:
        return False

    def next_bound(self, seen: Seen) -> float:
        return 1.0

    def shares(self, element_bytes: int) -> SharesRange:
        return SharesRange(Shares(), Shares(), Shares())

    def codec(self) -> ErrorBoundedCodec:
        return _Copy()


class FixedBound(Everything):
    """One absolute bound for all layers and all times, as in the authors' public code."""

    bound: float

    def first_bound(self, largest: float) -> float:
        return self.bound

    def codec(self) -> ErrorBoundedCodec:
        return ActivationPolicy.codec(self)


class FixedBits(Everything):
    """As many bits for every element, whatever becomes of the error: uniform quantization.

    Of what a ReLU made. Groups of 256 elements have a scale in 16 bits. Rounded to the nearest
    level, 0 represents zeros alone, so that no mask is needed; rounded at random, which is
    unbiased, the mask takes one bit more.

    Source of the latter: Chen et al., "ActNN", ICML 2021, arXiv 2104.14129, section 3.
    """

    bits: int
    stochastic: bool = False

    def codec(self) -> ErrorBoundedCodec:
        return _Quantized(self.bits, self.stochastic)


@dataclass(frozen=True)
class _Record:
    """A tensor that represents a record of so many bytes."""

    values: Tensor
    nbytes: int


@dataclass(frozen=True)
class _Copy:
    """Makes nothing smaller."""

    def compress(self, tensor: Tensor, absolute_bound: float) -> _Record:
        copy = tensor.detach().clone()
        return _Record(copy, copy.nbytes)

    def decompress(self, record: _Record) -> Tensor:
        return record.values

    def nonzero(self, record: _Record) -> Tensor:
        return record.values != 0


@dataclass(frozen=True)
class _Quantized(_Copy):
    """What comes back is kept as it will be; counted are the bytes that its codes would take."""

    bits: int
    stochastic: bool

    def compress(self, tensor: Tensor, absolute_bound: float) -> _Record:
        flat = tensor.detach().reshape(-1)
        groups = F.pad(flat, (0, -flat.numel() % _GROUP)).view(-1, _GROUP)
        levels = 2**self.bits - 1
        scale = (groups.amax(1, keepdim=True) / levels).bfloat16().float() * (1 + 2.0**-8)
        codes = groups / scale.clamp(min=1e-30)
        each = float(self.bits)
        if self.stochastic:
            codes = (codes + torch.rand_like(codes)).floor()
            each += 1
        else:
            codes = codes.round().clamp(min=1.0) * (groups > 0)
        values = (codes.clamp(max=levels) * scale).view(-1)[: flat.numel()].view(tensor.shape)
        # A mask of its own tells what was positive, where a code of 0 does not.
        values = torch.where((tensor > 0) & (values == 0), 1e-30, values)
        return _Record(values, math.ceil(each * flat.numel() / 8) + 2 * len(groups))
