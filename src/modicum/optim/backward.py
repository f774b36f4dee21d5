"""Any optimizer in the backward pass of a loop of one's own: a gradient is used up as it comes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from modicum.core.contracts.parameters import is_idle
from modicum.core.contracts.stepping import Stepper
from modicum.optim.base import MatrixOptimizer


def step_in_backward(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Update each parameter as soon as its gradient is there, and drop the gradient.

    So only the gradients of the layer at work exist. Weights are those of `optimizer.step()` to the
    bit, as long as nothing needs all gradients at once: there is no clipping by their norm and no
    accumulation over several backward passes, and each pass is an update. The loop calls neither
    `step` nor `zero_grad`. Under FSDP2 the hooks come after the gradients are summed; under
    `DistributedDataParallel` they come before, so let the trainer of modicum do it there.

    Returns:
        A function that ends it.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited
    Resources", arXiv 2306.09782, section 3.1; as in GaLore's per-layer mode.

    >>> from modicum.optim import AdamW
    >>> layer = torch.nn.Linear(2, 1)
    >>> stop = step_in_backward(AdamW(layer.parameters(), lr=0.1))
    >>> before = layer.weight.detach().clone()
    >>> layer(torch.ones(2)).sum().backward()
    >>> layer.weight.grad is None, torch.equal(layer.weight, before)
    (True, False)
    >>> stop()
    """
    if isinstance(optimizer, MatrixOptimizer):
        optimizer.follow_exchange()  # below it sees one parameter at a time
    stepper = Stepper(optimizer)

    def update(parameter: Tensor) -> None:
        if not is_idle(parameter):  # type: ignore[arg-type]
            stepper.step([parameter])  # type: ignore[list-item]
        parameter.grad = None

    handles = [
        parameter.register_post_accumulate_grad_hook(update)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    return stop
