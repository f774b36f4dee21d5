from __future__ import annotations

import json
from itertools import pairwise

import pytest
from tests.data.chat_templates import CHATML, TEMPLATES, TOKENS

from modicum.core.errors import InputError
from modicum.data import PackedExamples, open_source, prepare
from modicum.data.chat_template import ChatTemplate
from modicum.data.row_formats import RowFormat, format_of
from modicum.data.view import facts_of, view_of

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes?"}
ROWS = {
    "messages": {"messages": [USER, ANSWER]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]
    },
    "alpaca": {"instruction": "Hi", "input": "", "output": "Yes?"},
    "prompt_completion": {"prompt": [USER], "completion": [ANSWER]},
}
TEXT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"


@pytest.mark.parametrize("name", ROWS)
def test_conversations_of_all_formats_are_one_text(name):
    assert format_of(ROWS[name]) == name
    template = ChatTemplate(CHATML)
    document = RowFormat(name, template).document(ROWS[name], "a:1", 9)
    assert document.text == TEXT
    assert [TEXT[start:end] for start, end in document.spans] == ["Yes?<|im_end|>\n"]


def test_text_stands_as_it_is():
    assert format_of({"text": "x"}) == format_of({"question": "x"}) == "text"
    row = {"prompt": "2+2=", "completion": "4"}
    document = RowFormat("prompt_completion", ChatTemplate(CHATML)).document(row, "a:1", 9)
    assert (document.prompt, document.text, document.spans) == ("2+2=", "4", None)
    plain = RowFormat("alpaca").document({"instruction": "A", "input": "B", "output": "C"}, "", 0)
    assert plain.text == "C"
    assert plain.prompt.endswith("### Instruction:\nA\n\n### Input:\nB\n\n### Response:\n")


def test_tools_and_parts_reach_the_template():
    template = ChatTemplate(
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}],
    }
    row = {"messages": [parts, call, {"role": "tool", "content": "7"}], "tools": '[{"name": "f"}]'}
    document = RowFormat("messages", template).document(row, "a:1", 9)
    assert document.text == ('[{"name": "f"}]<user>Hi<assistant>[{"name": "f"}]<tool>7')
    (span,) = document.spans
    assert document.text[span[0] : span[1]].endswith('[{"name": "f"}]')


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": []}, r"chat\.jsonl:2: messages: holds no list of turns"),
        ({"messages": [{"content": "x"}]}, r"chat\.jsonl:2: a turn has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, r":2: content: a turn's content is no"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "holds more than text"),
        ({"text": "x"}, r"chat\.jsonl:2: messages: holds no list|conversations: holds no list"),
        ({"messages": [USER], "tools": "[" * 100_000}, r"chat\.jsonl:2: tools: is not valid JSON"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(tmp_path, row, message):
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(ROWS["messages"]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(InputError, match=message):
        list(open_source(file, template=ChatTemplate(CHATML)).documents())
    with pytest.raises(InputError, match=r"tokenizer has none.*data.chat_template"):
        list(open_source(file).documents())


def test_somebody_unknown_is_named():
    row = {"conversations": [{"from": "gtp", "value": "x"}]}
    with pytest.raises(InputError, match=r"from somebody unknown.*Did you mean 'gpt'"):
        RowFormat("sharegpt", ChatTemplate(CHATML)).document(row, "a:1", 9)


@pytest.mark.parametrize("kind", ["text", "messages", "alpaca", "prompt_completion"])
def test_prompts_of_trained_tokens_are_intact(tmp_path, tokenizer, kind):
    """In 100 % of trained tokens, where examples fit; none stands without its question."""
    lines = []
    for n in range(60):
        asked, said = f"area_{n}(width" + ", height" * (n % 5), f"return {n} * " + "width" * (n % 3)
        lines.append(
            {
                "text": {"question": asked, "text": said},
                "messages": {
                    "messages": [
                        {"role": "user", "content": asked},
                        {"role": "assistant", "content": said},
                    ]
                },
                "alpaca": {"instruction": asked, "output": said},
                "prompt_completion": {"prompt": asked, "completion": said},
            }[kind]
        )
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = ChatTemplate(CHATML) if kind == "messages" else None
    prompt = "question" if kind == "text" else None
    source = open_source(file, prompt_column=prompt, template=template)
    prepared = prepare(source, tokenizer, tmp_path / "d", model_vocabulary=300)
    rows = PackedExamples(prepared.train, 256)
    intact = trained = 0
    for index in range(len(rows)):
        parts = list(view_of(rows, index).parts())
        for (before, is_answer), (answer, flag) in pairwise(parts):
            if flag:
                assert not is_answer
                trained += len(answer)
                said = tokenizer.decode(answer)
                number = said.split("return ")[1].split(" ")[0]
                intact += len(answer) * (f"area_{number}(" in tokenizer.decode(before))
    assert trained == rows.total_trained_tokens
    assert intact == trained > 0
    assert rows.counts.truncated == rows.counts.dropped == 0


def test_facts_about_examples(tmp_path, tokenizer):
    lines = [
        {"prompt": "a", "completion": "one"},
        {"prompt": "a", "completion": "one"},
        {"prompt": "b", "completion": " "},
        {"prompt": "c", "completion": "two"},
    ]
    train, held = tmp_path / "train.jsonl", tmp_path / "held.jsonl"
    train.write_text("".join(json.dumps(line) + "\n" for line in lines))
    held.write_text(json.dumps(lines[3]) + "\n" + json.dumps({"prompt": "d", "completion": "x"}))
    source, other = open_source(train), open_source(held)
    prepared = prepare(
        source, tokenizer, tmp_path / "d", model_vocabulary=300, others={"validation": other}
    )
    rows, validation = PackedExamples(prepared.train, 32), PackedExamples(prepared.validation, 32)
    facts = facts_of(source, [tokenizer.eos_id], rows, validation)
    assert (facts.duplicates, facts.empty, facts.overlap, facts.unended) == (1, 1, 1, 0)
    assert facts_of(source, [299], rows, validation).unended == 3
    assert facts.longest >= facts.median >= facts.shortest > 2


@pytest.mark.parametrize("name", ["chatml", "generation"])
def test_of_a_prompt_of_messages_no_answer_is_learned(name):
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    said = {"role": "assistant", "content": "No."}
    row = {"prompt": [USER, said, USER], "completion": [ANSWER, USER, ANSWER]}
    document = RowFormat("prompt_completion", template).document(row, "a:1", 9)
    learned = [document.text[start:end] for start, end in document.spans]
    assert [text.startswith("Yes?") for text in learned] == [True, True]
    # Of a conversation that is too long the earliest turns are left out, of the prompt first.
    for start, first, answers in ((0, 3, 2), (2, 1, 2), (4, 0, 1)):
        left = document.talk.since(start)
        assert left.first == first
        text, spans = left.written()
        assert [text[a:b].startswith("Yes?") for a, b in spans] == [True] * answers


@pytest.mark.parametrize("column", ["messages", "tools"])
def test_half_a_surrogate_pair_in_a_conversation_is_named(tmp_path, column):
    half = {"messages": [USER, ANSWER | {"content": "\ud83d"}], "tools": [{"name": "\ud83d"}]}
    row = ROWS["messages"] | {"tools": [{"name": "f"}]} | {column: half[column]}
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps(ROWS["messages"]) + "\n" + json.dumps(row) + "\n")
    source = open_source(file, template=ChatTemplate("{{ tools | tojson }}" + CHATML))
    with pytest.raises(InputError, match=r"chat\.jsonl:2: character \d+ is half a surrogate pair"):
        list(source.documents())
