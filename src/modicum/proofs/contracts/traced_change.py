"""What a method says that it changes, against the traces of a decoder before and after it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

from torch import Tensor, nn

from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.models.llama import Llama
from modicum.models.traced_ledger import TracedModel
from modicum.proofs.contracts.adapters.subjects import LLAMA, tokens

# Deep enough that what is peculiar to the first block does not decide.
DEEP = replace(LLAMA, layers=4, initializer_range=0.3)
SHAPE = ModelQuery(sequences=3, tokens=24)
_WITHIN = 0.05


@dataclass(frozen=True)
class Change:
    """By how much bytes and operations change.

    Attributes:
        weights: bytes of parameters and buffers.
        kept: bytes that the forward pass leaves for the backward pass.
        forward, backward: floating-point operations.
    """

    weights: int
    kept: int
    forward: int
    backward: int

    @classmethod
    def of(cls, ledger: Ledger, kept: int | None = None) -> Change:
        """What a ledger of a model says, or one of differences."""
        left = ledger.bytes("activation", "loss") if kept is None else kept
        return cls(ledger.bytes("weight"), left, ledger.flops("forward"), ledger.flops("backward"))

    def since(self, before: Change) -> Change:
        """What lies between the two."""
        return Change(*(new - old for new, old in zip(self._all, before._all, strict=True)))

    @property
    def _all(self) -> tuple[int, int, int, int]:
        return self.weights, self.kept, self.forward, self.backward

    def assert_said(self, said: Change, full: int) -> None:
        """This is what was traced: bytes of weights exactly as said, the others within 5 %.

        Args:
            full: bytes that full training keeps, of which what is kept may be 5 % off.

        Raises:
            AssertionError: it is not, in one sentence.
        """
        assert self.weights == said.weights, (
            f"the ledger says {said.weights:+} bytes of weights, the trace has {self.weights:+}"
        )
        assert abs(self.kept - said.kept) <= _WITHIN * full, (
            f"the ledger says {said.kept:+} bytes kept against full training's {full}, the trace "
            f"has {self.kept:+}"
        )
        for phase in ("forward", "backward"):
            found, predicted = getattr(self, phase), getattr(said, phase)
            assert abs(found - predicted) <= _WITHIN * max(abs(predicted), 1), (
                f"the ledger says {predicted:+} operations in the {phase} pass, the trace has "
                f"{found:+}"
            )


def traced(model: Llama, *, flows: bool = False) -> Ledger:
    """The trace's ledger of a decoder, at `SHAPE`.

    Args:
        flows: whether the embeddings' output takes a gradient in any case, so that the first
            block works as all others do.
    """
    hook = model.model.embed_tokens.register_forward_hook(needs_gradient) if flows else None
    with nullcontext() if hook is None else hook:
        return TracedModel(model, _batch, _sum, blocks=model.blocks).ledger(SHAPE.sequences)


def needs_gradient(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """A hook behind which gradients flow."""
    if not output.requires_grad:
        output.requires_grad_()


def _batch(rows: int) -> Tensor:
    return tokens(rows, SHAPE.tokens)


def _sum(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).sum()
    return total
