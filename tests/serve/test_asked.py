"""Bodies of requests: what is taken, what is refused, and that there is nothing in between."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modicum.serve.api_error import ApiError
from modicum.serve.asked import AskedAnswer, AskedBody, AskedText, parse

CHAT = {"model": "m", "messages": [{"role": "user", "content": "to be"}]}
TEXT = {"model": "m", "prompt": "to be"}
KINDS = {AskedAnswer: CHAT, AskedText: TEXT}
PARAMETERS = sorted({*AskedAnswer.model_fields, *AskedText.model_fields, "tools", "user", "x"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def asked(base: dict[str, Any], **more: Any) -> Any:
    return parse(json.dumps(base | more).encode(), AskedAnswer if base is CHAT else AskedText)


def refused(base: dict[str, Any], **more: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(base, **more)
    assert caught.value.status == 400
    assert "\n" not in caught.value.problem
    return caught.value


@given(kind=st.sampled_from(list(KINDS)), name=st.sampled_from(PARAMETERS), value=JSON)
def test_any_value_is_taken_or_refused_by_its_name(
    kind: type[AskedBody], name: str, value: Any
) -> None:
    body, said = json.dumps(KINDS[kind] | {name: value}).encode(), None
    try:
        assert isinstance(parse(body, kind), kind)
    except ApiError as error:
        said = error
    if said is not None:
        assert said.status == 400
        assert "\n" not in said.problem
        assert said.code == "invalid_json" or (said.param or name).split(".")[0] == name


@given(body=st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_refused_in_a_sentence(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, AskedText)
    assert caught.value.status == 400
    assert caught.value.problem


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[" * 100_000, b'{"model": NaN}', b"\xff\xfe", b"9" * 5000, b'"model"',
        b'{"model": "m", "prompt": "\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_json_is_said(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(body, AskedText)
    assert caught.value.code == "invalid_json"


def test_the_defaults_are_openai_s() -> None:
    answer, text = asked(CHAT), asked(TEXT)
    for each in (answer, text):
        assert (each.temperature, each.top_p, each.n, each.stop) == (1.0, 1.0, 1, [])
        assert (each.seed, each.stream, each.likeliest) == (None, False, None)
    assert (answer.most_tokens, text.most_tokens) == (None, 16)
    assert asked(CHAT, temperature=None, stop=None, seed=None) == answer


def test_what_is_said_in_two_ways_is_one_value() -> None:
    assert asked(CHAT, stop="a").stop == asked(CHAT, stop=["a"]).stop == ["a"]
    assert asked(CHAT, max_tokens=3).most_tokens == 3
    assert asked(CHAT, max_completion_tokens=3).most_tokens == 3
    refused(CHAT, max_tokens=3, max_completion_tokens=4)
    parts = [{"type": "text", "text": "to "}, {"type": "text", "text": "be"}]
    turns = [{"role": "user", "content": parts}]
    assert asked(CHAT, messages=turns) == asked(CHAT)
    assert asked(CHAT, logprobs=True).likeliest == 0
    assert asked(CHAT, logprobs=True, top_logprobs=3).likeliest == 3
    assert asked(TEXT, logprobs=3).likeliest == 3
    prompts = ["a", ["a", "b"], [1, 2], [[1, 2], [3]]]
    found = [["a"], ["a", "b"], [(1, 2)], [(1, 2), (3,)]]
    assert [asked(TEXT, prompt=each).prompt for each in prompts] == found


def test_an_answer_that_a_client_sends_back_is_a_turn() -> None:
    back = {
        "role": "assistant", "content": "be", "refusal": None, "annotations": [], "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert asked(CHAT, messages=[back]).messages[0].content == "be"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    error = refused(CHAT, messages=[back | {"tool_calls": [call]}])
    assert error.param == "messages.0.tool_calls"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []), ("presence_penalty", 0.0), ("response_format", {"type": "text"}),
        ("user", "me"), ("metadata", {"a": "b"}), ("logit_bias", {}), ("store", False),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_is_taken(name: str, value: Any) -> None:
    assert asked(CHAT, **{name: value}) == asked(CHAT)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{}]), ("presence_penalty", 0.5), ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}), ("best_of", 2), ("echo", True), ("reasoning_effort", "low"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(name: str, value: Any) -> None:
    for base in (CHAT, TEXT):
        error = refused(base, **{name: value})
        assert (error.param, error.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", 2.1, "less than or equal to 2"),
        ("temperature", "1", "valid number"),
        ("temperature", True, "valid number"),
        ("top_p", -0.1, "greater than or equal to 0"),
        ("n", 0, "greater than or equal to 1"),
        ("n", 1.5, "integer"),
        ("seed", 2**63, "less than"),
        ("stop", [""], "at least 1 character"),
        ("stop", ["a"] * 17, "at most 16"),
        ("max_tokens", 0, "greater than or equal to 1"),
        ("stream_options", {"include_usage": True}, "`stream` is not true"),
        ("stream", 1, "boolean"),
        ("temprature", 1, "Did you mean 'temperature'?"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "type 'text'"),
        ("messages", [{"role": "user", "content": [{"type": "x", "text": "y"}]}], "reads text"),
        ("messages", [{"role": "user"}], "required"),
        ("messages", ["to be"], "dictionary"),
        ("top_logprobs", 2, "needs `logprobs: true`"),
    ],
)
def test_a_wrong_value_is_said_with_its_place(name: str, value: Any, said: str) -> None:
    error = refused(CHAT, **{name: value})
    assert said in error.problem
    assert (error.param or name).startswith(name)


@pytest.mark.parametrize("prompt", [None, [], 3, [True], ["a", 1], [[]], {}, [["a"]], [[1, 2.0]]])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    if prompt == [[]]:
        return  # without a token: the model's own limits decide
    assert refused(TEXT, prompt=prompt).param == "prompt"


def test_a_misspelled_name_comes_before_what_is_then_missing() -> None:
    said = refused({"model": "m"}, promt="to be")
    assert (said.param, said.code) == ("promt", "unknown_parameter")
    assert "Did you mean 'prompt'?" in said.problem
