"""Adapters that are changed by name between answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.serve.conftest import Folders, ending_with
from tests.serve.test_loading import logits

from modicum.core.errors import InputError
from modicum.serve import load_run
from modicum.serve.adapter_choice import AdapterChoice


def test_each_answer_has_the_adapters_that_are_named(folders: Folders) -> None:
    choice = AdapterChoice.loaded(folders.model, {"one": folders.run, "two": folders.other})
    assert str(choice) == "base  one*  two"
    model = choice.conversation.model
    alone = {
        "one": logits(load_run(folders.run).model),
        "two": logits(load_run(folders.other).model),
    }
    assert torch.equal(logits(model), alone["one"])
    choice.use(["two"])
    assert torch.equal(logits(model), alone["two"])
    choice.use(["base"])
    assert torch.equal(logits(model), logits(load_run(folders.model).model))
    choice.use(["one=0.7", "two=0.3"])
    assert str(choice) == "base  one*0.7  two*0.3"
    both = logits(model)
    one, two = (
        choice.served.adapters[choice.served.names[n].adapter or ""] for n in ("one", "two")
    )
    one.merge()
    two.merge()
    torch.testing.assert_close(logits(model), both)
    assert not any(torch.equal(both, each) for each in alone.values())


def test_a_run_s_own_adapter_is_the_first(folders: Folders) -> None:
    choice = AdapterChoice.loaded(folders.run, {"two": folders.other})
    assert str(choice) == "adapter*  base  two"
    assert choice.conversation.template is not None
    assert (
        AdapterChoice.loaded(folders.run, {"two": folders.other}, plain=True).conversation.template
        is None
    )


def test_a_text_ends_as_those_of_the_adapters_in_use(folders: Folders, tmp_path: Path) -> None:
    two, end = ending_with("<|im_start|>", folders.other, tmp_path / "two")
    choice = AdapterChoice.loaded(folders.model, {"one": folders.run, "two": two})
    own = choice.conversation.ends
    assert end not in own
    for words, ends in ((["two"], own | {end}), (["base"], own), (["one", "two=2"], own | {end})):
        choice.use(words)
        assert choice.conversation.ends == ends


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name an adapter"),
        (["ones"], "no adapter has this name"),
        (["one=much"], "is no weight"),
        (["one=nan"], "is no weight"),
        (["one", "one=2"], "is named twice"),
    ],
)
def test_a_wrong_word_changes_nothing(folders: Folders, words: list[str], said: str) -> None:
    choice = AdapterChoice.loaded(folders.model, {"one": folders.run})
    before = logits(choice.conversation.model)
    with pytest.raises(InputError, match=said):
        choice.use(words)
    assert choice.used == {"one": 1.0}
    assert torch.equal(logits(choice.conversation.model), before)
