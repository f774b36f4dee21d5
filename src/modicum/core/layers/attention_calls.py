"""Queries and keys as attention sees them: after rotation, with scale and mask, module by module.

Looks at calls of `torch.nn.functional.scaled_dot_product_attention`, whoever makes them. Attention
that is computed by other means is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.layers.torch_calls import Call, Calls


@dataclass(frozen=True)
class SeenAttention:
    """What one call was given.

    Args:
        module: the name of the innermost module that made it.
        query, key: [batch, heads, L, d] and [batch, heads, S, d], without their graph; where keys
            serve several queries' heads each, they are repeated.
        mask: as it was given: bool, true where a key is seen, or numbers that are added.
        causal: position i sees keys up to the i-th.
        scale: of the scores.
    """

    module: str
    query: Tensor
    key: Tensor
    mask: Tensor | None
    causal: bool
    scale: float


@contextmanager
def seen_attention(model: nn.Module, look: Callable[[SeenAttention], None]) -> Iterator[None]:
    """Have `look` called with every attention of the model's forward passes in this block."""
    path: list[str] = []

    def enter(name: str, *_: Any) -> None:
        path.append(name)

    def leave(name: str, *_: Any) -> None:
        # Whoever enters this block in a module's own hook comes after that module was entered.
        if path and path[-1] == name:
            path.pop()

    def done(call: Call, _: Any) -> None:
        if call.function is F.scaled_dot_product_attention and path:
            with torch.no_grad():
                look(_seen(path[-1], call))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            hooks = (
                module.register_forward_pre_hook(partial(enter, name)),
                module.register_forward_hook(partial(leave, name), always_call=True),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        with Calls(done):
            yield


def _seen(module: str, call: Call) -> SeenAttention:
    query, key = (call.argument(place, name) for place, name in ((0, "query"), (1, "key")))
    query, key = (x.detach().reshape(-1, *x.shape[-3:]) for x in (query, key))
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = call.argument(6, "scale")
    return SeenAttention(
        module,
        query,
        key,
        call.argument(3, "attn_mask"),
        bool(call.argument(5, "is_causal")),
        query.shape[-1] ** -0.5 if scale is None else float(scale),
    )
