from __future__ import annotations

import json
from datetime import datetime

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_templates import CHATML, TEMPLATES, TOKENS

from modicum.core.errors import InputError
from modicum.data import IGNORED, PackedExamples, Tokenizer, open_source, prepare
from modicum.data.chat_template import ChatTemplate, flattened, own_template
from modicum.data.view import view_of

SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|end|>", "<end_of_turn>"]


@st.composite
def conversations(draw):
    """Turns of user and assistant, whose words say whose they are."""
    words, turns = st.integers(1, 4), draw(st.integers(1, 3))
    numbers = iter(range(100))
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": "be brief"})
    for _ in range(turns):
        for role, letter in (("user", "u"), ("assistant", "a")):
            content = " ".join(f"{letter}{next(numbers)}{letter}" for _ in range(draw(words)))
            messages.append({"role": role, "content": content})
    return messages


@pytest.fixture(scope="module")
def special(tokenizer: Tokenizer, tmp_path_factory) -> Tokenizer:
    """The small tokenizer with special tokens."""
    folder = tmp_path_factory.mktemp("special")
    tokenizer.save(folder)
    found = Tokenizer.load(folder)
    found.inner.add_special_tokens(SPECIAL)
    return found


@pytest.mark.parametrize("name", TEMPLATES)
@given(messages=conversations())
def test_the_assistants_words_are_trained_and_no_others(name, messages):
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    text, spans = template.conversation(messages)
    assert text == template.render(messages)
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    assert len(spans) == len(answers)
    for (start, end), answer in zip(spans, answers, strict=True):
        assert answer in text[start:end]
    trained = "".join(text[start:end] for start, end in spans)
    assert all(each["content"] not in trained for each in messages if each["role"] != "assistant")
    assert template.conversation(messages, train_on="last") == (text, spans[-1:])


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_are_those_of_transformers(name):
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [{"role": "user", "content": "é <b> "}, {"role": "assistant", "content": "'x'"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        for generation in (False, True):
            expected, _ = rendering.render_jinja_template(
                [messages],
                tools=tools,
                chat_template=TEMPLATES[name],
                add_generation_prompt=generation,
                **TOKENS,
            )
            template = ChatTemplate(TEMPLATES[name], TOKENS)
            assert template.render(messages, tools=tools, generation=generation) == expected[0]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15)
@given(st.lists(conversations(), min_size=1, max_size=4), st.integers(150, 200))
def test_the_view_is_what_the_loss_sums_token_by_token(
    tmp_path_factory, special, name, talks, length
):
    folder = tmp_path_factory.mktemp("chat")
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    source = open_source(file, template=template)
    prepared = prepare(source, special, folder / "data", model_vocabulary=400)
    rows = PackedExamples(prepared.train, length, too_long="split")
    scores = torch.randn(400, generator=torch.Generator().manual_seed(0))
    of_token = -scores.log_softmax(0)
    for index in range(len(rows)):
        batch, view = rows.batch([index]), view_of(rows, index)
        logits = scores.expand(length, 400)
        summed = F.cross_entropy(logits, batch.labels[0], ignore_index=IGNORED, reduction="sum")
        trained = [t for t, flag in zip(view.tokens, view.trained, strict=True) if flag]
        assert trained == [label for label in batch.labels[0].tolist() if label != IGNORED]
        assert float(of_token[trained].sum()) == pytest.approx(float(summed), rel=1e-5)
        assert len(trained) == rows.count(index)
    # What is trained is what the template says, as characters.
    texts = [template.conversation(talk) for talk in talks]
    expected = sorted(text[start:end] for text, spans in texts for start, end in spans)
    if rows.counts.split == 0:
        found = sorted(
            special.decode(tokens, skip_special_tokens=False)
            for index in range(len(rows))
            for tokens, flag in view_of(rows, index).parts()
            if flag
        )
        assert found == expected


def test_a_template_that_rewrites_earlier_turns_trains_the_last_alone():
    forgets = (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last or m.role == 'user' %}"
        "{{ m.content }}{% else %}{{ m.content.split('/')[-1] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    template, turn = ChatTemplate(forgets), {"role": "assistant", "content": "thought/said"}
    messages = [{"role": "user", "content": "u"}, turn] * 2
    with pytest.raises(InputError, match=r"data.train_on: last"):
        template.conversation(messages)
    text, spans = template.conversation(messages, train_on="last")
    assert [text[start:end] for start, end in spans] == ["thought/said"]


def test_a_template_cannot_leave_its_sandbox():
    called = "{{ '%Y' | tojson(cls=namespace, encode=strftime_now) }}"
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", called):
        with pytest.raises(InputError, match="does not take these messages"):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])
    with pytest.raises(InputError, match="this is no chat template"):
        ChatTemplate("{% for %}").render([])
    with pytest.raises(InputError, match="roles must alternate"):
        ChatTemplate(TEMPLATES["llama 2"], TOKENS).render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    ["{{ 1 // 0 }}", "{{ messages[9].role.x }}", "{{ 'a' * 10 ** 20 }}", "{{ range(9e9) }}"],
)
def test_however_a_template_fails_it_is_one_sentence(source):
    with pytest.raises(InputError, match="does not take these messages"):
        ChatTemplate(source).render([{"role": "user", "content": "Hi"}])


def test_a_tokenizers_files_name_its_template():
    configuration = {"chat_template": CHATML, "eos_token": {"content": "</s>"}, "bos_token": None}
    found = own_template({"tokenizer_config.json": json.dumps(configuration)})
    assert found == ChatTemplate(CHATML, {"eos_token": "</s>"})
    newer = {"chat_template.jinja": "x", "tokenizer_config.json": json.dumps(configuration)}
    assert own_template(newer) == ChatTemplate("x", {"eos_token": "</s>"})
    several = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    listed = {"tokenizer_config.json": json.dumps({"chat_template": several})}
    assert own_template(listed) == ChatTemplate("d", tool_use="t")
    assert own_template(listed | {"chat_template.jinja": "x"}) == ChatTemplate("x")
    listed = {"tokenizer_config.json": json.dumps({"chat_template": several[1:]})}
    with pytest.raises(InputError, match="none called 'default'"):
        own_template(listed)
    listed = {"tokenizer_config.json": json.dumps({"chat_template": [1, {"name": []}]})}
    with pytest.raises(InputError, match="none called 'default'"):
        own_template(listed)
    assert own_template({}) is None


ASSISTANT_FIRST = [
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y"},
]


def test_of_a_first_turn_what_the_template_writes_before_it_is_not_trained():
    text, spans = ChatTemplate(CHATML).conversation(ASSISTANT_FIRST)
    assert [text[a:b] for a, b in spans] == ["Hi<|im_end|>\n", "y<|im_end|>\n"]
    text, spans = ChatTemplate(CHATML).conversation(ASSISTANT_FIRST[:1])
    assert [text[a:b] for a, b in spans] == ["Hi<|im_end|>\n"]
    adds = "{{ 'System: be brief. ' }}{% for m in messages %}{{ m.role }}: {{ m.content | trim }}"
    text, spans = ChatTemplate(adds + " {% endfor %}").conversation(ASSISTANT_FIRST)
    assert [text[a:b] for a, b in spans] == ["Hi ", "assistant: y "]
    called = [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]
    calls = "{% for m in messages %}<{{ m.role }}>{{ m.tool_calls | tojson }}{% endfor %}"
    text, spans = ChatTemplate(calls).conversation(called)
    assert spans == [(0, len(text))]  # nothing shows where the header ends


@pytest.mark.parametrize(
    "said", [{"thinking": "R", "content": "C"}, {"content": "<think>R</think>C"}]
)
def test_of_a_first_turn_the_thoughts_are_trained_and_not_its_header(said):
    thinks = (
        "{% for m in messages %}<{{ m.role }}>{% set parts = m.content.split('</think>') %}"
        "{% if m.thinking %}[{{ m.thinking }}]"
        "{% elif parts[1:] %}[{{ parts[0].split('<think>')[-1] }}]{% endif %}"
        "{{ parts[-1] }}{% endfor %}"
    )
    messages = [{"role": "assistant", **said}, *ASSISTANT_FIRST[1:]]
    text, spans = ChatTemplate(thinks).conversation(messages)
    assert [text[a:b] for a, b in spans] == ["[R]C", "<assistant>y"]


@pytest.mark.parametrize("name", ["chatml", "generation"])
def test_of_a_prompt_nothing_is_trained(name):
    template = ChatTemplate(TEMPLATES[name], TOKENS)
    messages = [*ASSISTANT_FIRST[1:], *ASSISTANT_FIRST[1:], *ASSISTANT_FIRST[1:]]
    _, every = template.conversation(messages)
    assert template.conversation(messages, first=2)[1] == every[1:]
    assert template.conversation(messages, first=5)[1] == every[2:]
    assert template.conversation(messages, first=3, train_on="last")[1] == every[2:]
    assert template.conversation(messages, first=6)[1] == []


def test_a_date_is_that_of_the_template_where_it_has_one():
    dated = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=datetime(2024, 7, 5))
    assert dated.render([]) == "05 Jul 2024"
    assert dated.dated
    assert not ChatTemplate(CHATML).dated
    today = ChatTemplate(dated.source)
    assert today.render([]) != dated.render([])
    assert today.digest == dated.digest


def test_conversations_with_tools_are_written_by_the_template_for_them():
    template = ChatTemplate("d", tool_use="{{ tools[0].name }}")
    assert template.render([], tools=[{"name": "f"}]) == "f"
    assert template.render([]) == template.render([], tools=[]) == "d"
    plain = "0c93c51aa6874d8b99d7a7ba0b0b3a9ce5155bbb5d5d70c68f0a0f3c5fd5e9a7"
    assert ChatTemplate("d").digest == plain  # runs of before resume
    assert template.digest not in (plain, ChatTemplate("d", tool_use="t").digest)
    assert not template.dated
    assert ChatTemplate("d", tool_use="{{ strftime_now('%Y') }}").dated


def test_a_template_for_tools_alone_is_none():
    file = "additional_chat_templates/tool_use.jinja"
    assert flattened({file: "t"}) == {}
    texts = flattened({file: "t", "tokenizer_config.json": '{"chat_template": "d"}'})
    assert own_template(texts) == ChatTemplate("d", tool_use="t")
