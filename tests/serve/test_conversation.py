from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import modicum
from modicum.core.errors import InputError
from modicum.data.chat_template import ChatTemplate
from modicum.data.named_templates import NAMED
from modicum.data.tokenizer import Tokenizer
from modicum.models import ModelConfig, create
from modicum.serve import Conversation, load_run

TEXT = "naïve café 日本語 🙂 to be or not to be\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter(["to be or not to be"] * 9), vocabulary_size=260)


@pytest.fixture
def conversation(tokenizer: Tokenizer) -> Conversation:
    config = ModelConfig(
        vocabulary_size=tokenizer.vocabulary_size, width=16, layers=1, heads=2, context=16,
        initializer_range=0.5,
    )  # fmt: skip
    return Conversation(create(config, 0).eval(), tokenizer)


def scripted(monkeypatch: pytest.MonkeyPatch, *texts: list[int]) -> list[list[int]]:
    """Let the model write these; the list fills with the contexts that it was given."""
    given: list[list[int]] = []
    told = iter(texts)

    def generate(model: Any, ids: torch.Tensor, *, max_tokens: int, **_: Any) -> Iterator[int]:
        given.append(ids[0].tolist())
        yield from next(told)[:max_tokens]

    monkeypatch.setattr("modicum.serve.conversation.generate", generate)
    return given


def test_a_character_of_several_tokens_comes_whole(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = conversation.tokenizer.encode("é日🙂 be")
    assert len(ids) > 9  # a token for each byte of what the tokenizer has not seen
    scripted(monkeypatch, ids)
    pieces = list(conversation.write("x", max_tokens=99))
    assert [piece for piece in pieces if piece][:3] == ["é", "日", "🙂"]
    assert "".join(pieces) == "é日🙂 be"
    assert conversation.history == [*conversation.tokenizer.encode("x"), *ids]


def test_a_character_that_is_never_finished_is_shown_at_the_end(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, conversation.tokenizer.encode("a🙂")[:-1])
    assert "".join(conversation.write("x", max_tokens=9)).rstrip("\N{REPLACEMENT CHARACTER}") == "a"


def test_what_was_written_is_the_context_until_it_is_forgotten(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scripted(monkeypatch, [5], [6], [7])
    encode = conversation.tokenizer.encode
    for prompt in ("a", "b"):
        list(conversation.write(prompt, max_tokens=3))
    conversation.forget()
    list(conversation.write("c", max_tokens=3))
    assert given == [encode("a"), [*encode("a"), 5, *encode("b")], encode("c")]


def test_a_full_context_drops_its_older_half_and_goes_on(conversation: Conversation) -> None:
    conversation.tokenizer.eos_id, eos = -1, conversation.tokenizer.eos_id
    try:
        list(conversation.write("x" * 50, max_tokens=40, temperature=0))
    finally:
        conversation.tokenizer.eos_id = eos
    assert len(conversation.history) == 50 + 40


def test_a_long_prompt_keeps_half_of_the_context_at_least(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scripted(monkeypatch, [], [])
    prompt = conversation.tokenizer.encode("abcdefghijklmnopqrst")
    list(conversation.write("abcdefghijklmnopqrst", max_tokens=99))
    conversation.forget()
    list(conversation.write("abcdefghijklmnopqrst", max_tokens=3))
    assert given == [prompt[-8:], prompt[-13:]]


def test_a_conversation_that_fits_the_context_is_read_from_its_beginning(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = scripted(monkeypatch, [1, 2, 3, 4], [])
    prompt = conversation.tokenizer.encode("abcdefghijkl")
    assert len(prompt) == 12  # of a context of 16
    list(conversation.write("abcdefghijkl", max_tokens=99))
    # The context is full then, and its older half makes room.
    assert given == [prompt, [*prompt[-4:], 1, 2, 3, 4]]


def test_temperature_0_and_a_seed_write_the_same_again(conversation: Conversation) -> None:
    def text(**options: Any) -> str:
        conversation.forget()
        return "".join(conversation.write("to be", max_tokens=8, **options))

    assert text(temperature=0) == text(temperature=0, seed=3)
    drawn = {seed: text(temperature=2.0, seed=seed) for seed in range(4)}
    assert text(temperature=2.0, seed=2) == drawn[2]
    assert len(set(drawn.values())) > 1


# Runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in fp32, and beside it an adapter trained on it in bf16."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(TEXT * 4, encoding="utf-8")
    common: dict[str, Any] = {
        "data": {"path": str(folder / "texts"), "sequence_length": 16, "validation_fraction": 0.0},
        "samples": {"count": 0},
    }
    shape = {"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 280}
    training = {"steps": 2, "batch_size": 2, "learning_rate": 0.1}
    new = modicum.Recipe(model=shape, training=training, **common)
    modicum.train(modicum.plan(new), folder / "base")
    adapted = modicum.Recipe(
        model={"path": str(folder / "base")},
        adapter={"method": "lora", "rank": 2},
        training=training | {"precision": "bf16"},
        **common,
    )
    modicum.train(modicum.plan(adapted), folder / "adapted")
    return folder / "adapted"


def test_an_adapter_is_served_on_its_base_in_the_base_s_precision(run: Path) -> None:
    conversation, ids = load_run(run), torch.arange(9)[None]
    assert conversation.adapter is not None
    assert {p.dtype for p in conversation.model.parameters()} == {torch.float32}
    with torch.no_grad():
        adapted = conversation.model(ids)
        conversation.adapter.deactivate()
        base = conversation.model(ids)
        torch.testing.assert_close(base, load_run(run.parent / "base").model(ids))
    assert (adapted - base).abs().max() > 1e-3


def test_what_cannot_be_served_says_why(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no config\.json"):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InputError, match="exported no model yet"):
        load_run(tmp_path)
    orphan = tmp_path / "orphan"
    shutil.copytree(run, orphan)
    file = orphan / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(InputError, match="base model is not there any more") as caught:
        load_run(orphan)
    assert caught.value.value == str(tmp_path / "gone")
    file.write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(InputError, match="does not say which model it is for") as caught:
        load_run(orphan)
    assert caught.value.field == "base_model_name_or_path"


def test_turns_are_written_by_the_template_anew(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    conversation.template = ChatTemplate(source)
    conversation.model.config = replace(conversation.model.config, context=99)
    encode = conversation.tokenizer.encode
    given = scripted(monkeypatch, encode("be"), encode("or not"))
    assert "".join(conversation.write("to", max_tokens=20)) == "be"
    broken = conversation.write("not", max_tokens=20)
    first = next(broken)
    broken.close()  # as Ctrl-C does
    assert given == [encode("u:to;a:"), encode("u:to;a:be;u:not;a:")]
    assert [turn["content"] for turn in conversation.turns] == ["to", "be", "not", first]
    conversation.forget()
    assert conversation.turns == []


@pytest.mark.parametrize("named", [True, False])
def test_a_run_on_conversations_is_asked_by_its_template(tmp_path: Path, named: bool) -> None:
    talk = [{"role": "user", "content": "to be"}, {"role": "assistant", "content": "or not"}]
    data, template = tmp_path / "chat.jsonl", tmp_path / "template.jinja"
    data.write_text((json.dumps({"messages": talk}) + "\n") * 8)
    template.write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}")
    section = {"path": str(data), "sequence_length": 32, "validation_fraction": 0.0}
    recipe = modicum.Recipe(
        model={"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 270},
        data=section | ({} if named else {"chat_template": str(template)}),
        training={"steps": 1, "batch_size": 1},
        samples={"count": 0},
    )
    modicum.train(modicum.plan(recipe), tmp_path / "run")
    conversation = load_run(tmp_path / "run")
    assert conversation.template is not None
    expected = NAMED["chatml"].source if named else template.read_text()
    assert conversation.template.source == expected
    tokenizer = conversation.tokenizer
    assert tokenizer.token(tokenizer.eos_id) == ("<|im_end|>" if named else "<|end|>")
    assert conversation.model.config.eos_token_id == tokenizer.eos_id
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["data"]["conversations"] = False
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    assert load_run(tmp_path / "run").template is None
