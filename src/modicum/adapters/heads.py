"""What a model has trained in full next to an adapter: the head of a classifier."""

from __future__ import annotations

import torch
from torch import nn

from modicum.adapters.native_files import StoredAdapter
from modicum.adapters.peft_task import classifier_heads, trained_heads
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part


def stored_heads(model: nn.Module, stored: StoredAdapter) -> dict[str, nn.Module]:
    """The modules, by plain names, whose weights a stored adapter brings.

    Of a model of ours those that it trains; of transformers' own classifier, those in the file.
    """
    there = {
        path: head
        for path, head in classifier_heads(model).items()
        if any(name.startswith(f"{path}.") for name in stored.heads)
    }
    return trained_heads(model) or there


@torch.no_grad()
def put_heads(model: nn.Module, stored: StoredAdapter) -> None:
    """Give a model the heads that were trained with a stored adapter; it may be sharded.

    Raises:
        InputError: the folder lacks a tensor of them, or one has another shape.
    """
    for path, head in stored_heads(model, stored).items():
        for leaf, parameter in head.named_parameters():
            name = f"{path}.{leaf}"
            tensor = stored.heads.get(name)
            if tensor is None or tensor.shape != parameter.shape:
                problem = "lacks the classifier's head, or has one for other classes"
                raise InputError(problem, file=stored.file, value=name)
            if not parameter.is_meta:
                part, before = own_part(parameter)
                part.copy_(tensor[before : before + part.shape[0]])
