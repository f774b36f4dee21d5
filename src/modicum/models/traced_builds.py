"""Models that a process of its own can build and trace, by plain values."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum import adapters
from modicum.core.contracts.catalog import catalog
from modicum.core.extras import library
from modicum.core.layers.meta import on_meta
from modicum.models.config import ModelConfig
from modicum.models.llama import Llama
from modicum.models.traced_ledger import TracedModel


def decoder(
    config: Mapping[str, Any],
    tokens: int,
    *,
    half: bool = False,
    documents: bool = False,
    adapter: Mapping[str, Any] | None = None,
    device: str = "cpu",
) -> TracedModel:
    """The built-in decoder with a language model's loss.

    Args:
        config: fields of `ModelConfig`.
        tokens: in a sequence.
        half: whether it computes in bf16; frozen weights are then in bf16 too.
        documents: whether rows hold several documents.
        adapter: `method`, its name in the catalog, and its fields; None: all weights are trained.
        device: where the run is.

    >>> small = {"vocabulary_size": 50, "width": 16, "layers": 5, "heads": 2}
    >>> decoder(small, 8).ledger(4).bytes("weight") > 0
    True
    """
    stored = torch.bfloat16 if half and adapter is not None else torch.float32
    with on_meta(stored):
        model = Llama(ModelConfig(**config))
    if adapter is not None:
        fields = dict(adapter)
        method = getattr(adapters, catalog()[fields.pop("method")].class_name)
        method(**fields).attach(model)

    def batch(rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
        ids, labels = (torch.zeros(rows, tokens, dtype=torch.int64) for _ in range(2))
        return ids, labels, torch.zeros(rows, tokens, dtype=torch.int32) if documents else None

    def loss(model: Llama, batch: tuple[Tensor, Tensor, Tensor | None]) -> Tensor:
        with _autocast(device, half):
            logits = model(batch[0], batch[2])  # held until the loss is there, as a run does
            return F.cross_entropy(
                logits.flatten(0, 1).float(),
                batch[1].flatten(),
                ignore_index=-100,
                reduction="sum",
            )

    dtype = "bfloat16" if half else "float32"
    return TracedModel(model, batch, loss, blocks=model.blocks, device=device, dtype=dtype)


def language_model(
    config: Mapping[str, Any], tokens: int, *, half: bool = False, device: str = "cpu"
) -> TracedModel:
    """A language model of `transformers`, all of it trained, with its own loss.

    Args:
        config: what its config.json holds, `model_type` among it.
        tokens: in a sequence.
        half: whether it computes in bf16, its weights in fp32.
        device: where the run is.
    """
    transformers = library("transformers", "cli", "a model of transformers")
    fields = dict(config)
    made = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with on_meta():
        model = transformers.AutoModelForCausalLM.from_config(made)

    def batch(rows: int) -> Tensor:
        return torch.zeros(rows, tokens, dtype=torch.int64)

    def loss(model: Any, ids: Tensor) -> Tensor:
        with _autocast(device, half):
            found: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return found

    dtype = "bfloat16" if half else "float32"
    return TracedModel(model, batch, loss, device=device, dtype=dtype)


def _autocast(device: str, half: bool) -> AbstractContextManager[object]:
    return torch.autocast(device, torch.bfloat16) if half else nullcontext()
