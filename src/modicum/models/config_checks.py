"""Which config.json the built-in decoder reads, and what it says of others. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError

MODEL_TYPES = ("llama", "mistral", "qwen2")
FORMED = "forms_"  # what the model type begins with where not all layers and blocks are alike


class NotBuiltIn(InputError):
    """The built-in decoder does not have what a config.json asks for."""


def is_built_in(raw: Any) -> bool:
    """Whether a config.json is for the built-in decoder to read, or to refuse.

    >>> is_built_in({"model_type": "llama"}), is_built_in({"model_type": "gpt2"})
    (True, False)
    """
    if not isinstance(raw, Mapping):
        return True
    kind = raw.get("model_type")
    ours = not isinstance(kind, str) or kind.removeprefix(FORMED) in MODEL_TYPES
    return ours or "forms" in raw or "low_rank" in raw


def refuse_unsupported(raw: Mapping[str, Any], file: str | Path | None) -> None:
    """Say which feature of the file's model the built-in decoder does not have.

    Raises:
        NotBuiltIn: it lacks one, which a decoder of transformers may have.
        InputError: nobody reads this.
    """
    model_type = raw.get("model_type")
    if "low_rank" in raw:
        problem = "an older modicum wrote these low-rank layers, and this one reads them no more"
        raise InputError(f"{problem}; compress the model again", file=file, field="low_rank")
    if str(model_type).removeprefix(FORMED if "forms" in raw else "") not in MODEL_TYPES:
        # No nearest match: the same weights under another type's name would compute something else.
        raise NotBuiltIn(
            "this kind of model is not supported",
            file=file,
            field="model_type",
            value=model_type,
            allowed=", ".join(MODEL_TYPES),
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise NotBuiltIn(
            "this activation is not supported",
            file=file,
            field="hidden_act",
            value=raw["hidden_act"],
            allowed="silu",
        )
    if raw.get("quantization_config") is not None:
        raise InputError(
            "the weights are already quantized; point at the full-precision model instead",
            file=file,
            field="quantization_config",
        )
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    slides = model_type != "llama" and window is not None
    if slides and window < raw.get("max_position_embeddings", 0):
        raise NotBuiltIn(
            "a sliding attention window shorter than max_position_embeddings is not supported; "
            "set max_position_embeddings to the window to use the model up to that length",
            file=file,
            field="sliding_window",
            value=window,
        )
