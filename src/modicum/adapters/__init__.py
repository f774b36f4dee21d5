"""Adapters: small trained additions to the frozen layers of any PyTorch model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from modicum.adapters.attached import AttachedAdapter
    from modicum.adapters.base import Adapter, AdapterLayer
    from modicum.adapters.lora import LoRA
    from modicum.adapters.peft_files import load

_HOMES = {
    "Adapter": "base",
    "AdapterLayer": "base",
    "AttachedAdapter": "attached",
    "LoRA": "lora",
    "load": "peft_files",
}
__all__ = ["Adapter", "AdapterLayer", "AttachedAdapter", "LoRA", "load"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
