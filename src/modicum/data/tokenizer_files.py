"""The files of a tokenizer's folder: where its model is, and which token they say ends a text."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.errors import InputError, nearest
from modicum.core.files import json_object, read_text, write_text
from modicum.data.named_templates import END

if TYPE_CHECKING:
    import tokenizers

MODEL, CONFIGURATION = "tokenizer.json", "tokenizer_config.json"
_MOMENT = "moment.txt"  # of a run alone
_IDS = 1 << 32  # token ids of the library are below it
_OTHER_KINDS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json")


def model_file(folder: Path) -> Path:
    """The tokenizer.json of a folder.

    Raises:
        InputError: it has none; with the tokenizer of another kind that it has.
    """
    if (folder / MODEL).is_file():
        return folder / MODEL
    other = [name for name in _OTHER_KINDS if (folder / name).is_file()]
    if other:
        raise InputError(
            f"the folder has {other[0]} but no {MODEL}; convert it once with "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)",
            file=folder,
        )
    raise InputError(f"this is no tokenizer folder: it has no {MODEL}", file=folder)


def _json(file: Path) -> dict[str, Any]:
    return json_object(file) if file.is_file() else {}


def end_of_text(file: Path, inner: tokenizers.Tokenizer) -> int:
    """The token that ends a text, as the files next to tokenizer.json say.

    Raises:
        InputError: none says it, or it is not in the vocabulary.
    """
    for name in (CONFIGURATION, "special_tokens_map.json"):
        spelled = _json(file.parent / name).get("eos_token")
        word = spelled.get("content") if isinstance(spelled, dict) else spelled
        if isinstance(word, str):
            end = inner.token_to_id(word)
            if end is None:
                raise InputError(
                    "this end-of-text token is not in the vocabulary",
                    file=file.parent / name,
                    field="eos_token",
                    value=word,
                    candidates=inner.get_vocab(with_added_tokens=True),
                )
            return end
    for name in ("generation_config.json", "config.json"):
        number = _json(file.parent / name).get("eos_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < _IDS and inner.id_to_token(number) is not None:
            return number
    guess = nearest(END, (t.content for t in inner.get_added_tokens_decoder().values()))
    raise InputError(
        "nothing here says which token ends a text; write it into tokenizer_config.json, "
        f'for instance {{"eos_token": "{guess or "</s>"}"}}',
        file=file,
        field="eos_token",
    )


def moment_of(folder: Path) -> datetime:
    """The date and time that a run writes conversations with, kept next to its tokenizer.

    The first call writes the time at which it is made.

    Raises:
        InputError: the file there holds none.
    """
    file = folder / _MOMENT
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, datetime.now().isoformat(timespec="seconds") + "\n")
    try:
        return datetime.fromisoformat(read_text(file).strip())
    except ValueError as error:
        raise InputError("holds no date and time; remove it", file=file) from error


def exported_files(folder: Path) -> list[Path]:
    """The files in the folder of a run's tokenizer that belong next to its weights."""
    return sorted(file for file in folder.glob("*") if file.name != _MOMENT)
