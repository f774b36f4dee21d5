"""The decoder of a configuration: the built-in one, or one of transformers."""

from __future__ import annotations

from typing import TypeAlias

from modicum.models.config import ModelConfig
from modicum.models.decoder_config import DecoderConfig
from modicum.models.llama import Llama
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import TransformersDecoder, build

Decoder: TypeAlias = Llama | TransformersDecoder


def decoder_of(config: DecoderConfig) -> Decoder:
    """The model of a configuration; call it on meta.

    Raises:
        InputError: the model cannot be built so.
    """
    if isinstance(config, ModelConfig):
        return Llama(config)
    assert isinstance(config, TransformersConfig)
    return build(config)


def config_of(model: Decoder) -> DecoderConfig:
    """The shape of a decoder, with the forms that its layers have."""
    if isinstance(model, Llama):
        return model.config
    assert isinstance(model.decoder_config, TransformersConfig)
    return model.decoder_config
