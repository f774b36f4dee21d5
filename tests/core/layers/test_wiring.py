"""Streams between branches: what each reads, without subtraction and without one too many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan, Skips
from modicum.core.layers.wiring import block_wires, streams


def ladder(blocks: int) -> tuple[Skips, ...]:
    return ((), *[((1, 1),)] * (2 * blocks - 1))


def shallow(blocks: int) -> tuple[Skips, ...]:
    each = [(((1, 2 * n),), ((2, 2 * n + 1),)) for n in range(1, blocks)]
    return ((), (), *(skips for pair in each for skips in pair))


@st.composite
def skips_of(draw: st.DrawFn) -> tuple[Skips, ...]:
    """Of some blocks, each branch leaves some of those before it out."""
    count = 2 * draw(st.integers(1, 5))
    left = [draw(st.sets(st.integers(1, n))) if n else set() for n in range(count)]
    return tuple(BlockPlan(mixer_skips=each).mixer_skips for each in left)


@given(skips_of())
def test_each_branch_reads_the_start_and_the_branches_that_it_does_not_leave_out(
    skips: tuple[Skips, ...],
) -> None:
    wires = [way for block in block_wires(skips) for way in (block.mixer, block.mlp)]
    live: list[tuple[int, ...]] = [()]
    for branch, way in enumerate(wires):
        skipped = {
            branch - back for first, last in skips[branch] for back in range(first, last + 1)
        }
        assert live[0] == tuple(n for n in range(branch) if n not in skipped)
        assert {place for place, _ in way} <= set(range(len(live)))
        live = [live[place] + (branch,) * adds for place, adds in way]
        assert len({*live}) == len(live)
    assert live == [tuple(range(len(skips)))]


def test_known_wirings_need_few_streams() -> None:
    assert all(each.sequential for each in block_wires(((),) * 12))
    assert {len(each) for each in streams(ladder(40))[1:-1]} == {2}
    assert max(len(each) for each in streams(shallow(40))[::2]) == 2
    assert len({*block_wires(ladder(40))}) == 3  # the first, the last, and all between
    parallel = block_wires(((), ((1, 1),)) * 40)
    assert len({*parallel}) == 1
    assert not parallel[0].sequential
    assert not parallel[0].several


@pytest.mark.parametrize(("skips", "allowed"), [((((1, 1),), ()), "none"), (((), ((1, 2),)), "1")])
def test_there_must_be_as_many_branches_before(skips: tuple[Skips, ...], allowed: str) -> None:
    with pytest.raises(InputError, match=rf"beyond the model's first branch.*allowed: {allowed}"):
        streams(skips)
