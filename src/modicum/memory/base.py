"""What policies on saved activations share: which tensors, when to measure, one bound a layer.

A policy says how far the stored input of a convolution may be off. Of a convolution, the gradient
of the input does not depend on the stored input, so errors stay within one layer's weight gradient
and go no further back. Storage identity, the codec, statistics over ranks and resuming come from
`core.layers.saved_tensors`, `attached` and `layers`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.codecs.error_bounded import ErrorBoundedCodec
from modicum.core.contracts.ledger import Entry, Ledger, Phase
from modicum.core.contracts.method import Context, Method
from modicum.core.layers.saved_tensors import Shares
from modicum.core.ranks.ranks import Ranks

if TYPE_CHECKING:
    from modicum.memory.activations import Activations

_SAVED: tuple[Phase, ...] = ("forward", "loss")


@dataclass(frozen=True)
class ActivationContext(Context):
    """What a policy on activations is bound to: the model, and the ranks that train it."""

    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class Seen:
    """What was seen of a convolution in one update, over all micro-batches and ranks.

    Args:
        gradient: S, the root of the sum of squares of the loss's gradient at the output: the median
            over output channels.
        nonzero: R, the share of the input's elements that are not zero.
        momentum: M, the mean magnitude of the weight's momentum, in the unit of gradients.
        largest: the largest magnitude of an element of the input.
    """

    gradient: float
    nonzero: float
    momentum: float
    largest: float


class SharesRange(NamedTuple):
    """What may be left of the bytes: data decide, so there is a range until a step has run."""

    least: Shares
    expected: Shares
    most: Shares


@dataclass(frozen=True)
class ActivationQuery:
    """What a policy's ledger is asked at: bytes that autograd would save.

    Args:
        values: of tensors whose values may be a little off.
        signs: of tensors of which only the signs are needed.
        largest: of the largest of them.
        element_bytes: bytes of an element.
    """

    values: int
    signs: int
    largest: int
    element_bytes: int = 4


class ActivationPolicy(Method):
    """The value of a policy: which error the stored input of a convolution may have, and when.

    A subclass says what bound to begin with, in which updates to measure, and which bound follows.
    """

    @abstractmethod
    def first_bound(self, largest: float) -> float:
        """The bound until something was measured, of a tensor whose largest magnitude this is."""

    @abstractmethod
    def measures(self, update: int) -> bool:
        """Whether the update of this number, from 1, is measured."""

    @abstractmethod
    def next_bound(self, seen: Seen) -> float:
        """The bound that follows from a measured update."""

    @abstractmethod
    def shares(self, element_bytes: int) -> SharesRange:
        """What is left of saved tensors, by arithmetic, before anything runs."""

    def codec(self) -> ErrorBoundedCodec:
        """What makes tensors smaller under a bound."""
        return DualQuantization()

    def ledger(self, at: ActivationQuery, shares: Shares | None = None) -> Ledger:
        """The bytes that are kept in place of saved ones.

        Args:
            shares: what was measured (`Activations.measured`); None: what is expected.
        """
        shares = shares or self.shares(at.element_bytes).expected
        return Ledger.of(
            Entry("activation", round(shares.values * at.values), _SAVED, "convolution inputs"),
            Entry("activation", round(shares.signs * at.signs), _SAVED, "signs"),
            Entry(
                "workspace",
                shares.workspace(at.largest // at.element_bytes),
                ("forward", "backward"),
                "compressing",
            ),
        )

    def attach(self, model: nn.Module, ranks: Ranks | None = None) -> Activations:
        """The policy at work on the convolutions of a model.

        Raises:
            InputError: the model has no convolution.
        """
        from modicum.memory.activations import Activations

        return Activations(self, model, ranks or Ranks())

    def bind(self, context: Context) -> Activations:
        """Attach to the context's model."""
        ranks = context.ranks if isinstance(context, ActivationContext) else None
        return self.attach(context.model, ranks)
