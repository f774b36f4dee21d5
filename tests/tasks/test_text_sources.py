"""Which chat template writes a recipe's conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data import Tokenizer
from modicum.data.named_templates import NAMED
from modicum.recipe import Recipe
from modicum.tasks.text_sources import chat_template


def recipe(name: str | None) -> Recipe:
    return Recipe(data={"chat_template": name})


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.train(iter(["to be or not to be"] * 9), 260)


def test_a_new_model_has_a_template(tmp_path: Path) -> None:
    assert chat_template(recipe(None), None) == NAMED["chatml"]
    assert chat_template(recipe("zephyr"), None) == NAMED["zephyr"]
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}{{ eos_token }}")
    own = chat_template(recipe(str(file)), None)
    assert own is not None
    assert own.render([{"content": "x"}]) == "x<|end|>"


def test_a_tokenizer_keeps_its_own_and_lacks_others(plain: Tokenizer) -> None:
    assert chat_template(recipe(None), plain) is None
    own = plain.with_template("{{ 1 }}")
    found = chat_template(recipe(None), own)
    assert found is not None
    assert found.source == "{{ 1 }}"
    with pytest.raises(InputError, match=r"has no token <\|im_start\|>.*zephyr, alpaca"):
        chat_template(recipe("chatml"), plain)
    zephyr = chat_template(recipe("zephyr"), plain)
    assert zephyr is not None
    assert zephyr.tokens["eos_token"] == "<|end|>"
    marked = Tokenizer.train(iter(["a b"] * 9), 300, template=NAMED["chatml"])
    assert chat_template(recipe("chatml"), marked) is not None
    marked.inner.add_special_tokens(["</s>"])
    other = Tokenizer(marked.inner, marked.inner.token_to_id("</s>"))
    with pytest.raises(InputError, match=r"ends texts with </s>, not with <\|im_end\|>"):
        chat_template(recipe("chatml"), other)


def test_a_name_that_is_no_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither a template nor a file.*Did you mean 'chatml'"):
        chat_template(recipe(str(tmp_path / "chatlm")), None)
