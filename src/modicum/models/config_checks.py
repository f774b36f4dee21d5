"""Which config.json the built-in decoder reads, and what it says of others. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError

MODEL_TYPES = ("llama", "mistral", "qwen2")
FORMED = "forms_"  # what the model type begins with where not all layers and blocks are alike
_WINDOW = 4096  # of a model type that has one, where config.json does not say it
_SWITCHED = ("qwen2", "qwen3")  # types that slide where use_sliding_window is true


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
    _refuse_other_attention(raw, file)


def window_of(raw: Mapping[str, Any]) -> Any:
    """The sliding attention window that transformers gives a decoder, in tokens; None: none.

    >>> window_of({"model_type": "mistral"}), window_of({"model_type": "qwen2"})
    (4096, None)
    """
    kind = str(raw.get("model_type")).removeprefix(FORMED)
    asks = kind == "mistral" or (kind in _SWITCHED and raw.get("use_sliding_window"))
    return raw.get("sliding_window", _WINDOW) if asks else None


def _refuse_other_attention(raw: Mapping[str, Any], file: str | Path | None) -> None:
    """Refuse attention that is not to all earlier tokens, and to them alone."""
    if not raw.get("is_causal", True):
        raise NotBuiltIn(
            "attention to later tokens is not supported",
            file=file,
            field="is_causal",
            value=raw["is_causal"],
            allowed="true",
        )
    if raw.get("attention_dropout"):
        raise NotBuiltIn(
            "dropout of attention is not supported",
            file=file,
            field="attention_dropout",
            value=raw["attention_dropout"],
            allowed="0",
        )
    window, context = window_of(raw), raw.get("max_position_embeddings")
    if window is not None and type(window) is not int:
        raise InputError("must be of type int", file=file, field="sliding_window", value=window)
    if window is not None and isinstance(context, int) and window < context:
        raise NotBuiltIn(
            "a sliding attention window shorter than max_position_embeddings is not supported; "
            "set max_position_embeddings to the window to use the model up to that length",
            file=file,
            field="sliding_window",
            value=window,
        )
