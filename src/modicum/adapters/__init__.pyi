# Written by scripts/stubs.py.
from modicum.adapters.attached_adapter import AttachedAdapter as AttachedAdapter
from modicum.adapters.base import Adapter as Adapter
from modicum.adapters.base import AdapterLayer as AdapterLayer
from modicum.adapters.files import load as load
from modicum.adapters.lora import LoRA as LoRA
from modicum.adapters.mos import MoS as MoS
from modicum.adapters.native_files import base_model_of as base_model_of
from modicum.adapters.pissa import PiSSA as PiSSA
from modicum.core.exports import Exports

EXPORTS: Exports
