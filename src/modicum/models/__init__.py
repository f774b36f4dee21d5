"""The built-in decoder and those of transformers: configurations, modules, files, text from them.

Names are imported when first asked for, so that configurations and headers are read without torch.
Text comes from `modicum.models.generate`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modicum.models.config import ModelConfig
    from modicum.models.huggingface import (
        ModelHeader,
        load,
        read_config,
        read_header,
        resolve,
    )
    from modicum.models.llama import Llama, States, create
    from modicum.models.saving import save

_HOME = {
    "Llama": "llama",
    "ModelConfig": "config",
    "ModelHeader": "huggingface",
    "States": "llama",
    "create": "llama",
    "load": "huggingface",
    "read_config": "huggingface",
    "read_header": "huggingface",
    "resolve": "huggingface",
    "save": "saving",
}

__all__ = [
    "Llama",
    "ModelConfig",
    "ModelHeader",
    "States",
    "create",
    "load",
    "read_config",
    "read_header",
    "resolve",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"modicum.models.{_HOME[name]}"), name)
