"""One counter-based generator for all that ranks, shards and devices must agree on.

A draw is a function of (seed, step, name, offset) and of nothing else: no hidden state, no order
of construction, no device. A shard that holds elements 1000 to 1999 of a parameter draws just
those, and they are the ones that the full parameter would have. Draws are made on the CPU: others
round otherwise, or have no fp64.

What rounds at random draws one number for each that is sent, and takes `mixed` words: on a CPU a
draw costs a quarter. Everything else draws from `philox`.

Source: Philox4x32-10, Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
_CHUNK = 1 << 17  # counters at a time: bounds the scratch memory to some 30 megabytes


def key(seed: int, name: str = "", step: int = 0) -> tuple[int, int]:
    """The two 32-bit key words of the stream that (seed, step, name) names."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def derive_seed(seed: int, name: str = "", step: int = 0) -> int:
    """A 63-bit seed for a generator of torch's own, named like a stream."""
    low, high = key(seed, name, step)
    return (high << 32 | low) & 0x7FFFFFFFFFFFFFFF


def philox(counter: Tensor, key_words: tuple[int, int]) -> Tensor:
    """Four 32-bit words for each counter: int64 [n] to int64 [n, 4], values in [0, 2**32)."""
    words = [counter & _LOW, (counter >> 32) & _LOW, torch.zeros_like(counter)]
    words.append(torch.zeros_like(counter))
    first, second = key_words
    for _ in range(10):
        # The products wrap in signed 64 bits, but their bits are those of the unsigned product.
        product0, product1 = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((product1 >> 32) & _LOW) ^ words[1] ^ first,
            product1 & _LOW,
            ((product0 >> 32) & _LOW) ^ words[3] ^ second,
            product0 & _LOW,
        ]
        first, second = (first + _WEYL[0]) & _LOW, (second + _WEYL[1]) & _LOW
    return torch.stack(words, dim=-1)


def mixed(
    first: int, last: int, key_words: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """The words number `first` to `last` - 1 of a stream, 64 bits each: int64 [last - first].

    Streams of different keys are parts of one sequence of 2^64 words, at random places.

    Source: SplitMix64, Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014.

    >>> mixed(0, 2, (0, 0)).tolist()
    [-2152535657050944081, 7960286522194355700]
    """
    low, high = key_words
    words = torch.arange(first + 1, last + 1, device=device)
    words.mul_(_signed(_GOLDEN)).add_(_signed(high << 32 | low))
    shifted = torch.empty_like(words)
    for distance, factor in _ROUNDS:
        # A shift of signed numbers brings copies of the sign in, which are taken off.
        torch.bitwise_right_shift(words, distance, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - distance)) - 1))
        if factor != 1:
            words.mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    """64 bits as the signed number that they are in two's complement."""
    return word - (1 << 64) if word >> 63 else word


def bits(count: int, *, seed: int, name: str = "", step: int = 0, offset: int = 0) -> Tensor:
    """`count` words of 32 bits, int64 [count], from place `offset` of the stream on.

    They are on torch's default device, as `sample`'s numbers are.
    """
    words = _bits(count, seed=seed, name=name, step=step, offset=offset)
    return words.to(torch.get_default_device())


def _bits(count: int, *, seed: int, name: str, step: int = 0, offset: int = 0) -> Tensor:
    """`bits` on the CPU."""
    first, last = offset // 4, (offset + count + 3) // 4
    counter = torch.arange(first, last, dtype=torch.int64, device="cpu")
    words = philox(counter, key(seed, name, step)).flatten()
    return words[offset - 4 * first :][:count]


def sample(n: int, k: int, *, seed: int, name: str = "") -> Tensor:
    """`k` different numbers below `n`, ascending, int64 [k]: every set of them is as likely.

    Nothing of size `n` is sorted, and where k is at most n / 2 nothing of that size is made.

    >>> sample(10**15, 3, seed=0, name="places").shape
    torch.Size([3])
    >>> sample(5, 5, seed=0).tolist()
    [0, 1, 2, 3, 4]

    Raises:
        ValueError: there are no `k` numbers below `n`.
    """
    if not 0 <= k <= n:
        raise ValueError(f"{k} different numbers below {n}")
    return _sample(n, k, seed, name).to(torch.get_default_device())


def _sample(n: int, k: int, seed: int, name: str) -> Tensor:
    """`sample` on the CPU."""
    if k > n - k:
        kept = torch.ones(n, dtype=torch.bool, device="cpu")
        kept[_sample(n, n - k, seed, name)] = False
        return kept.nonzero().flatten()
    # The first k different ones of a sequence of independent numbers.
    drawn = torch.empty(0, dtype=torch.int64, device="cpu")
    chosen = drawn
    while chosen.numel() < k:
        more = max(64, (k - chosen.numel()) * 3 // 2)
        words = _bits(2 * more, seed=seed, name=name, offset=2 * drawn.numel()).view(-1, 2)
        drawn = torch.cat([drawn, ((words[:, 0] << 31) ^ words[:, 1]) % n])
        values, at = drawn.sort(stable=True)
        first = at[torch.cat([at.new_ones(1, dtype=torch.bool), values[1:] != values[:-1]])]
        chosen = drawn[first.sort().values]
    return chosen[:k].sort().values


def _fill(tensor: Tensor, draw: Callable[[int, int], Tensor], width: int, offset: int) -> Tensor:
    """Fill `tensor` in place, `_CHUNK` counters at a time, whatever its dtype and device."""
    size = _CHUNK * 4 // width
    with torch.no_grad():
        # Where the tensor is not contiguous its elements have no order of their own in memory.
        flat = (tensor if tensor.is_contiguous() else tensor.new_empty(tensor.shape)).view(-1)
        for start in range(0, flat.numel(), size):
            piece = flat[start : start + size]
            piece.copy_(draw(piece.numel(), offset + start).float())
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))


def uniform_(
    tensor: Tensor, low: float, high: float, *, seed: int, name: str, step: int = 0, offset: int = 0
) -> Tensor:
    """Fill `tensor` in place with U(low, high); `offset` is where it begins in the full tensor.

    >>> whole = uniform_(torch.empty(10), -1.0, 1.0, seed=0, name="A")
    >>> shard = uniform_(torch.empty(4), -1.0, 1.0, seed=0, name="A", offset=6)
    >>> torch.equal(whole[6:], shard)
    True
    """

    def draw(count: int, start: int) -> Tensor:
        words = _bits(count, seed=seed, name=name, step=step, offset=start)
        return ((words >> 8).double() + 0.5) * (2.0**-24 * (high - low)) + low

    return _fill(tensor, draw, width=1, offset=offset)


def normal_(
    tensor: Tensor,
    *,
    seed: int,
    name: str,
    mean: float = 0.0,
    std: float = 1.0,
    step: int = 0,
    offset: int = 0,
) -> Tensor:
    """Fill `tensor` in place with N(mean, std^2), by Box-Muller on two words an element."""

    def draw(count: int, start: int) -> Tensor:
        words = _bits(2 * count, seed=seed, name=name, step=step, offset=2 * start).view(count, 2)
        unit = (words.double() + 0.5) * 2.0**-32
        radius = torch.sqrt(-2.0 * torch.log(unit[:, 0]))
        return radius * torch.cos(2.0 * math.pi * unit[:, 1]) * std + mean

    return _fill(tensor, draw, width=2, offset=offset)
