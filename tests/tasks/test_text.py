"""What a run makes of its text before its first update: a tokenizer, and its template's date."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.data import Tokenizer
from modicum.data.parts import Draw
from modicum.data.tokenizer_files import exported_files, moment_of
from modicum.recipe import Recipe
from modicum.tasks import text
from modicum.tasks.text_stream import shape_of, streamed

WORDS = ("alpha", "bravo", "charlie", "delta")
MODEL = {"layers": 1, "width": 16, "heads": 2, "vocabulary_size": 340}
DATED = (
    "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_new_tokenizer_learns_nothing_of_the_only_document_of_a_test(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for word in WORDS:
        (tmp_path / "texts" / f"{word}.txt").write_text(f" {word}" * 50)
    data = {"path": str(tmp_path / "texts"), "test_fraction": 1e-9, "validation_fraction": 0.0}
    asked = Recipe(data=data, model=MODEL)
    kept = tmp_path / "tokenizer"
    tokenizer = text.run_tokenizer(asked, text.look(asked), kept, lambda *_: None)
    known = [len(tokenizer.encode(f" {word}")) == 1 for word in WORDS]
    expected = [True] * len(WORDS)
    expected[Draw(test=1e-9).flags(len(WORDS)).index(2)] = False
    assert known == expected


@pytest.fixture
def dated(tmp_path: Path) -> Recipe:
    """A stream of conversations, whose template writes the date."""
    lines = (
        [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"{n + 1}"}]
        for n in range(40)
    )
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    (tmp_path / "dated.jinja").write_text(DATED)
    Tokenizer.train(iter(["01 Jan 2024 5 + 6"] * 9), 270).save(tmp_path / "own")
    return Recipe(
        data={
            "path": str(file),
            "chat_template": str(tmp_path / "dated.jinja"),
            "tokenizer": str(tmp_path / "own"),
            "streaming": True,
            "sequence_length": 64,
            "validation_fraction": 0.3,
        },
        model=MODEL,
        training={"steps": 2, "batch_size": 4},
    )


def rows_of(asked: Recipe, folder: Path, state: Any = None) -> tuple[list[Any], Any]:
    """The first rows that are trained and evaluated in a run folder, and where the stream is."""
    made = streamed(asked, text.look(asked), folder, lambda *_: None, Ranks())
    if state is not None:
        made.sampler.resume(state)
    train = made.train.batch(made.sampler.indices(0)).input_ids
    assert made.validation is not None
    held = made.validation.batch(range(len(made.validation))).input_ids
    assert "moment.txt" not in [file.name for file in made.files]
    return [train.tolist(), held.tolist()], made.sampler.state()


def test_a_stream_that_writes_the_date_is_the_same_on_another_day(
    dated: Recipe, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "moment.txt").write_text("2024-07-05T10:00:00\n")
    then, state = rows_of(dated, folder)
    own = Tokenizer.load(folder / "tokenizer")
    assert "05 Jul 2024<user>" in own.decode(then[0][0])
    assert rows_of(dated, folder, json.loads(json.dumps(state)))[0] == then
    # A run of another day has its own, and the stream of the first is not what it finds.
    with pytest.raises(InputError, match="data has changed since this run began"):
        rows_of(dated, tmp_path / "other", state)


def test_the_moment_of_a_run_is_written_once_and_not_exported(tmp_path: Path) -> None:
    before = datetime.now().replace(microsecond=0)
    found = moment_of(tmp_path / "tokenizer")
    assert before <= found <= datetime.now()
    assert moment_of(tmp_path / "tokenizer") == found
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    assert [file.name for file in exported_files(tmp_path / "tokenizer")] == ["tokenizer.json"]
    (tmp_path / "tokenizer" / "moment.txt").write_text("yesterday\n")
    with pytest.raises(InputError, match="holds no date and time"):
        moment_of(tmp_path / "tokenizer")


def long_rope(folder: Path, tokenizer: Tokenizer, texts: list[str]) -> Recipe:
    """A model whose positions change beyond 24 tokens, and rows of 32."""
    names = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    sizes = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "original_max_position_embeddings": 24, "pad_token_id": None, "bos_token_id": 0,
        "eos_token_id": 0, "rope_scaling": {"type": "longrope", **names},
    }  # fmt: skip
    tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "phi3", **sizes}))
    file = folder.parent / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    data = {"path": str(file), "sequence_length": 32, "validation_fraction": 0.0}
    return Recipe(data=data, model={"path": str(folder)})


def changed(asked: Recipe, **data: Any) -> Recipe:
    """The recipe with other fields of its data."""
    values = asked.model_dump(mode="json", exclude_unset=True)
    return Recipe(**values | {"data": values["data"] | data})


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_in_which_positions_would_change_are_not_packed(
    streaming: bool, tmp_path: Path
) -> None:
    texts = [" alpha" * 90, *(f"{word} {word[::-1]}" for word in WORDS)]
    tokenizer = Tokenizer.train(texts, 300, lambda *_: None)
    long = changed(long_rope(tmp_path / "model", tokenizer, texts), streaming=streaming)
    short = changed(long, sequence_length=24)
    for number, (asked, apart) in enumerate([(short, False), (long, True)]):
        inputs = text.look(asked)
        said = "one at a time (its positions depend on the longest document in rows of more than 24"
        assert (said in inputs.described) is apart
        assert (said in str(text.why_eager(asked, inputs.config))) is apart
        if streaming:
            assert shape_of(asked, inputs, tokenizer).pads_apart is apart
            continue
        folder = tmp_path / str(number)
        rows = text.prepared(asked, inputs, folder, lambda *_: None, Ranks()).train
        assert rows.parts[0].pads_apart is apart
        text.check_layout(short, inputs.config, Layout(shards=2))
        with pytest.raises(InputError, match=r"data\.boundaries.*than 24 .*sharded weights"):
            text.check_layout(long, inputs.config, Layout(shards=2))
