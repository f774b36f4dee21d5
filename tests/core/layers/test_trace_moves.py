from __future__ import annotations

import json

import pytest

from modicum.core.layers.trace_moves import (
    AveragedInFloat,
    Gradient,
    InPieces,
    Move,
    Release,
    Scratch,
    ScratchProduct,
    move_of,
    plain,
)


@pytest.mark.parametrize(
    "move",
    [
        12,
        Release(4, "layers.0", 2),
        Gradient(8, True),
        Scratch(ScratchProduct("weight", 3, 4), 5),
        Scratch(AveragedInFloat(), 6),
        Scratch(InPieces(29, 7), 8),
    ],
    ids=str,
)
def test_moves_are_read_back_as_they_were(move: Move) -> None:
    assert move_of(json.loads(json.dumps(plain(move)))) == move


def test_what_is_done_in_pieces_takes_no_more_than_one() -> None:
    assert [Scratch(InPieces(29, 7), rows).bytes for rows in (2, 7, 100)] == [58, 203, 203]
