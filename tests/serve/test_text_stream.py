from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from modicum.data.tokenizer import Tokenizer
from modicum.serve.text_stream import TextStream

same_tokenizer = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.sampled_from("to be🙂é日�\n "), max_size=60)


@given(text=TEXTS, stops=st.lists(st.text(st.sampled_from("to be🙂é"), min_size=1), max_size=3))
@same_tokenizer
def test_pieces_are_the_text_before_the_first_stop(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    stream, found = TextStream(tokenizer, stops), ""
    for token in tokenizer.encode(text):
        found += stream.add(token)
        assert text.startswith(found)
        if stream.stopped:
            break
    found += stream.finish()
    ends = [text.find(stop) for stop in stops if stop in text]
    if not ends:
        assert (found, stream.stopped) == (text, False)
        return
    assert stream.stopped
    # It stops at the first token that completes one, whatever would be found with later tokens.
    assert any(text.startswith(found + stop) for stop in stops)
    assert found == text[: len(found)]


@given(ids=st.lists(st.integers(0, 289), max_size=120))
@same_tokenizer
def test_any_tokens_give_what_they_give_in_one(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = TextStream(tokenizer)
    found = "".join(map(stream.add, ids)) + stream.finish()
    assert found == tokenizer.decode(ids)
    assert stream.length == len(found)


@given(text=st.text(st.sampled_from("to be日é"), min_size=30, max_size=150))
@example(text="日" * 60)
@same_tokenizer
def test_long_runs_of_bytes_stay_characters(with_bytes: Tokenizer, text: str) -> None:
    stream, ids = TextStream(with_bytes), with_bytes.encode(text)
    found = "".join(map(stream.add, ids)) + stream.finish()
    assert found == with_bytes.decode(ids) == text.removeprefix(" ")


@given(text=st.text(st.sampled_from("to be日é"), max_size=80), places=st.integers(1, 90))
@example(text="to be", places=2)
@same_tokenizer
def test_what_continues_a_text_keeps_its_first_blank(
    with_bytes: Tokenizer, text: str, places: int
) -> None:
    ids = with_bytes.encode(text)
    before, rest = ids[:places], ids[places:]
    known = with_bytes.decode(before)
    if known.endswith("�"):  # within a character
        return
    stream = TextStream(with_bytes, after=before)
    found = "".join(map(stream.add, rest)) + stream.finish()
    assert known + found == with_bytes.decode(ids)
    assert stream.length == len(found)
    assert known + with_bytes.decode_after(before, rest) == with_bytes.decode(ids)


def test_what_may_begin_a_stop_is_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["be or"])
    pieces = [stream.add(token) for letter in "to be o" for token in tokenizer.encode(letter)]
    assert "".join(pieces) == "to "
    assert stream.finish() == "be o"
    stream = TextStream(tokenizer, ["b"])
    assert [stream.add(token) for token in tokenizer.encode("ab")] == ["a", ""]
    assert stream.stopped
    with pytest.raises(ValueError, match="ended"):
        stream.add(1)


def test_an_unfinished_character_comes_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    stream = TextStream(tokenizer)
    assert [text for token in ids if (text := stream.add(token))] == ["a"]
    assert stream.finish() == tokenizer.decode(ids)[1:]


@pytest.mark.parametrize(("name", "word"), [("tokenizer", "ÿ"), ("with_bytes", "<0xFF>")])
def test_bytes_that_never_become_a_character_are_given_out_as_they_come(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    bad = tokenizer.inner.token_to_id(word)
    ids, decode = [bad] * 200 + tokenizer.encode("to be"), tokenizer.decode
    decoded: list[int] = []

    def counted(ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = TextStream(tokenizer)
    pieces = [stream.add(token) for token in ids]
    assert len("".join(pieces[:50])) > 40
    assert max(decoded) < 40
    assert "".join(pieces) + stream.finish() == decode(ids)
    assert stream.length == len(decode(ids))
