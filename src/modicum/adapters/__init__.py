"""Adapters: small trained additions to the frozen layers of any PyTorch model."""

from __future__ import annotations

from modicum.core.exports import Exports

EXPORTS = Exports(
    __name__,
    {
        "Adapter": "base",
        "AdapterLayer": "base",
        "AttachedAdapter": "attached_adapter",
        "adapter_names": "batch_rows",
        "approx_attention": "modicum.core.layers.taylor_attention",
        "base_folder_of": "native_files",
        "base_model_of": "native_files",
        "load": "files",
    },
)
__getattr__, __dir__ = EXPORTS.load, EXPORTS.names
