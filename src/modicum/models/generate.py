"""Tokens from a model, one at a time, with cached keys and values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.models.decoders import Decoder, config_of

_DAMAGED = "the model's outputs are no finite numbers: its weights are damaged or diverged"


class NotFinite(InputError):
    """A model's logits are no finite numbers, so that no token follows."""


def sample(
    logits: Tensor, temperature: float, top_p: float, generator: torch.Generator | None
) -> int:
    """One token from logits [vocabulary]: the likeliest at temperature 0, else a draw.

    `top_p` keeps the fewest likeliest tokens whose probabilities reach it (nucleus sampling,
    Holtzman et al., arXiv 1904.09751).

    Raises:
        NotFinite: the likeliest logit, or what is drawn from, is no finite number.
    """
    if temperature == 0.0:
        best = int(logits.argmax())  # a NaN is the largest
        if not logits[best].isfinite():
            raise NotFinite(_DAMAGED)
        return best
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if not probabilities.isfinite().all():
        raise NotFinite(
            f"{_DAMAGED}, or the temperature is too small",
            field="temperature",
            value=temperature,
        )
    if top_p < 1.0:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(0) - ordered >= top_p
        beyond[0] = False
        probabilities[order[beyond]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate(
    model: Decoder,
    input_ids: Tensor,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos_id: int | Collection[int] | None = None,
    generator: torch.Generator | None = None,
    agreed: Callable[[int], int] = lambda token: token,
    drawn: Callable[[Tensor, int], object] | None = None,
) -> Iterator[int]:
    """The tokens that follow `input_ids` [1, T], until `eos_id` (not given out) or a limit.

    Ends early where the model's context is full. Draws are made on the CPU, with `generator`;
    call `model.eval()` first if the model holds dropout. Of a model that is sharded over ranks all
    ranks generate the same: `agreed` maps a rank's token to the one that all continue with. `drawn`
    is called with the logits [vocabulary], on the CPU, and the token that was drawn from them.

    Raises:
        InputError: there is nothing to continue, or the prompt fills the context.
        NotFinite: as `sample`.
    """
    length = input_ids.shape[1]
    context = config_of(model).context
    if length == 0:
        raise InputError("the prompt is empty; give at least one token", field="prompt")
    if length >= context:
        raise InputError(
            f"the prompt's {length} tokens fill the model's context of {context}; shorten it",
            field="prompt",
        )
    ends = {eos_id} if isinstance(eos_id, int) else set(eos_id or ())
    count = min(max_tokens, context - length)
    states: Any = model.new_states(1, length + count)
    for _ in range(count):
        logits, states = model.continued(input_ids, states)
        following = logits[0].cpu()
        token = agreed(sample(following, temperature, top_p, generator))
        if drawn is not None:
            drawn(following, token)
        if token in ends:
            return
        yield token
        input_ids = input_ids.new_tensor([[token]])
