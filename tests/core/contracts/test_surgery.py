"""Maps of rows: what they lead to, and what they refuse."""

from __future__ import annotations

import pytest

from modicum.core.contracts.surgery import RowMap, Surgery
from modicum.core.errors import InputError


@pytest.mark.parametrize(
    ("kept", "shapes", "why"),
    [
        ((0, 9), {"w.down": (2, 3)}, "has not"),
        ((0, 1), {"w.down": (1, 3)}, "mapped to"),
        ((0, 1), {"w.down": (2, 3), "new": (1,)}, "adds or removes"),
    ],
)
def test_maps_lead_to_the_new_shapes(
    kept: tuple[int, ...], shapes: dict[str, tuple[int, ...]], why: str
) -> None:
    surgery = Surgery("", rows={"w.down": (RowMap(0, kept),)})
    with pytest.raises(InputError, match=why):
        surgery.check({"w.down": (4, 3)}, shapes)
    with pytest.raises(InputError, match="does not have"):
        Surgery("", rows={"v": (RowMap(0, (0,)),)}).check({"w": (4, 3)}, {"w": (4, 3)})


@pytest.mark.parametrize("kept", [(), (1, 1), (-1,)])
def test_a_map_keeps_each_place_once(kept: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="each once"):
        RowMap(0, kept)


def test_a_layer_that_becomes_dense_has_a_weight_in_place_of_its_tensors() -> None:
    surgery = Surgery("merges", dense=("up",))
    before = {"up.first": (4, 3), "up.second": (4, 2), "up.bias": (4,), "head.weight": (2, 4)}
    after = {"up.weight": (4, 3), "up.bias": (4,), "head.weight": (2, 4)}
    surgery.check(before, after)
    assert Surgery.from_json(surgery.as_json()) == surgery
    assert "dense" not in Surgery("").as_json()
    with pytest.raises(InputError, match="adds or removes parameters"):
        surgery.check(before, after | {"down.weight": (1, 1)})
    with pytest.raises(InputError, match="no layer of another form"):
        Surgery("merges", dense=("head",)).check(before, before)
