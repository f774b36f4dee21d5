"""What a model makes of prompts, and how far two models are from each other in that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from modicum.models.decoders import Decoder, config_of
from modicum.models.generate import NotFinite, generate


@dataclass(frozen=True)
class Outputs:
    """Logits and greedy text of a model for some prompts.

    Args:
        ids: of each prompt its tokens, and what the trained model writes after them.
        logits: over these, fp32 [tokens, vocabulary] each, less their mean, which changes no
            probability.
        written: the tokens that this model writes after each prompt.
    """

    ids: Sequence[list[int]]
    logits: Sequence[Tensor]
    written: Sequence[list[int]]


@torch.no_grad()
def outputs(
    model: Decoder,
    prompts: Sequence[list[int]],
    tokens: int,
    eos_id: int,
    like: Outputs | None = None,
) -> Outputs:
    """What a model makes of prompts.

    Args:
        tokens: at most so many are written after each prompt.
        like: outputs of the trained model, over whose text the logits are computed; None: this is
            the trained model.
    """
    device = next(model.parameters()).device
    limit = config_of(model).context
    written = [
        list(_greedy(
            model, torch.tensor([prompt], device=device), min(tokens, limit - len(prompt)), eos_id
        ))
        for prompt in prompts
    ]  # fmt: skip
    ids = [[*prompt, *text] for prompt, text in zip(prompts, written, strict=True)]
    ids = list(like.ids) if like is not None else ids
    logits = []
    for each in ids:
        found: Tensor = model(torch.tensor([each], device=device))[0].float().cpu()
        logits.append(found - found.mean(-1, keepdim=True))
    return Outputs(ids, logits, written)


def _greedy(model: Decoder, prompt: Tensor, most: int, eos_id: int) -> Iterator[int]:
    """The likeliest tokens after a prompt [1, T]; fewer where a logit is no finite number.

    The distance of the logits says that such a model is another one.
    """
    with suppress(NotFinite):
        yield from generate(model, prompt, max_tokens=most, eos_id=eos_id)


def distance(trained: Outputs, other: Outputs) -> float:
    """The norm of the difference of the logits over that of the trained model's.

    Infinite where the vocabularies differ, or a logit is no finite number.

    >>> one = Outputs([[1]], [torch.tensor([[3.0, -3.0]])], [[0]])
    >>> two = Outputs([[1]], [torch.tensor([[3.3, -3.3]])], [[0]])
    >>> round(distance(one, two), 3)
    0.1
    """
    pairs = list(zip(trained.logits, other.logits, strict=True))
    if any(one.shape != two.shape for one, two in pairs):
        return math.inf
    error = sum(float((one - two).square().sum()) for one, two in pairs)
    size = sum(float(one.square().sum()) for one, _ in pairs)
    found = math.sqrt(error / size) if size else math.sqrt(error)
    return found if math.isfinite(found) else math.inf


def other_text(trained: Outputs, other: Outputs) -> int | None:
    """The first prompt after which another text is written for no reason that logits give.

    Where the two likeliest tokens are closer to each other than twice the largest difference of
    the logits, either may be written.
    """
    pairs = zip(trained.logits, other.logits, strict=True)
    largest = max(float((one - two).abs().max()) for one, two in pairs)
    for number, (own, found) in enumerate(zip(trained.written, other.written, strict=True)):
        place = next((n for n, (a, b) in enumerate(zip(own, found, strict=False)) if a != b), None)
        if place is None and len(own) == len(found):
            continue
        if place is None:
            return number  # one of them ended
        before = len(trained.ids[number]) - len(own) + place - 1
        logits = trained.logits[number][before]
        if float(logits[own[place]] - logits[found[place]]) > 2 * largest:
            return number
    return None
