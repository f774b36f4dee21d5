from __future__ import annotations

import pytest

from modicum.core.arguments import check_callable, check_type
from modicum.core.errors import InputError


def test_what_is_expected_passes_and_the_rest_is_one_sentence() -> None:
    check_type("a", str, "f(x)", "a text")
    check_type(None, (str, type(None)), "f(x)", "a text, or None")
    with pytest.raises(InputError) as error:
        check_type({}, str, "f(x)", "a text", {dict: "json.dumps(x)"})
    assert str(error.value) == "f(x): takes no dict; write json.dumps(x); allowed: a text"
    with pytest.raises(InputError, match=r"takes no class \(str\); allowed: a text"):
        check_type(str, str, "f(x)", "a text")


def test_a_listener_can_be_called() -> None:
    check_callable(None, "f(x)")
    check_callable(print, "f(x)")
    with pytest.raises(InputError, match="takes no int"):
        check_callable(3, "f(x)")
