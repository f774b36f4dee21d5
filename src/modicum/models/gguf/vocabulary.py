"""A tokenizer as llama.cpp has it: the spellings, their types, merges, and how text is split first.

llama.cpp has its own code for each rule of splitting text into words, and a file names one of them.
So only the rules that it has are written; text is then split into the same tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.data.chat_template import special_tokens
from modicum.data.tokenizer import Tokenizer

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3, _QWEN_2 = (_WORDS + digits + _REST for digits in (r"\p{N}{1,3}", r"\p{N}"))
_BYTES = ("ByteLevel", False)  # bytes as characters, words already split
# How words are split, and whether one that is a token is taken without merging: llama.cpp's name.
_SPLITS: Mapping[tuple[tuple[Any, ...], bool], str] = {
    ((("ByteLevel", True),), False): "gpt-2",
    ((("Digits", True), ("ByteLevel", True)), False): "smollm",
    ((("Split", _QWEN_2), _BYTES), False): "qwen2",
    ((("Split", _LLAMA_3), _BYTES), True): "llama-bpe",
    ((("Split", _LLAMA_3), _BYTES), False): "smaug-bpe",
}
_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")


@dataclass(frozen=True)
class Vocabulary:
    """All that a GGUF file says of a tokenizer.

    Args:
        split: llama.cpp's name of the rule by which text is split into words.
        tokens: the spelling of every id of the model.
        types: of each, a `gguf.TokenType`.
        merges: pairs of spellings, the first to be merged first.
        special: ids by what they are for: `bos`, `eos`, `pad`, `unk`.
        begins: whether the token `bos` is put before every text.
    """

    split: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    special: Mapping[str, int]
    begins: bool

    def write(self, writer: Any) -> None:
        """Write it into a `gguf.GGUFWriter`."""
        writer.add_tokenizer_model("gpt2")  # its name of byte-level BPE
        writer.add_tokenizer_pre(self.split)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        writer.add_token_merges(self.merges)
        for name, number in self.special.items():
            getattr(writer, f"add_{name}_token_id")(number)
        writer.add_add_bos_token(self.begins)
        writer.add_add_eos_token(False)


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """What a GGUF file says of `tokenizer`, for a model of so many tokens.

    Raises:
        InputError: llama.cpp would make other tokens of the same text.
    """
    raw = json.loads(tokenizer.inner.to_str())
    model = raw["model"]
    split = _split(raw)
    if tokenizer.vocabulary_size > size:
        raise _other(f"the tokenizer has {tokenizer.vocabulary_size} tokens, the model {size}")
    kind = library("gguf", "gguf", "a GGUF file").TokenType
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [int(kind.UNUSED)] * size
    for spelling, number in model["vocab"].items():
        tokens[number], types[number] = spelling, int(kind.NORMAL)
    for added in raw["added_tokens"]:
        if any(added[each] for each in ("single_word", "lstrip", "rstrip")):
            raise _other(f"the token {added['content']} takes spaces or words around it")
        tokens[added["id"]] = added["content"]
        types[added["id"]] = int(kind.CONTROL if added["special"] else kind.USER_DEFINED)
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    begins = _begins(tokenizer)
    return Vocabulary(split, tokens, types, merges, _special(tokenizer), begins)


def portable(template: str) -> str:
    """A chat template without `{% generation %}`, which marks what is trained and writes nothing.

    >>> portable("{% generation %}{{ m }}{%- endgeneration %}")
    '{% if true %}{{ m }}{%- endif %}'
    """
    return _GENERATION.sub(lambda at: f"{at[1]}{'endif' if at[2] else 'if true'}{at[3]}", template)


def _split(raw: Mapping[str, Any]) -> str:
    """llama.cpp's name of how a tokenizer.json splits text into words."""
    model = raw["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise _other(f"it is {model['type']}, and byte-level BPE is what was read back")
    if any(model.get(each) for each in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _other("its tokens have a prefix or a suffix within words")
    if (normalizer := raw.get("normalizer")) not in (None, {"type": "NFC"}):
        raise _other(f"it changes text before it splits it ({normalizer['type']})")
    steps = tuple(map(_step, _sequence(raw.get("pre_tokenizer"))))
    found = _SPLITS.get((steps, bool(model.get("ignore_merges"))))
    if found is None:
        names = ", ".join(step["type"] for step in _sequence(raw.get("pre_tokenizer"))) or "nothing"
        raise _other(f"it splits text into words by a rule that is not known there ({names})")
    return found


def _sequence(raw: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if raw is None:
        return ()
    return raw["pretokenizers"] if raw["type"] == "Sequence" else (raw,)


def _step(raw: Mapping[str, Any]) -> tuple[Any, ...]:
    """What decides the words in one step of splitting; something unknown of an unknown step."""
    if raw["type"] == "ByteLevel" and not raw["add_prefix_space"]:
        return "ByteLevel", raw.get("use_regex", True)
    if raw["type"] == "Digits":
        return "Digits", raw["individual_digits"]
    if raw["type"] == "Split" and raw["behavior"] == "Isolated" and not raw["invert"]:
        return "Split", raw["pattern"].get("Regex")
    return (json.dumps(raw, sort_keys=True),)


def _special(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of special tokens; llama.cpp takes number 11 for what a file does not name."""
    names = special_tokens(tokenizer.companions)
    words = {each: names.get(f"{each}_token") for each in ("bos", "pad", "unk")}
    ids = {each: tokenizer.inner.token_to_id(word) for each, word in words.items() if word}
    found = {each: number for each, number in ids.items() if number is not None}
    if tokenizer.begin_ids:
        found["bos"] = tokenizer.begin_ids[0]
    return {"bos": tokenizer.eos_id, "eos": tokenizer.eos_id} | found


def _begins(tokenizer: Tokenizer) -> bool:
    alone = tokenizer.inner.encode("a", add_special_tokens=False).ids
    put = tokenizer.inner.encode("a", add_special_tokens=True).ids
    if put not in (alone, [*tokenizer.begin_ids[:1], *alone]):
        raise _other("it puts more than one token before a text, or some after it")
    return bool(tokenizer.begin_ids)


def _other(why: str) -> InputError:
    return InputError(
        f"llama.cpp would make other tokens of the same text: {why}", field="tokenizer.json"
    )
