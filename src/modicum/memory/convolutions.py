"""What a policy has at a convolution: a bound on its stored input, and sums over one update."""

from __future__ import annotations

import math
import statistics
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.layer_sites import Site
from modicum.core.ranks.sharding import own_part
from modicum.memory.base import Seen


class BoundedConvolution:
    """The bound of a convolution, and what is summed up in an update that is measured.

    Args:
        site: the convolution.
        module: the layer itself.

    Attributes:
        observed: whether the momentum of this update was read.
    """

    def __init__(self, site: Site, module: nn.Module) -> None:
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        self.site, self.name, self.module = site, site.name, module
        self.bound = 0.0
        self.seen: Seen | None = None
        self.clear()

    @property
    def weight(self) -> nn.Parameter | None:
        """The weight that the layer owns; None where others make it (weight_norm, pruning)."""
        return self.module._parameters.get("weight")

    def clear(self) -> None:
        """Forget the sums."""
        self.squares = torch.zeros(self.site.out_features, dtype=torch.float64)
        self.nonzero = self.elements = self.count = 0
        self.observed = False
        self.magnitude = self.largest = 0.0

    def saw_input(self, tensor: Tensor, largest: float) -> None:
        """Count an input that was stored."""
        self.nonzero += int(tensor.count_nonzero())
        self.elements += tensor.numel()
        self.largest = max(self.largest, largest)

    def saw_gradient(self, gradient: Tensor) -> None:
        """Add up the squares of the gradient at an output [..., channels, places]."""
        channels = gradient.ndim - self.module.weight.ndim + 1
        others = [place for place in range(gradient.ndim) if place != channels]
        self.squares += gradient.detach().float().square().sum(others).double().cpu()

    def saw_momentum(self, momentum: Tensor) -> None:
        """Add up the magnitudes of (this rank's part of) the weight's momentum."""
        self.observed = True  # also of a part without rows
        part, _ = own_part(momentum.detach())
        self.magnitude += float(part.abs().sum(dtype=torch.float64))
        self.count += part.numel()

    @property
    def sums(self) -> list[float]:
        """All that is added up over ranks."""
        rest = [self.nonzero, self.elements, self.magnitude, self.count]
        return [*self.squares.tolist(), *rest]

    def conclude(self, sums: list[float], largest: float) -> Seen | None:
        """What was seen; None where the layer was not used, or a number is not finite."""
        *squares, nonzero, elements, magnitude, count = sums
        if not (elements and count):
            return None
        gradient = statistics.median(squares) ** 0.5
        seen = Seen(gradient, nonzero / elements, magnitude / count, largest)
        usable = seen.gradient > 0 and seen.nonzero > 0 and seen.momentum > 0
        finite = all(map(math.isfinite, (*sums, largest)))
        return seen if usable and finite else None


def momentum_of(optimizer: torch.optim.Optimizer, layer: BoundedConvolution) -> Tensor:
    """The weight's momentum, in the unit of gradients; the gradient where the optimizer has none.

    Raises:
        InputError: it does not train the weight, or there is neither.
    """
    parameter, group = trained_by(optimizer, layer)
    state = optimizer.state.get(parameter, {})
    kept = state.get("momentum_buffer")
    if _like(kept, parameter):
        return kept / (1 - group.get("dampening", 0.0))
    kept, betas = state.get("exp_avg"), _betas(optimizer, group)
    if _like(kept, parameter) and betas is not None:
        return kept / (1 - betas[0])
    if parameter.grad is None:
        raise InputError(
            "bounds follow the optimizer's momentum, and this optimizer has neither a momentum of "
            f"{layer.name}.weight in the weight's shape nor a gradient when it steps; use an "
            "optimizer with momentum_buffer or exp_avg, or one that does not step in the backward "
            "pass",
            value=type(optimizer).__name__,
        )
    return parameter.grad


def _betas(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[float, float] | None:
    """Adam's betas: the group's, as in PyTorch's optimizers, or those of the optimizer's value."""
    found = group.get("betas") or getattr(getattr(optimizer, "method", None), "betas", None)
    return None if found is None else (float(found[0]), float(found[1]))


def _like(kept: Any, parameter: Tensor) -> TypeGuard[Tensor]:
    return isinstance(kept, Tensor) and kept.shape == parameter.shape and kept.is_floating_point()


def trained_by(
    optimizer: torch.optim.Optimizer, layer: BoundedConvolution
) -> tuple[Tensor, dict[str, Any]]:
    """What the optimizer trains for a layer's weight, by name where it knows names, and its group.

    Raises:
        InputError: the optimizer does not train it.
    """
    own = layer.weight
    for group in optimizer.param_groups:
        if f"{layer.name}.weight" in group.get("names", ()):
            return group["params"][list(group["names"]).index(f"{layer.name}.weight")], group
        for parameter in group["params"]:
            if own is not None and parameter is own:
                return own, group
    raise InputError(f"the optimizer does not train {layer.name}.weight")
