"""The shape of a decoder, whoever has written the decoder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from modicum.models.config import ModelConfig
from modicum.models.config_checks import NotBuiltIn, is_built_in
from modicum.models.transformers.config import TransformersConfig

# Both say context, vocabulary_size and forms, count parameters and give a config.json.
DecoderConfig: TypeAlias = ModelConfig | TransformersConfig


def decoder_config(raw: Mapping[str, Any], file: str | Path | None = None) -> DecoderConfig:
    """The configuration that a config.json spells: the built-in decoder's where it fits.

    Args:
        file: is named in errors.

    Raises:
        InputError: it cannot be read, or asks for what is not supported.
    """
    if is_built_in(raw):
        with suppress(NotBuiltIn):
            return ModelConfig.from_hf(raw, file)
    return TransformersConfig.from_hf(raw, file)
