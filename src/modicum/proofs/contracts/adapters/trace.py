"""What an adapter says that it changes, against the trace of the changed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from modicum.core.contracts.ledger import Ledger
from modicum.models import create
from modicum.models.llama import Llama
from modicum.models.traced_ledger import TracedModel
from modicum.proofs.contracts.adapters.ledger import (
    DEEP,
    SHAPE,
    adapter_ledger,
    needs_gradient,
    saved_said,
)
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    attached,
    tokens,
)

_WITHIN = 0.05


@adapters_check()
def check_trace(subject: AdapterSubject) -> None:
    """Traced blocks differ from those without the adapter as its ledger says, within 5 %."""
    model = create(DEEP, seed=0)
    full, weights = _kept(model), TracedModel(model, _batch, _sum).weights
    model.requires_grad_(False)
    frozen = _traced(model)
    adapter = attached(subject, model)
    traced, said = _traced(model), adapter_ledger(adapter)
    found = traced.bytes("weight") - weights
    assert found == said.bytes("weight"), (
        f"the ledger says {said.bytes('weight')} bytes of weights, the trace has {found}"
    )
    predicted, measured = saved_said(adapter) - saved_said(None), _kept(model) - full
    assert abs(measured - predicted) <= _WITHIN * full, (
        f"the ledger says {predicted:+} bytes kept against full training's {full}, the trace has "
        f"{measured:+}"
    )
    for phase in ("forward", "backward"):
        extra, work = traced.flops(phase) - frozen.flops(phase), said.flops(phase)
        assert abs(extra - work) <= _WITHIN * max(work, 1), (
            f"the ledger says {work} operations more in the {phase} pass, the trace has {extra}"
        )


def _kept(model: Llama) -> int:
    """Bytes that the forward pass leaves for the backward pass."""
    ledger = TracedModel(model, _batch, _sum, blocks=model.blocks).ledger(SHAPE.sequences)
    return ledger.bytes("activation", "loss")


def _traced(model: Llama) -> Ledger:
    """The ledger of a pass in which the first block works as all others do."""
    with _differentiated(model):
        return TracedModel(model, _batch, _sum, blocks=model.blocks).ledger(SHAPE.sequences)


@contextmanager
def _differentiated(model: Llama) -> Iterator[None]:
    hook = model.model.embed_tokens.register_forward_hook(needs_gradient)
    try:
        yield
    finally:
        hook.remove()


def _batch(rows: int) -> Tensor:
    return tokens(rows, SHAPE.tokens)


def _sum(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).sum()
    return total
