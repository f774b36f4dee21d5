"""Which decoder of transformers a config.json asks for, by transformers' own tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from modicum.core.errors import InputError
from modicum.core.extras import library
from modicum.models.transformers.private import (
    classifiers,
    decoders,
    encoders,
    image_classifiers,
    known_types,
    special_floats,
)
from modicum.models.transformers.trusted import FLAG, named_files

# What a model makes of its last block: logits of the next token, or of a text's class.
HeadKind = Literal["tokens", "classes"]
_KINDS = {"tokens": "decoder of this kind that writes text", "classes": "classifier of this kind"}
# In the name of a part's configuration: what reads, or writes, something else than text.
_SENSES = ("vision", "audio", "speech", "image")
_OLDEST = 5  # the first that says how the names in files become those of the model


def described(raw: Mapping[str, Any]) -> Any:
    """The configuration object of transformers that a config.json spells, a new one each time.

    Raises:
        InputError: as `architecture`.
    """
    kind = raw.get("model_type")
    transformers = _transformers(kind)
    known = known_types()
    if kind not in known:
        files = ", ".join(named_files(raw))
        theirs = (
            f"; the code in the model's own folder ({files}) is run with {FLAG}: true alone"
            if files
            else ""
        )
        raise InputError(
            f"transformers {transformers.__version__} has no such model{theirs}",
            field="model_type",
            value=kind,
        )
    if raw.get("quantization_config") is not None:
        raise InputError(
            "the weights are already quantized; point at the full-precision model instead",
            field="quantization_config",
        )
    try:
        # A copy, which it writes into.
        return known[kind].from_dict(special_floats(copy.deepcopy(dict(raw))))
    except Exception as error:  # whatever transformers' own checks raise
        raise InputError(f"transformers does not read this: {_first_line(error)}") from None


def architecture(raw: Mapping[str, Any], head: HeadKind = "tokens") -> type[Any]:
    """The class of transformers whose model a config.json describes.

    Raises:
        InputError: transformers is missing or too old, or has no such model of text alone.
    """
    return _architecture(json.dumps(raw, sort_keys=True, default=str), head)


@lru_cache(maxsize=8)
def _architecture(text: str, head: HeadKind) -> type[Any]:
    raw = json.loads(text)
    known = described(raw)
    table = decoders() if head == "tokens" else classifiers()
    other = _other_kind(known, head)
    if other is not None or type(known) not in table:
        raise InputError(
            other or f"transformers has no {_KINDS[head]}",
            field="model_type",
            value=raw["model_type"],
        )
    if _reads_more(known):
        raise InputError(
            "this model reads more than text, and only models of text alone are trained",
            field="model_type",
            value=raw["model_type"],
        )
    found = table[type(known)]
    named = raw.get("architectures") or []
    choices = found if isinstance(found, tuple) else (found,)
    chosen: type[Any] = next((each for each in choices if each.__name__ in named), choices[0])
    return chosen


def _reads_more(known: Any) -> bool:
    """Whether a model has a part for images or sound, also where its text part stands alone."""
    parts: Mapping[str, Any] = type(known).sub_configs
    senses = any(sense in part for part in parts for sense in _SENSES)
    return senses or known.get_text_config() is not known


def _other_kind(known: Any, head: HeadKind) -> str | None:
    """What a model is that has no such head, where that can be said."""
    if getattr(known, "is_encoder_decoder", False):
        return "this is an encoder–decoder, and only encoders and decoders of text are trained yet"
    if type(known) in image_classifiers():
        return "this model reads images, and of transformers only models of text are trained yet"
    if head == "tokens" and _encodes(known):
        return (
            "this is an encoder, which writes no text; `task: {method: text_classes}` trains it to "
            "tell texts apart, and one that is a decoder has is_decoder: true in its config.json"
        )
    return None


def is_encoder(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a model of text that writes none, such as BERT.

    Raises:
        InputError: as `described`.
    """
    return _encodes(described(raw))


def _encodes(known: Any) -> bool:
    causal = getattr(known, "is_decoder", False) or getattr(known, "causal", False)
    both = getattr(known, "is_encoder_decoder", False)
    return type(known) in encoders() and not causal and not both


def _transformers(kind: object) -> Any:
    found = library("transformers", "hf", f"a model of the type {kind!r}")
    if int(found.__version__.split(".")[0]) < _OLDEST:
        raise InputError(
            f"a model of this type needs transformers {_OLDEST} or newer, and "
            f"{found.__version__} is installed: pip install -U transformers",
            field="model_type",
            value=kind,
        )
    return found


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"[:240]
