"""Tiny models of transformers and labelled texts for classifiers, as folders that tests load."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from decoders import decoder_folder

_WORDS = {"animals": "cat dog cow hen fox", "plants": "oak fern moss rose reed"}
_COMMON = "the sees near a under old and big"
_SIZES: dict[str, Any] = {
    "initializer_range": 0.3,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _SIZES,
    "roberta": _SIZES | {"pad_token_id": 1, "type_vocab_size": 1},
    "distilbert": {
        "initializer_range": 0.3,
        "vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48,
        "max_position_embeddings": 40, "pad_token_id": 0,
    },
}  # fmt: skip


def rows(count: int = 60) -> list[dict[str, Any]]:
    """Texts of different lengths that name animals or plants."""
    drawn, made = random.Random(0), []
    for number in range(count):
        label = sorted(_WORDS)[number % 2]
        words = drawn.choices(_COMMON.split(), k=drawn.randint(2, 9))
        words.insert(drawn.randrange(len(words)), drawn.choice(_WORDS[label].split()))
        made.append({"text": " ".join(words), "label": label})
    return made


def write_rows(file: Path, made: list[dict[str, Any]]) -> Path:
    """A JSONL file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file


def add_tokenizer(folder: Path, pad: str | None = "[PAD]") -> Path:
    """A tokenizer of words with BERT's special tokens; `pad` is in its configuration."""
    every = " ".join([_COMMON, *_WORDS.values()]).split()
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *every])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    inner.save(str(folder / "tokenizer.json"))
    made = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    if pad is not None:
        made["pad_token"] = pad
    (folder / "tokenizer_config.json").write_text(json.dumps(made))
    return folder


def base_folder(folder: Path, name: str, pad: str | None = "[PAD]") -> Path:
    """A tiny model without a head for classes, with a tokenizer."""
    if name in ENCODERS:
        config = transformers.AutoConfig.for_model(name, **ENCODERS[name])
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    else:
        decoder_folder(folder, name, vocab_size=64)
    return add_tokenizer(folder, pad)


def theirs(folder: Path) -> Any:
    """The classifier of a folder as transformers loads it."""
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
