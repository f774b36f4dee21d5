"""Conversations that are longer than a row lose their earliest exchanges, each as one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_templates import TEMPLATES, TOKENS

from modicum.core.errors import InputError
from modicum.data import PackedExamples, open_source, prepare
from modicum.data.chat_template import ChatTemplate
from modicum.data.encoding import encode
from modicum.data.readers import Document
from modicum.data.survey import survey
from modicum.data.talks import Talk, shortened
from modicum.data.view import view_of

PLAIN = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


def message(role, content):
    return {"role": role, "content": content}


@st.composite
def long_talks(draw):
    """A system turn or none, and exchanges, some with a call of a tool."""
    said = [message("system", "be brief")] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 5))):
        said.append(message("user", f"q{number}" + " x" * draw(st.integers(0, 9))))
        if draw(st.booleans()):
            said += [message("assistant", f"call{number}"), message("tool", f"found{number}")]
        said.append(message("assistant", f"a{number}" + " y" * draw(st.integers(0, 9))))
    return said


@given(long_talks(), st.integers(20, 200))
def test_as_few_exchanges_are_left_out_as_it_takes(messages, room):
    talk = Talk(PLAIN, messages)

    def fits(other):
        return len(other.written()[0]) <= room

    found = shortened(talk, fits)
    system = [each for each in messages if each["role"] == "system"]
    ends = [talk.since(start) for start in talk.starts[1:]]
    longest = next((each for each in ends if fits(each)), None)
    if longest is not None:
        assert found == (longest, len(messages) - len(longest.messages), False)
        # System turn and complete turns alone are there, and all answers among them are learned.
        turns = messages[found.turns + len(system) :]
        assert found.talk.messages == [*system, *turns]
        text, spans = found.talk.written()
        answers = [each["content"] for each in longest.messages if each["role"] == "assistant"]
        assert [text[a:b].removeprefix("<assistant>") for a, b in spans] == answers
        return
    last = talk.since(talk.starts[-1])
    if found is None:
        assert not fits(last.without(len(messages[talk.starts[-1]]["content"]) - 1))
        return
    kept, turns, truncated = found
    assert truncated
    assert turns == len(messages) - len(last.messages)
    assert fits(kept)
    asked, whole = (each.messages[each.starts[0]]["content"] for each in (kept, last))
    assert whole.endswith(asked)
    assert 0 < len(asked) < len(whole) or fits(last)
    assert kept.messages[kept.starts[0] + 1 :] == last.messages[last.starts[0] + 1 :]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(40, 120))
def test_what_is_left_is_what_the_template_writes_of_fewer_turns(tokenizer, name, turns, room):
    template, said = ChatTemplate(TEMPLATES[name], TOKENS), [message("system", "short")]
    for number in range(turns):
        said += [message("user", f"question {number}"), message("assistant", f"answer {number}")]
    talk = Talk(template, said)
    text, spans = talk.written()
    (encoded,) = encode(tokenizer, [Document(text, None, "x:1", 9, tuple(spans), talk)], room=room)
    if encoded.turns == 0 and not encoded.truncated:
        return
    assert len(encoded.ids) <= room
    if not encoded.truncated:
        left = [said[0], *said[1 + encoded.turns :]]
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == template.render(left)
        assert encoded.turns % 2 == 0


def test_a_talk_without_an_answer_or_a_question_is_left_alone():
    for messages in ([message("user", "a")], [message("assistant", "b")], []):
        assert shortened(Talk(PLAIN, messages), lambda talk: False) is None


def test_a_template_that_refuses_the_rest_is_named(tokenizer):
    needs = (
        "{% if messages[0].content != 'first' %}{{ raise_exception('no first') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    said = [message("user", "first"), message("assistant", "one")]
    talk = Talk(ChatTemplate(needs), [*said, message("user", "two"), message("assistant", "2")])
    text, spans = talk.written()
    document = Document(text, None, "chat.jsonl:7", 9, tuple(spans), talk)
    with pytest.raises(InputError, match=r"chat.jsonl:7: .*no first"):
        encode(tokenizer, [document], room=4)


def test_run_and_plan_count_what_is_left_out(tmp_path, tokenizer):
    def talk(count, answer):
        said = [message("system", "short")]
        for number in range(count):
            said += [message("user", f"question {number}"), message("assistant", answer)]
        return {"messages": said}

    rows = [talk(1, "yes"), talk(8, "yes"), talk(9, "no"), talk(1, "long " * 50), {"messages": [
        message("user", "x" * 80), message("assistant", "no")]}]  # fmt: skip
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(file, template=PLAIN)
    length = 70
    store = prepare(source, tokenizer, tmp_path / "d", model_vocabulary=300, room=length + 1).train
    packed = PackedExamples(store, length)
    found = store.left_out.in_counts(packed.counts.as_json())
    assert (found["shortened"], found["truncated"], found["dropped"]) == (2, 1, 1)
    assert found["empty"] == 0
    assert found["turns_left_out"] > 10
    texts = [
        tokenizer.decode(tokens)
        for row in range(len(packed))
        for tokens in [view_of(packed, row).tokens]
    ]
    assert sum(text.count("<system>short") for text in texts) == 3
    again = prepare(source, tokenizer, tmp_path / "d", model_vocabulary=300, room=length + 1)
    assert again.reused
    assert again.train.left_out == store.left_out
    planned = survey(
        source, tokenizer, vocabulary_size=300,
        sequence_length=length, boundaries=True, too_long="truncate",
    )  # fmt: skip
    assert planned.exact
    assert planned.left_out == store.left_out
    assert planned.counts == packed.counts


def test_blank_answers_are_counted_by_plan_and_run(tmp_path, tokenizer):
    lines = [{"prompt": f"p{n}", "completion": " " if n % 3 == 0 else "one"} for n in range(9)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = open_source(file)
    store = prepare(source, tokenizer, tmp_path / "d", model_vocabulary=300)
    assert store.train.left_out.empty == 3
    assert store.documents == 6
    planned = survey(
        source, tokenizer, vocabulary_size=300,
        sequence_length=32, boundaries=True, too_long="truncate",
    )  # fmt: skip
    assert planned.left_out == store.train.left_out
