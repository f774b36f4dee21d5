"""Statistics of batch norms, taken anew for a model that has become smaller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.map_norms import BATCH_NORMS


@torch.no_grad()
def reestimate_batch_norms(
    model: nn.Module,
    batches: Iterable[Any],
    run: Callable[[nn.Module, Any], object] = lambda model, batch: model(batch),
) -> int:
    """Set the running statistics of all batch norms to their means over these batches.

    A layer of fewer components gives other means and variances than the one that was trained, so
    a model of ordered factors asks for this at each size at which it is used. All other modules are
    in evaluation meanwhile: prefixes are not drawn, and dropout drops nothing. Each batch counts as
    much; the variances are those within batches. Afterwards all modes are what they were.

    Args:
        batches: of training data, as `run` takes them.
        run: the forward pass of a batch.

    Returns:
        How many batch norms there are.

    Raises:
        InputError: there are batch norms and no batch.

    Source: Horvath et al., "Maestro", arXiv 2308.14929, section 4; Yu and Huang, "Universally
    Slimmable Networks", arXiv 1903.05134, section 3.4.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> reestimate_batch_norms(model, [torch.randn(8, 2), torch.randn(8, 2)])
    1
    """
    known = BATCH_NORMS | nn.SyncBatchNorm
    norms = [each for each in model.modules() if isinstance(each, known)]
    norms = [each for each in norms if each.track_running_stats]
    if not norms:
        return 0
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    ran = 0
    try:
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum = None  # the mean of all batches since the reset
        for batch in batches:
            if not ran:
                for norm in norms:
                    norm.reset_running_stats()
            run(model, batch)
            ran += 1
    finally:
        for module, training in modes.items():
            module.training = training
        for norm, momentum in momenta.items():
            norm.momentum = momentum
    if not ran:
        raise InputError("statistics of batch norms are taken of batches, and there is none")
    return len(norms)
