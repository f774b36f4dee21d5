"""Which documents are held out: of each part the same ones, whatever else is asked for."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.errors import InputError
from modicum.data.parts import PARTS, TEST, TRAIN, VALIDATION, Draw, order_key

FRACTIONS = st.floats(1e-9, 1.0)
SEEDS = st.integers(0, 9)


@given(st.integers(3, 60), FRACTIONS, st.floats(0, 1), SEEDS)
def test_every_part_has_a_document_and_neither_validation_nor_seed_moves_the_test(
    documents: int, test: float, validation: float, seed: int
) -> None:
    flags = Draw(validation, test, seed).flags(documents)
    assert {*flags} == ({0, 1, 2} if validation else {0, 2})
    bar = int(test * 2**64)
    likely = [n for n in range(documents) if _chance(f"test/{n}") < bar]
    chosen = [n for n, flag in enumerate(flags) if flag == 2]
    # But for the document that each other part has at the least.
    if likely and len(likely) < documents - 1:
        assert chosen == likely
    for other in (Draw(validation, test, seed + 1), Draw(1e-9, test, seed)):
        if 0 < len(likely) < documents - 1:
            assert [n for n, flag in enumerate(other.flags(documents)) if flag == 2] == chosen


@given(st.integers(2, 60), st.floats(0, 1), SEEDS)
def test_without_a_test_the_validation_is_as_it_was_before_there_were_any(
    documents: int, fraction: float, seed: int
) -> None:
    chances = [_chance(f"{seed}/validation/{n}") for n in range(documents)]
    expected = bytearray(chance < int(fraction * 2**64) for chance in chances)
    if fraction and not any(expected):
        expected[chances.index(min(chances))] = 1
    if fraction and all(expected):
        expected[chances.index(max(chances))] = 0
    assert Draw(fraction, seed=seed).flags(documents) == expected


def _chance(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def test_the_draw_of_a_document_does_not_depend_on_how_many_there_are() -> None:
    draw = Draw(0.1, 0.2, seed=7)
    few, many = draw.flags(100), draw.flags(5000)
    assert many[:100] == few
    assert 350 < many.count(1) < 450
    assert 930 < many.count(2) < 1070
    assert [draw.part_of(number) for number in range(100)] == [PARTS[flag] for flag in few]
    assert draw.trained == pytest.approx(0.72)


@pytest.mark.parametrize("documents", [2, 3, 10])
def test_each_part_gets_at_least_one_document(documents: int) -> None:
    for seed in range(20):
        assert sum(Draw(1e-9, seed=seed).flags(documents)) == 1
        assert sum(Draw(1.0, seed=seed).flags(documents)) == documents - 1
    assert len({bytes(Draw(1e-9, seed=seed).flags(10)) for seed in range(20)}) > 5
    with pytest.raises(InputError, match="are only 2 documents") as error:
        Draw(0.5, 0.5).flags(2)
    assert error.value.field == "data.validation_fraction"
    with pytest.raises(InputError, match="none can be held out for test"):
        Draw(test=0.5).flags(1)


@given(
    st.lists(st.integers(1, 30), min_size=2, max_size=4),
    st.floats(0.0, 0.9),
    st.floats(0.1, 0.9),
    SEEDS,
)
def test_a_part_of_each_class_is_held_out(
    counts: list[int], test: float, validation: float, seed: int
) -> None:
    rows = [(label, f"{label}/{n}") for label, count in enumerate(counts) for n in range(count)]
    tested = [min(round(test * count), count - 1) for count in counts]
    left = [count - out for count, out in zip(counts, tested, strict=True)]
    held = [min(round(validation * count), count - 1) for count in left]
    draw = Draw(validation, test, seed)
    if not any(held) or (test and not any(tested)):
        with pytest.raises(InputError, match="no class has so many"):
            draw.flags_by_class(*zip(*rows, strict=True))
        return
    flags = dict(zip(rows, draw.flags_by_class(*zip(*rows, strict=True)), strict=True))
    for label in range(len(counts)):
        own = [flag for (each, _), flag in flags.items() if each == label]
        assert (own.count(1), own.count(2)) == (held[label], tested[label])
    # Another order, and more rows of other classes, hold out the same.
    more = [*rows[::-1], (9, "9/0")]
    again = dict(zip(more, draw.flags_by_class(*zip(*more, strict=True)), strict=True))
    assert {row: again[row] for row in rows} == flags
    # What is tested is the same without a validation, and with another seed.
    alone = Draw(test=test, seed=seed + 1).flags_by_class(*zip(*rows, strict=True))
    assert [flag == 2 for flag in alone] == [flag == 2 for flag in flags.values()]


def test_of_what_has_data_of_its_own_nothing_is_drawn() -> None:
    assert Draw(0.1, 0.2, 3).without([VALIDATION]) == Draw(0.0, 0.2, 3)
    assert Draw(0.1, 0.2, 3).without({TEST: "x"}) == Draw(0.1, 0.0, 3)
    assert Draw(0.1).without([VALIDATION]).part_of(5) == TRAIN


def test_names_of_files_that_are_no_utf8_are_drawn_too() -> None:
    names = ["a", "caf\udce9", "b", "c"]
    flags = Draw(0.5).flags_by_class([0] * 4, names)
    assert flags.count(1) == 2
    assert sorted(names, key=order_key) == sorted(set(names), key=order_key)
