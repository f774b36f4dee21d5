"""Which chat template writes a recipe's conversations."""

from __future__ import annotations

from pathlib import Path

import pytest

from modicum.core.errors import InputError
from modicum.data import Tokenizer
from modicum.data.named_templates import NAMED
from modicum.data.sources import Source
from modicum.recipe import Recipe
from modicum.tasks.text_sources import chat_template, sources


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


def test_an_end_that_no_file_spells_is_the_tokenizer_s(plain: Tokenizer, tmp_path: Path) -> None:
    bare = Tokenizer(plain.inner, plain.eos_id)  # as GPT-2's, whose files give the end's number
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}{{ eos_token }}")
    for name in ("zephyr", "alpaca", str(file)):
        found = chat_template(recipe(name), bare)
        assert found is not None
        assert "x<|end|>" in found.render([{"role": "assistant", "content": "x"}])
    own = bare.with_template(file.read_text()).chat_template
    assert own is not None
    assert own.render([{"content": "x"}]) == "x<|end|>"


def written(folder: Path, *names: str) -> Path:
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"text of {name}")
    return folder


@pytest.mark.parametrize("part", ["validation", "test"])
def test_data_of_a_part_that_would_be_trained_on_is_refused(part: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "texts", "a.txt", "b.txt", "c.txt")
    (tmp_path / "link.txt").symlink_to(folder / "b.txt")
    data = {"path": str(folder), f"{part}_path": str(tmp_path / "link.txt")}
    said = "'b.txt' is among the files of data.path, so it would be trained on; name it in"
    with pytest.raises(InputError, match=said) as caught:
        sources(Recipe(data=data))
    assert caught.value.field == f"data.{part}_path"
    found, others = sources(Recipe(data=data | {"exclude": ["b.txt"]}))
    assert isinstance(found, Source)
    assert [file.name for file in found.files] == ["a.txt", "c.txt"]
    assert list(others) == [part]
    with pytest.raises(InputError, match=r"holds all that data\.path names") as caught:
        sources(Recipe(data=data | {"path": str(folder / "b.txt")}))
    assert f"or leave it out and set data.{part}_fraction" in str(caught.value)


def test_of_several_sources_the_one_that_holds_it_is_named(tmp_path: Path) -> None:
    first = written(tmp_path / "first", "a.txt")
    second = written(tmp_path / "second", "b.txt", "c.txt", "d.txt")
    held = written(tmp_path / "held", "e.txt")
    for name in ("c.txt", "d.txt"):
        (held / name).symlink_to(second / name)
    data = {"sources": [{"path": str(each)} for each in (first, second)]}
    said = r"'c.txt' and 1 more are among the files of data.sources.1.path.*data.sources.1.exclude"
    with pytest.raises(InputError, match=said):
        sources(Recipe(data=data | {"validation_path": str(held)}))


def test_a_data_set_of_the_hub_is_the_same_however_it_is_spelled() -> None:
    data = {"path": "hub:owner/name,config=main", "streaming": True, "format": "text"}
    same = data | {"validation_path": "hub:owner/name,split=train,config=main"}
    with pytest.raises(InputError, match=r"holds all that data\.path names") as caught:
        sources(Recipe(data=same))
    assert caught.value.field == "data.validation_path"
    _, others = sources(Recipe(data=data | {"validation_path": "hub:owner/name,split=test"}))
    assert list(others) == ["validation"]
