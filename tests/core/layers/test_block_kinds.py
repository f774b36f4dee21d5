"""Which blocks are looked at for all: every neighbourhood stays, and what differs is not alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from modicum.core.layers.block_kinds import lists_with_neighbours, outermost_lists, shortened


def layers(kinds: list[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(2, 2 + kind) for kind in kinds)


def around(kinds: list[int]) -> list[tuple[int, int, int]]:
    return list(zip([-1, *kinds], kinds, [*kinds[1:], -1], strict=False))


@given(st.lists(st.integers(0, 2), max_size=24))
def test_blocks_that_stay_have_the_neighbours_of_those_that_they_represent(
    kinds: list[int],
) -> None:
    for found in lists_with_neighbours(layers(kinds)):
        kept = list(found.kept)
        assert kept == sorted(kept)
        assert sum(found.kept.values()) == len(kinds)
        short = around([kinds[number] for number in kept])
        assert [short[place] for place in found.like] == around(kinds)


def test_long_lists_become_short_and_come_back() -> None:
    model = nn.ModuleDict({"even": layers([0] * 100), "turns": layers([0, 1, 1] * 20)})
    lists = lists_with_neighbours(model)
    assert [len(each.kept) for each in lists] == [3, 6]
    before = list(model["even"])
    with shortened(model, lists):
        assert [len(module) for module in (model["even"], model["turns"])] == [3, 6]
        assert model["even"][2] is before[99]
    assert list(model["even"]) == before


def test_blocks_that_share_a_tensor_hook_or_compute_otherwise_are_like_no_other() -> None:
    blocks = layers([0] * 9)
    blocks[3].weight = blocks[4].weight
    blocks[6].register_forward_hook(lambda module, args, out: 2 * out)
    (found,) = lists_with_neighbours(blocks)
    assert {3, 4, 6} <= set(found.kept)
    functions = nn.ModuleList(nn.TransformerEncoderLayer(2, 1, 2) for _ in range(9))
    functions[4].activation = nn.functional.gelu  # type: ignore[union-attr]
    (found,) = lists_with_neighbours(functions)
    assert 4 in found.kept
    assert len(found.kept) < 9


def test_lists_in_blocks_and_sequences_of_layers_are_no_lists_of_blocks() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2), layers([0, 0]))  # noqa: E731
    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
            "body": nn.Sequential(block(), block()),
            "head": layers([0, 0]),
            "mixed": nn.Sequential(block(), nn.ReLU()),
        }
    )
    assert list(outermost_lists(model)) == ["body", "head", "mixed.0.1"]
    assert list(outermost_lists(model, model["head"])) == ["head"]
