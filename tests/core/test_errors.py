from __future__ import annotations

import pytest

from modicum.core.errors import (
    DoesNotFit,
    FoundWanting,
    InputError,
    Interrupted,
    ModicumError,
    nearest,
)


def test_exit_codes_are_those_of_the_command_line():
    codes = {ModicumError: 1, InputError: 2, DoesNotFit: 3, Interrupted: 4, FoundWanting: 5}
    assert {kind: kind.exit_code for kind in codes} == codes


@pytest.mark.parametrize(
    ("word", "candidates", "found"),
    [
        ("lorra", ["lora", "dora", "galore"], "lora"),
        ("learning_rte", ["learning_rate", "final_fraction"], "learning_rate"),
        ("xyz", ["lora", "dora"], None),
        ("lora", [], None),
    ],
)
def test_nearest_match(word, candidates, found):
    assert nearest(word, candidates) == found


def test_the_message_says_where_what_and_what_instead():
    error = InputError(
        "unknown method",
        file="r.yaml",
        line=3,
        field="adapter.method",
        value="lorra",
        allowed="dora, lora",
        candidates=["dora", "lora"],
    )
    assert str(error) == (
        "r.yaml:3: adapter.method: unknown method (found: 'lorra'); allowed: dora, lora. "
        "Did you mean 'lora'?"
    )


def test_locating_fills_in_what_is_missing_and_keeps_the_rest():
    error = InputError("too small", value=0, allowed="at least 1", line=9)
    located = error.located(file="r.yaml", line=3, field="training.steps")
    assert str(located) == "r.yaml:9: training.steps: too small (found: 0); allowed: at least 1"
    assert str(located.located(file="other", field="other")) == str(located)
    assert InputError("x", value=None).located(file="f").args == ("f: x (found: None)",)


def test_the_word_that_is_looked_up_may_differ_from_the_value():
    error = InputError("unknown key", field="training.step", word="step", candidates=["steps"])
    assert error.suggestion == "steps"
    assert InputError("bad", value=3, candidates=["three"]).suggestion is None


def test_what_would_make_it_fit_stands_under_the_message():
    error = DoesNotFit("too large", ["--set a=1", "--set b=2"])
    assert str(error).splitlines() == ["too large", "  - --set a=1", "  - --set b=2"]


def test_a_message_is_one_short_line_whatever_it_names():
    error = InputError("no\nsuch", file="a\nb\x1b[31m", field="é", value="9" * 1000)
    assert str(error).startswith("a b\\x1b[31m: é: no such (found: '999")
    assert str(error).endswith("... (1002 characters))")
    assert len(str(error)) < 400
