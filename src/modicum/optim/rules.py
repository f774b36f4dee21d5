"""Rules: from a gradient and the moments of those before it to a direction.

A rule works on fp32 tensors of one shape, whatever that is of: a full parameter, a rank's part of
it, or a gradient in a subspace. It keeps no state of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class UpdateRule(Protocol):
    """What an optimizer asks of a rule.

    Attributes:
        moments: the names of its moments, and whether they have a sign.
        squared: those of them that are means of squares.
    """

    @property
    def moments(self) -> Mapping[str, bool]: ...
    @property
    def squared(self) -> frozenset[str]: ...
    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        """Change the moments in place; W goes by -(learning rate) x factor x direction.

        Args:
            age: how many gradients the moments have seen, this one included.

        Returns:
            The direction, which may be a moment itself, and the factor.
        """
        ...


@dataclass(frozen=True)
class Adam:
    """M <- b1 M + (1 - b1) G, V <- b2 V + (1 - b2) G^2; the direction is M / (sqrt V + epsilon).

    The bias of young moments is corrected in the factor, sqrt(1 - b2^t) / (1 - b1^t), so that
    epsilon is not; as in the authors' code and in transformers. `torch.optim.AdamW` adds epsilon
    to the corrected root.

    Source: Kingma and Ba, "Adam", arXiv 1412.6980, end of section 2.
    """

    betas: tuple[float, float]
    epsilon: float
    moments: Mapping[str, bool] = field(
        default_factory=lambda: {"exp_avg": True, "exp_avg_sq": False}
    )
    squared: frozenset[str] = frozenset({"exp_avg_sq"})

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        first, second = self.betas
        mean, square = moments["exp_avg"], moments["exp_avg_sq"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        root = square.sqrt().add_(self.epsilon)
        factor = math.sqrt(1 - second**age) / (1 - first**age)
        return torch.div(mean, root, out=root), factor


@dataclass(frozen=True)
class Momentum:
    """M <- mu M + G, and M is the direction."""

    mu: float
    moments: Mapping[str, bool] = field(default_factory=lambda: {"momentum_buffer": True})
    squared: frozenset[str] = frozenset()

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        return moments["momentum_buffer"].mul_(self.mu).add_(gradient), 1.0
