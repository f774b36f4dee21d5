"""Layers whose gradients are sparse tensors, which updates of a run do not take."""

from __future__ import annotations

from torch import nn

from modicum.core.errors import InputError


def refuse_sparse_layers(model: nn.Module) -> None:
    """Refuse a model of which an embedding that is trained is to give sparse gradients.

    Norms, sums over ranks and all that optimizers keep of gradients are dense.

    Raises:
        InputError: there is such an embedding.

    >>> refuse_sparse_layers(nn.Embedding(3, 2))
    """
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    for name, module in model.named_modules():
        if isinstance(module, embeddings) and module.sparse and module.weight.requires_grad:
            where = f"layer {name}" if name else "the model"
            raise InputError(
                f"{where} gives sparse gradients, which runs do not take; make it "
                "with sparse=False",
                value=type(module).__name__,
            )
