"""A model folder's own tokenizer: what is wrong with its files is one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers

from modicum.core.errors import InputError
from modicum.data.pair_tokenizer import CONFIG, FILE, PairTokenizer

# Merges shorter than the prefix of what continues a word: the library panics.
PANICS = {
    "type": "BPE",
    "continuing_subword_prefix": "####",
    "vocab": {"a": 0, "b": 1, "ab": 2},
    "merges": [["a", "b"]],
}


def test_files_that_hold_something_else_are_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(json.dumps({"model": PANICS}))
    with pytest.raises(InputError, match=r"tokenizer\.json: cannot be read: "):
        PairTokenizer(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")).save(str(tmp_path / FILE))
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json: this holds no JSON object"):
        PairTokenizer(tmp_path).pad_id(None)
    (tmp_path / CONFIG).write_text('{"pad_token": 7}')
    assert PairTokenizer(tmp_path).pad_id(None) is None
    (tmp_path / CONFIG).write_text('{"pad_token": "a"}')
    assert PairTokenizer(tmp_path).pad_id(None) == 0
