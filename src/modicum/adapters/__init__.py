"""Adapters: small trained additions to the frozen layers of any PyTorch model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.adapters.attached_adapter import AttachedAdapter
    from modicum.adapters.base import Adapter, AdapterLayer
    from modicum.adapters.files import load
    from modicum.adapters.lora import LoRA
    from modicum.adapters.mos import MoS
    from modicum.adapters.native_files import base_model_of
    from modicum.adapters.pissa import PiSSA

_HOMES = {
    "Adapter": "base",
    "AdapterLayer": "base",
    "AttachedAdapter": "attached_adapter",
    "LoRA": "lora",
    "MoS": "mos",
    "PiSSA": "pissa",
    "base_model_of": "native_files",
    "load": "files",
}
__all__ = [
    "Adapter",
    "AdapterLayer",
    "AttachedAdapter",
    "LoRA",
    "MoS",
    "PiSSA",
    "base_model_of",
    "load",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
