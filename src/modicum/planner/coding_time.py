"""How long this machine takes to code what an update sends, and to decode what comes."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from modicum.core.codecs.elements import Stream, codec, hadamard
from modicum.core.contracts.ledger import Wire
from modicum.core.machine.record import remembered

_NUMBERS, _GROUP = 1 << 20, 128
_TIMES = 5


@dataclass(frozen=True)
class CodingRates:
    """Picoseconds that a number takes.

    Args:
        transform: to be mixed with others by a Hadamard transform.
    """

    encode: int
    decode: int
    transform: int


def coding_seconds(
    wires: Iterable[Wire], device: str = "cpu", rates: Callable[[int], CodingRates] | None = None
) -> float:
    """Seconds of an update in which its numbers are coded, and decoded.

    On a GPU this is not counted, and was not measured. Of a machine that is not this one, they take
    as long as here.

    Args:
        wires: of the ledger.
        device: cpu or cuda.
        rates: by bits; None: of this machine, measured where that was not done before.

    >>> from modicum.core.contracts.ledger import CodedNumbers
    >>> coded = CodedNumbers(4, encoded=10**9, decoded=4 * 10**9)
    >>> wires = [Wire("all_gather", 500, coding=coded), Wire("all_gather", 9)]
    >>> coding_seconds(wires, rates=lambda bits: CodingRates(2000, 500, 0))
    4.0
    """
    if device != "cpu":
        return 0.0
    took = 0
    for coding in (wire.coding for wire in wires):
        if coding is not None:
            each = (rates or coding_rates)(coding.bits)
            took += coding.encoded * each.encode + coding.decoded * each.decode
            took += coding.transformed * each.transform
    return took / 1e12


def coding_rates(bits: int) -> CodingRates:
    """How fast this process codes numbers of so many bits in groups."""
    return _rates(bits, torch.get_num_threads())


@functools.cache
def _rates(bits: int, threads: int) -> CodingRates:
    def measure() -> list[int]:
        numbers = torch.randn(1, _NUMBERS, generator=torch.Generator().manual_seed(0))
        code = codec(bits, _GROUP)
        message = code.encode(numbers, Stream())
        passes = (
            lambda: code.encode(numbers, Stream()),
            lambda: code.decode(message, _NUMBERS),
            lambda: hadamard(numbers),
        )
        return [round(_fastest(each) / _NUMBERS * 1e12) for each in passes]

    return CodingRates(*remembered(f"coding {bits} bits", measure, 3))


def _fastest(work: Callable[[], object]) -> float:
    took = []
    with torch.no_grad():
        for _ in range(_TIMES):
            start = time.perf_counter()
            work()
            took.append(time.perf_counter() - start)
    return min(took)
