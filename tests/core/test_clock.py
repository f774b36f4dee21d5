"""The clock: every instant in one row, the innermost, so that rows sum to what has passed."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.clock import AGAIN, DATA, IMPORTS, START, WAITING, WIRE, Clock, group_of

SECOND = 10**9
# A program: waits (numbers), and rows with programs inside.
PROGRAMS = st.recursive(
    st.integers(0, 5 * SECOND),
    lambda inner: st.tuples(st.sampled_from("abc"), st.lists(inner, max_size=4)),
    max_leaves=20,
)


class Hand:
    """A clock's hand that a test moves."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        return self.at


def do(program, hand, clock, row, expected):
    """Run a program, and note what each row has to get."""
    if isinstance(program, int):
        hand.at += program
        expected[row] = expected.get(row, 0) + program
        return
    name, inner = program
    with clock(name):
        for each in inner:
            do(each, hand, clock, name, expected)


@given(st.lists(PROGRAMS, max_size=6))
def test_each_instant_is_the_innermost_rows(programs):
    hand = Hand()
    clock, expected = Clock(hand), {}
    for program in programs:
        do(program, hand, clock, START, expected)
    assert clock.rows() == {row: spent / SECOND for row, spent in expected.items() if spent}
    assert clock.seconds == pytest.approx(sum(clock.rows().values()))


def test_a_row_that_raises_is_left():
    hand = Hand()
    clock = Clock(hand)

    def fails():
        with clock(DATA):
            hand.at += SECOND
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    hand.at += 2 * SECOND
    assert clock.rows() == {DATA: 1.0, START: 2.0}


def test_phases_moves_and_a_new_name_keep_the_sum():
    hand = Hand()
    clock = Clock(hand, age=3 * SECOND)
    hand.at += SECOND
    clock.rename(START, AGAIN)
    clock.enter("unexplained")
    hand.at += SECOND
    with clock(WIRE):
        hand.at += 2 * SECOND
    clock.move(WIRE, WAITING, 0.5)
    clock.move(DATA, WAITING, 7.0)  # there is nothing
    assert clock.rows() == {AGAIN: 4.0, "unexplained": 1.0, WIRE: 1.5, WAITING: 0.5}
    assert clock.seconds == 7.0
    clock.restart()
    assert clock.rows() == {}
    assert clock.seconds == 0.0


def test_a_part_belongs_to_its_group():
    assert group_of(IMPORTS) == START
    assert group_of(WIRE) == WIRE


@pytest.mark.skipif(sys.platform != "linux", reason="the system says when processes began")
def test_a_process_counts_from_its_start():
    code = "import time; time.sleep(0.3); from modicum.core.clock import *\n"
    code += "print(Clock.of_process().rows()[IMPORTS])"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, env=dict(os.environ)
    )
    assert float(done.stdout) > 0.2  # the system counts in hundredths
