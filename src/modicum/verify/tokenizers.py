"""Whether an export has the training's tokenizer: its tokens, its end, its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.files import read_json
from modicum.data.tokenizer import Tokenizer
from modicum.verify.findings import Wanting

if TYPE_CHECKING:
    import tokenizers

# What Transformers writes where a tokenizer has no post-processor: a text, or two, alone.
_ADDS_NOTHING = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


def tokenizer_findings(own: Tokenizer, other: Tokenizer, where: str) -> Iterator[Wanting]:
    """What of an exported tokenizer is another than that of the training."""
    if not same_tokens(own.inner, other.inner):
        yield Wanting("tokenizer", where, "the tokens of the training", "others")
    if own.eos_id != other.eos_id:
        names = [f"{each.token(each.eos_id)!r} ({each.eos_id})" for each in (own, other)]
        yield Wanting("eos", where, *names)
    sources = [
        None if each.chat_template is None else each.chat_template.source.strip()
        for each in (own, other)
    ]
    if sources[0] != sources[1]:
        expected = "no chat template" if sources[0] is None else "the template of the training"
        found = "no chat template" if sources[1] is None else "another template"
        yield Wanting("chat_template", where, expected, found)


def same_tokens(one: tokenizers.Tokenizer, other: tokenizers.Tokenizer) -> bool:
    """Whether two tokenizers make the same ids of every text, as far as their files say."""
    return _deciding(one) == _deciding(other)


def _deciding(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """A tokenizer's file, where a post-processor that adds nothing is none."""
    found: dict[str, Any] = json.loads(tokenizer.to_str())
    if found.get("post_processor") == _ADDS_NOTHING:
        found["post_processor"] = None
    return found


def end_findings(own: Tokenizer, folder: Path, where: str) -> Iterator[Wanting]:
    """Whether a model folder says of the end of the training that text ends there."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    listed = read_json(file).get("eos_token_id")
    if own.eos_id not in (listed if isinstance(listed, list) else [listed]):
        expected = f"eos_token_id with {own.eos_id} ({own.token(own.eos_id)!r})"
        yield Wanting("eos", f"{where}/{file.name}", expected, f"{listed}")
