"""The shapes of answers."""

from __future__ import annotations

from modicum.serve.answers import AnswerShape
from modicum.serve.choices import ChoicePiece, ShownToken


def test_of_tokens_of_one_text_the_likeliest_is_shown() -> None:
    likeliest = (("�", -0.5), ("a", -1.0), ("�", -2.0))
    piece = ChoicePiece(0, "�", (ShownToken("�", 0, -0.5, likeliest),), "length")
    shape = AnswerShape("base", chat=False, shows_tokens=True)
    (choice,) = shape.in_one([piece], {})["choices"]
    assert [list(each.items()) for each in choice["logprobs"]["top_logprobs"]] == [
        [("�", -0.5), ("a", -1.0)]
    ]
