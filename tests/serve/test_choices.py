"""How tokens are shown: each as it is spelled within a text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modicum.data.tokenizer import Tokenizer
from modicum.serve.choices import _Choice
from modicum.serve.served_models import ServedModels
from modicum.serve.text_stream import REPLACEMENT
from modicum.serve.tokens import Ended, MadeToken


def test_a_token_has_the_blank_that_begins_it(served: ServedModels, with_bytes: Tokenizer) -> None:
    words = {"▁": " ", "t": "t", "<0x0A>": "\n", "<0xE6>": REPLACEMENT}
    tokens = [with_bytes.inner.token_to_id(word) for word in words]
    likeliest = tuple((token, -float(place)) for place, token in enumerate(tokens))
    choice, shown = _Choice(0, replace(served, tokenizer=with_bytes), ()), []
    for token in tokens[:2]:
        shown += choice.take(MadeToken(token, -0.5, likeliest)).tokens
    shown += choice.take(Ended("length")).tokens
    assert [each.text for each in shown] == [" ", "t"]
    spelled = tuple((text, -float(place)) for place, text in enumerate(words.values()))
    assert all(each.likeliest == spelled for each in shown)


@pytest.mark.parametrize("text", ["to be", "é", "🙂", "<|im_end|>"])
def test_a_token_of_bytes_is_spelled_as_it_is_alone(
    served: ServedModels, tokenizer: Tokenizer, text: str
) -> None:
    choice = _Choice(0, served, ())
    ((ids, _),) = tokenizer.encode_marked([text], [()])
    alone = [tokenizer.decode([token], skip_special_tokens=False) for token in ids]
    assert [choice._spelled(token) for token in ids] == alone
