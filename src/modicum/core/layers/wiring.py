"""Which streams a model's branches read and pass on, by what each leaves out. Imports no torch.

A branch that leaves nothing out reads x_0 plus all that was added before it, as those after it do:
there is one stream. A branch that leaves others out reads another sum, so several streams run next
to each other, as many at a place as different sums are still to be read behind it. Each is x_0 plus
what some of the branches before have added, and nothing is ever subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import Skips

Wires = tuple[tuple[int, bool], ...]
StreamSets = tuple[int, ...]


class SkipsTooFar(InputError):
    """A branch is to skip more branches than there are before it. `branch` is its number."""

    def __init__(self, branch: int, value: int) -> None:
        self.branch = branch
        allowed = f"1 to {branch}" if branch else "none"
        problem = "counts back beyond the model's first branch"
        super().__init__(problem, value=value, allowed=allowed)


@dataclass(frozen=True)
class BlockWires:
    """How streams run through a block of two branches, each of which reads the first one.

    Args:
        enters: how many streams come in.
        mixer, mlp: of each stream behind the branch, which one it was before, and whether the
            branch adds to it.
    """

    enters: int
    mixer: Wires
    mlp: Wires

    @property
    def several(self) -> bool:
        """Whether more than one stream comes in or goes out."""
        return self.enters > 1 or len(self.mlp) > 1

    @property
    def sequential(self) -> bool:
        """Whether there is one stream, to which each branch adds before the next one reads."""
        return self.enters == 1 and self.mixer == self.mlp == ((0, True),)


@lru_cache(maxsize=16)
def streams(skips: tuple[Skips, ...]) -> tuple[StreamSets, ...]:
    """The streams before each branch and behind the last one, that which is read next first.

    A stream is given by the branches that are in it, as the bits of an integer.

    Args:
        skips: of each branch, in order.

    Raises:
        SkipsTooFar: a branch skips more branches than there are before it.

    >>> ladder = ((), ((1, 1),), ((1, 1),), ((1, 1),))  # each leaves out the one directly before
    >>> [[bin(stream) for stream in each] for each in streams(ladder)][2:4]
    [['0b1', '0b11'], ['0b11', '0b111']]
    """
    read = []
    for branch, ranges in enumerate(skips):
        found = (1 << branch) - 1
        for first, last in ranges:
            if last > branch:
                raise SkipsTooFar(branch, last)
            for back in range(first, last + 1):
                found &= ~(1 << (branch - back))
        read.append(found)
    read.append((1 << len(skips)) - 1)  # what is behind the last branch: all of them
    return tuple(
        tuple(dict.fromkeys(reads & ((1 << place) - 1) for reads in read[place:]))
        for place in range(len(read))
    )


def block_wires(skips: tuple[Skips, ...]) -> Sequence[BlockWires]:
    """How streams run through each block, whose mixer and MLP are two of the branches.

    >>> parallel = ((), ((1, 1),))  # the MLP reads what the mixer does
    >>> block_wires(parallel)[0]
    BlockWires(enters=1, mixer=((0, False), (0, True)), mlp=((1, True),))
    """
    at = streams(skips)
    return [
        BlockWires(len(at[place]), _wires(at, place), _wires(at, place + 1))
        for place in range(0, len(skips), 2)
    ]


def _wires(at: Sequence[StreamSets], branch: int) -> Wires:
    """Of each stream behind a branch, its place among those before, and whether it is added to."""
    own = 1 << branch
    return tuple((at[branch].index(each & ~own), bool(each & own)) for each in at[branch + 1])
