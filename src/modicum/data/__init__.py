"""From files to batches: sources, tokenizer, token store, packing and the order of the rows.

    source = open_source("notes.jsonl")
    tokenizer = Tokenizer.train((d.text for d in source.documents()), vocabulary_size=4096)
    prepared = prepare(source, tokenizer, Path("cache"), model_vocabulary=4096)
    rows = PackedExamples(prepared.train, sequence_length=256)
    sampler = Sampler(len(rows), batch_size=16, seed=0)
    batch = rows.batch(sampler.indices(step=0))

Text that is no examples goes into `Packed` rows, end to end. Several sources are mixed by weight
with `MixedRows([rows, others])` and `MixedSampler(mixed.places, [2, 1], batch_size=16, seed=0)`.

Nothing here imports torch before a batch is asked for, nor `tokenizers` before a tokenizer is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modicum.data.batch import IGNORED, Batch
    from modicum.data.fitting import PackingCounts
    from modicum.data.mixed_order import MixedSampler
    from modicum.data.mixed_rows import MixedRows
    from modicum.data.packed_examples import PackedExamples
    from modicum.data.packing import Packed
    from modicum.data.readers import Document
    from modicum.data.sampler import Sampler
    from modicum.data.sources import Inspection, Source, inspect, open_source
    from modicum.data.store import prepare
    from modicum.data.token_store import Prepared, TokenStore
    from modicum.data.tokenizer import Tokenizer

_HOMES = {
    "Batch": "batch",
    "Document": "readers",
    "IGNORED": "batch",
    "Inspection": "sources",
    "MixedRows": "mixed_rows",
    "MixedSampler": "mixed_order",
    "Packed": "packing",
    "PackedExamples": "packed_examples",
    "PackingCounts": "fitting",
    "Prepared": "token_store",
    "Sampler": "sampler",
    "Source": "sources",
    "TokenStore": "token_store",
    "Tokenizer": "tokenizer",
    "inspect": "sources",
    "open_source": "sources",
    "prepare": "store",
}

__all__ = [
    "IGNORED",
    "Batch",
    "Document",
    "Inspection",
    "MixedRows",
    "MixedSampler",
    "Packed",
    "PackedExamples",
    "PackingCounts",
    "Prepared",
    "Sampler",
    "Source",
    "TokenStore",
    "Tokenizer",
    "inspect",
    "open_source",
    "prepare",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
