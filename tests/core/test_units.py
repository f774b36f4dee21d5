from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.core.units import (
    Every,
    format_bytes,
    format_duration,
    parse_bytes,
    parse_count,
    parse_duration,
)

FACTORS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


@given(st.integers(1, 10**6), st.sampled_from(sorted(FACTORS)), st.sampled_from(["", " ", "  "]))
def test_sizes_are_number_times_unit_in_any_case(number, unit, gap):
    for text in (f"{number}{gap}{unit}", f"{number}{gap}{unit.lower()}", f" {number}{unit} "):
        assert parse_bytes(text) == number * FACTORS[unit]


@given(st.integers(1, 10**9), st.integers(1, 999))
def test_fractions_are_exact(whole, thousandths):
    assert parse_bytes(f"{whole}.{thousandths:03d}kB") == whole * 1000 + thousandths


@given(st.integers(1, 10**15))
def test_formatted_sizes_read_back_to_three_digits(size):
    assert parse_bytes(size) == size
    assert parse_bytes(str(size)) == size
    text = format_bytes(size)
    assert parse_bytes(text) == pytest.approx(size, rel=0.006)
    assert "e" not in text
    assert format_bytes(-size) == f"-{text}"


UNREADABLE = """
8 gigs|8G|GB|eight GB|8GBs|8 G B|8,5GB|1e9|0x10|-1GB|0|0GB|0.0MB|+-1B||8GB 8GB|8gibi|nan|inf|8GB!
.5GB|5.GB|8;GB GB
"""
UNREADABLE = [text.replace(";", "\n") for text in UNREADABLE.replace("\n", "|").split("|")]


@pytest.mark.parametrize(
    "text", [*UNREADABLE, None, 1.5, True, False, 0, -1, [], "1" * 5000 + "GB"]
)
def test_sizes_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_bytes(text)


def test_a_size_of_many_digits_is_no_float():
    assert parse_bytes("9" * 400 + "B") == int("9" * 400)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400), (" 1.5 h ", 5400)]
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    assert Every.parse(text) == Every(seconds=seconds)


@pytest.mark.parametrize(
    "text", ["", "10", "10 minutes", "m", "-1s", "0s", "0.0h", "1e3s", "1h30m"]
)
def test_durations_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize("value", [0, -1, "0", "", "often", "10 steps", 1.5, True, None, "-5", "²"])
def test_intervals_that_cannot_be_read_are_refused(value):
    with pytest.raises(ValueError, match="steps"):
        Every.parse(value)


@given(st.integers(1, 50), st.integers(0, 500))
def test_an_interval_of_steps_is_due_at_its_multiples(steps, step):
    assert Every.parse(steps).due(step, 0.0) == (step % steps == 0)
    assert Every.parse(str(steps)) == Every.parse(steps)


def test_an_interval_of_seconds_is_due_when_they_have_passed():
    every = Every.parse("10m")
    assert [every.due(7, elapsed) for elapsed in (0, 599, 600, 601)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")],
)
def test_formatted_durations(seconds, text):
    assert format_duration(seconds) == text


@given(st.integers(1, 10**6), st.sampled_from(["", "k", "M", "B", "T"]), st.booleans())
def test_counts_are_number_times_letter_in_any_case(number, letter, lower):
    factor = 1000 ** ["", "k", "M", "B", "T"].index(letter)
    text = f"{number:_}{letter}"
    assert parse_count(text.lower() if lower else text) == number * factor
    assert parse_count(number) == number
    assert parse_count(f" {number}.5 M ") == number * 10**6 + 500_000


@pytest.mark.parametrize(
    "text",
    ["", "k", "2 kk", "2kB", "1e9", "1.5", "0.0001k", "0", "-2M", "1__0", "_1", "1_", "2,5M", "nan",
     "2G", None, 1.5, True, 0, -1, []],
)  # fmt: skip
def test_counts_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError, match="write a number, and a letter for many"):
        parse_count(text)
