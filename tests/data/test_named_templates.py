"""Chat templates that a recipe can name, and the tokenizer that is trained for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from tests.data.test_chat_template import conversations

from modicum.core.errors import InputError
from modicum.data import Tokenizer
from modicum.data.named_templates import DEFAULT, NAMED
from modicum.recipe.paths import CHAT_TEMPLATES, anchored

TALK = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "to be?"},
    {"role": "assistant", "content": "or not"},
]
CALLS = [
    TALK[1],
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    {"role": "tool", "content": "found"},
    TALK[2],
]


def trained(name: str) -> Tokenizer:
    text = NAMED[name].render(TALK)
    return Tokenizer.train(iter([text] * 20), 280, template=NAMED[name])


def test_recipes_know_their_names(tmp_path):
    assert set(CHAT_TEMPLATES) == set(NAMED)
    assert DEFAULT in NAMED
    for name, meant in (("chatml", "chatml"), ("./chatml", str(tmp_path / "chatml"))):
        recipe = {"data": {"chat_template": name}}
        assert anchored(recipe, tmp_path)["data"]["chat_template"] == meant


@pytest.mark.parametrize("name", NAMED)
@given(messages=conversations())
def test_the_assistants_words_and_the_end_are_trained(name, messages):
    template = NAMED[name]
    text, spans = template.conversation(messages)
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    learned = [text[start:end].rstrip("\n") for start, end in spans]
    assert learned == [answer + template.tokens["eos_token"] for answer in answers]
    # What the assistant is asked with is what stands before its answer.
    number = next(n for n, each in enumerate(messages) if each["role"] == "assistant")
    asked = template.render(messages[:number], generation=True)
    assert text.startswith(asked + answers[0])


@pytest.mark.parametrize("name", NAMED)
def test_a_trained_tokenizer_has_the_templates_tokens(name, tmp_path):
    template, tokenizer = NAMED[name], trained(name)
    assert tokenizer.vocabulary_size <= 280
    assert tokenizer.token(tokenizer.eos_id) == template.tokens["eos_token"]
    assert tokenizer.chat_template.source == template.source
    for word in template.special:
        assert len(tokenizer.encode(word)) == 1
        # No merge was spent on a part of it.
        inside = [
            piece for piece in tokenizer.inner.get_vocab() if piece in word and len(piece) > 2
        ]
        assert set(inside) <= {word, "end", "begin", "of", "text", "id", "im", "start", "header"}
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.eos_id == tokenizer.eos_id
    assert again.chat_template.render(TALK) == template.render(TALK)


@pytest.mark.parametrize("name", NAMED)
def test_transformers_writes_the_same_tokens(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = trained(name)
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for generation in (False, True):
        text = NAMED[name].render(TALK, generation=generation)
        ((ids, _),) = tokenizer.encode_marked([text], [()])
        found = theirs.apply_chat_template(
            TALK, add_generation_prompt=generation, return_dict=False
        )
        assert found == ids
    assert theirs.eos_token_id == tokenizer.eos_id


def test_chatml_writes_tools_and_their_calls_and_the_others_say_that_they_do_not():
    tools = [{"type": "function", "function": {"name": "f"}}]
    text, spans = NAMED["chatml"].conversation([TALK[0], *CALLS], tools=tools)
    assert text.startswith("<|im_start|>system\nbe brief\n\nTools that can be called:\n{")
    assert text.count("be brief") == 1
    assert '<tool_call>{"name": "f"}</tool_call><|im_end|>\n<|im_start|>tool\nfound' in text
    assert [text[start:end] for start, end in spans] == [
        '<tool_call>{"name": "f"}</tool_call><|im_end|>\n', "or not<|im_end|>\n",
    ]  # fmt: skip
    for name in set(NAMED) - {"chatml"}:
        for messages, given_tools in ((CALLS, None), (TALK, tools)):
            with pytest.raises(InputError, match="no tools and calls of them; take chatml"):
                NAMED[name].render(messages, tools=given_tools)


def test_a_vocabulary_has_room_for_bytes_and_special_tokens():
    with pytest.raises(InputError, match=r"at least 258 tokens.*<\|im_end\|>, <\|im_start\|>"):
        Tokenizer.train(iter(["a b"]), 257, template=NAMED["chatml"])


def test_the_configuration_names_the_tokens():
    found = json.loads(trained("llama-3").companions["tokenizer_config.json"])
    assert found["bos_token"] == "<|begin_of_text|>"
    assert found["eos_token"] == found["pad_token"] == "<|eot_id|>"
