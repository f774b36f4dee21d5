"""Rules: from a gradient and the moments of those before it to a direction.

A rule works on fp32 tensors of one shape, whatever that is of: a full parameter, a rank's part of
it, or a gradient in a subspace. It says by that shape what it keeps, and keeps nothing itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from modicum.optim.kept import KeptTensor


class UpdateRule(Protocol):
    """What an optimizer asks of a rule."""

    def state(self, shape: tuple[int, ...]) -> Mapping[str, KeptTensor]:
        """What it keeps for a gradient of this shape, by names."""
        ...

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        """Change what is kept in place; W goes by -(learning rate) x factor x direction.

        Args:
            moments: the tensors that `state` names.
            age: how many gradients the moments have seen, this one included.

        Returns:
            The direction, which may be a moment itself, and the factor.
        """
        ...


@dataclass(frozen=True)
class RowRange:
    """Which rows (of dimension 0) of a parameter a rule has before it.

    Args:
        shape: of the full parameter.
        before: how many rows of the full one precede these.
    """

    shape: tuple[int, ...]
    before: int = 0

    @property
    def elements(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)


class SummingRule(ABC):
    """A rule that needs a few numbers of a full tensor, each a sum over its rows.

    A rank that has some of the rows gives its own sums, all ranks' are added up, for all parameters
    at once, and then the direction is found. What is kept changes in either part, once.

    Attributes:
        copies: tensors of the gradient's size that a step makes at most.
        over_all: whether the sums are those of all parameters together.
    """

    copies: ClassVar[int] = 1
    over_all: bool = False

    @abstractmethod
    def state(self, shape: tuple[int, ...]) -> Mapping[str, KeptTensor]:
        """What it keeps for a gradient of this shape, by names."""

    @abstractmethod
    def numbers(self, shape: tuple[int, ...]) -> int:
        """How many sums it needs of a parameter of this shape."""

    @abstractmethod
    def sums(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int, rows: RowRange
    ) -> Tensor:
        """The sums over these rows, [numbers]; of no rows zeros."""

    @abstractmethod
    def direction_by(
        self,
        gradient: Tensor,
        moments: Mapping[str, Tensor],
        age: int,
        rows: RowRange,
        sums: Tensor,
    ) -> tuple[Tensor, float]:
        """The direction of these rows and the factor, by the sums over all rows."""

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        """Both at once, of all rows."""
        rows = RowRange(tuple(gradient.shape))
        sums = self.sums(gradient, moments, age, rows)
        return self.direction_by(gradient, moments, age, rows, sums)


def copies_of(rule: UpdateRule) -> int:
    """Tensors of the gradient's size that a step of a rule makes at most: one, or as it says."""
    return int(getattr(rule, "copies", 1))


EpsilonPlace = Literal["before_correction", "outside_root", "inside_root"]


@dataclass(frozen=True)
class Adam:
    """M <- b1 M + (1 - b1) G, V <- b2 V + (1 - b2) G^2; the direction is M over the root of V.

    Args:
        betas: b1 and b2.
        epsilon: keeps the root from zero.
        epsilon_place: `before_correction` has M / (sqrt V + epsilon), and the bias of young moments
            is corrected in the factor, sqrt(1 - b2^t) / (1 - b1^t), as at the end of section 2 and
            in GaLore's code; `outside_root` adds epsilon to sqrt(V / (1 - b2^t)), as
            `torch.optim.AdamW` does; `inside_root` to V / (1 - b2^t).

    Source: Kingma and Ba, "Adam", arXiv 1412.6980, algorithm 1 and the end of section 2.
    """

    betas: tuple[float, float]
    epsilon: float
    epsilon_place: EpsilonPlace = "before_correction"

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        return {"exp_avg": KeptTensor(shape), "exp_avg_sq": KeptTensor(shape, squared=True)}

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        first, second = self.betas
        mean, square = moments["exp_avg"], moments["exp_avg_sq"]
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        young = math.sqrt(1 - second**age)
        if self.epsilon_place == "before_correction":
            root, factor = square.sqrt().add_(self.epsilon), young / (1 - first**age)
        elif self.epsilon_place == "outside_root":
            root, factor = square.sqrt().div_(young).add_(self.epsilon), 1 / (1 - first**age)
        else:
            root = square.div(young**2).add_(self.epsilon).sqrt_()
            factor = 1 / (1 - first**age)
        return torch.div(mean, root, out=root), factor


@dataclass(frozen=True)
class Momentum:
    """M <- mu M + G, and M is the direction."""

    mu: float

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        return {"momentum_buffer": KeptTensor(shape)}

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        return moments["momentum_buffer"].mul_(self.mu).add_(gradient), 1.0


@dataclass(frozen=True)
class AveragedMomentum:
    """M <- mu M + (1 - mu) G; the direction is M, or with Nesterov's step (1 - mu) G + mu M.

    It is (1 - mu) times `Momentum`, which matters to nobody who normalizes the direction.
    """

    mu: float
    nesterov: bool = False

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        return {"momentum_buffer": KeptTensor(shape)}

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        moment = moments["momentum_buffer"].lerp_(gradient, 1 - self.mu)
        return gradient.lerp(moment, self.mu) if self.nesterov else moment, 1.0


@dataclass(frozen=True)
class Unchanged:
    """The gradient is the direction; nothing is kept."""

    def state(self, shape: tuple[int, ...]) -> dict[str, KeptTensor]:
        return {}

    def direction(
        self, gradient: Tensor, moments: Mapping[str, Tensor], age: int
    ) -> tuple[Tensor, float]:
        return gradient, 1.0
