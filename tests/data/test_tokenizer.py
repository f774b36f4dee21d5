from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.chat_templates import CHATML, TEMPLATES

from modicum.core.errors import InputError
from modicum.data import Tokenizer, open_source
from modicum.data.tokenizer import END, split
from modicum.data.tokenizer_files import exported_files

# Merges shorter than the prefix of what continues a word: the library panics.
PANICS = json.dumps(
    {
        "model": {
            "type": "BPE",
            "continuing_subword_prefix": "####",
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": [["a", "b"]],
        }
    }
)


def texts(start: int = 0, step: int = 1) -> list[str]:
    source = open_source(None, include=["json/**", "asyncio/**"])
    return [document.text for document in source.documents()][start::step]


def test_a_trained_tokenizer_gives_the_text_back(tokenizer):
    text = "def area_3(width):\n    return 'é😀\x00'\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocabulary_size == 280
    assert tokenizer.token(tokenizer.eos_id) == END
    assert tokenizer.begin_ids == ()
    assert tokenizer.encode_prompt(text) == tokenizer.encode(text)
    assert len(tokenizer.encode("def area_1(width, height):")) == 11


@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    text = text.encode("utf-8", "replace").decode()
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_the_same_texts_give_the_same_tokenizer_on_any_number_of_threads(tmp_path):
    here = Tokenizer.train(iter(texts()), 700)
    other_order = Tokenizer.train(iter(texts()[::-1]), 700)
    assert here.inner.to_str() == other_order.inner.to_str()
    program = (
        "from modicum.data import Tokenizer, open_source\n"
        "source = open_source(None, include=['json/**', 'asyncio/**'])\n"
        "texts = (document.text for document in source.documents())\n"
        "print(Tokenizer.train(texts, 700).digest)"
    )
    for threads in ("1", "2", "5"):
        environment = os.environ | {
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": str(threads != "1").lower(),
            "PYTHONHASHSEED": threads,
        }
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == here.digest


def test_long_texts_are_cut_where_no_token_is():
    text = "".join(texts())
    assert len(text) > 3 << 17
    pieces = split(text)
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert max(map(len, pieces)) <= 1 << 17
    tokenizer = Tokenizer.train(iter(texts(step=4)), 500)
    assert tokenizer.encode(text) == tokenizer.inner.encode(text, add_special_tokens=False).ids
    assert [len(piece) for piece in split("x" * (1 << 17) + "y")] == [1 << 17, 1]


def test_training_reports_bytes_and_refuses_a_tiny_vocabulary():
    seen: list[int] = []
    Tokenizer.train(iter(["äb", "c"]), 300, progress=lambda done, _: seen.append(done))
    assert seen == [3, 4]
    with pytest.raises(InputError, match=r"at least 257 tokens.*found: 256"):
        Tokenizer.train(iter(["a"]), 256)
    assert Tokenizer.train(iter([]), 5000).vocabulary_size == 257


def test_saving_and_loading_keep_every_id(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "saved")
    for path in (tmp_path / "saved", tmp_path / "saved" / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert (loaded.digest, loaded.eos_id) == (tokenizer.digest, tokenizer.eos_id)
    loaded.save(tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        saved = (tmp_path / "saved" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == saved


def test_transformers_loads_what_is_saved(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "def area_7(width, height):\n\n    return  width , 'don't é'\n"
    assert theirs(text)["input_ids"] == tokenizer.encode(text)
    assert theirs.decode(tokenizer.encode(text)) == text
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.eos_id
    assert len(theirs) == tokenizer.vocabulary_size


@pytest.mark.parametrize("layout", ["list", "files"])
def test_rows_with_tools_have_the_tokens_of_transformers(tokenizer, tmp_path, layout):
    transformers = pytest.importorskip("transformers")
    folder, for_tools = tmp_path / "model", TEMPLATES["chatml with tools"]
    tokenizer.save(folder)
    if layout == "list":
        file = folder / "tokenizer_config.json"
        several = {"default": CHATML, "tool_use": for_tools}
        listed = [{"name": name, "template": text} for name, text in several.items()]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "chat_template.jinja").write_text(CHATML)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(for_tools)
    ours = Tokenizer.load(folder)
    assert (ours.chat_template.source, ours.chat_template.tool_use) == (CHATML, for_tools)
    ours.save(tmp_path / "saved")
    assert all(file.is_file() for file in exported_files(tmp_path / "saved"))
    again = Tokenizer.load(tmp_path / "saved").chat_template
    assert again == ours.chat_template
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "x?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "two"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "add one"}}]
    text, spans = again.conversation(messages, tools=tools)
    assert "add one" in text
    assert '"arguments": {"x": 1}' in text[slice(*spans[0])]
    for place in (folder, tmp_path / "saved"):
        theirs = transformers.AutoTokenizer.from_pretrained(place)
        for offered in (tools, None):
            written = again.render(messages, tools=offered)
            ((ids, _),) = ours.encode_marked([written], [()])
            assert theirs.apply_chat_template(messages, tools=offered, return_dict=False) == ids
    other = ours.with_template("{{ 1 }}")
    other.save(tmp_path / "other")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "other")
    assert other.chat_template.tool_use is None
    assert theirs.apply_chat_template(messages, tools=tools, tokenize=False) == "1"


def test_special_tokens_around_a_text_are_known_by_their_side(tmp_path):
    import tokenizers

    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "?": 3}, unk_token="?")
    )
    inner.add_special_tokens(["<s>", "</s>"])
    inner.enable_truncation(1)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null, "chat_template": "x"}')
    (tmp_path / "config.json").write_text('{"eos_token_id": [1, 0]}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_id == 1
    assert tokenizer.begin_ids == (0,)
    assert tokenizer.encode("a") == [2]
    assert tokenizer.encode_prompt("a") == [0, 2]
    tokenizer.save(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert saved == {"eos_token": "</s>", "chat_template": "x"}
    assert Tokenizer.load(tmp_path / "saved").digest == tokenizer.digest


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"no tokenizer folder: it has no tokenizer\.json"),
        ({"tokenizer.model": "x"}, r"has tokenizer\.model but no tokenizer\.json; convert it once"),
        ({"tokenizer.json": "{cut"}, r"tokenizer\.json: this is no tokenizer: "),
        ({"tokenizer.json": '{"a": 1}'}, r"tokenizer\.json: this is no tokenizer: "),
        ({"tokenizer.json": PANICS}, r"tokenizer\.json: this is no tokenizer: "),
        ({"tokenizer.json": None}, r"eos_token: nothing here says .* \{\"eos_token\": \"<\|end\|>"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": '{"eos_token": "<|edn|>"}'},
            r"tokenizer_config\.json: eos_token: .*Did you mean '<\|end\|>'\?",
        ),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "{"},
            r"_config\.json:1: this is not JSON",
        ),
        ({"tokenizer.json": None, "config.json": "[]"}, r"config\.json: this holds no JSON object"),
        ({"tokenizer.json": None, "config.json": '{"eos_token_id": 9999}'}, r"nothing here says"),
        ({"tokenizer.json": None, "config.json": '{"eos_token_id": -1}'}, r"nothing here says"),
        (
            {
                "tokenizer.json": None,
                "tokenizer_config.json": '{"eos_token": "<|end|>"}',
                "special_tokens_map.json": "[]",
            },
            r"special_tokens_map\.json: this holds no JSON object",
        ),
    ],
)
def test_what_is_no_tokenizer_is_said(tokenizer, tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(tokenizer.inner.to_str() if text is None else text)
    with pytest.raises(InputError, match=message):
        Tokenizer.load(tmp_path)


def test_a_missing_path_is_said(tmp_path):
    with pytest.raises(InputError, match="there is no such tokenizer file or folder"):
        Tokenizer.load(tmp_path / "gpt2")


def test_a_machine_without_tokenizers_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(InputError, match=r"pip install modicum\[cli\]"):
        Tokenizer.train(iter(["a"]), 300)
