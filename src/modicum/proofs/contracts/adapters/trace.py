"""What an adapter says that it changes, against the trace of the changed blocks."""

from __future__ import annotations

from functools import cache

from modicum.models import create
from modicum.proofs.contracts.adapters.ledger import adapter_ledger, saved_said
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    attached,
    llama,
)
from modicum.proofs.contracts.traced_change import DEEP, Change, traced


@cache
def _without_adapter() -> tuple[int, Change]:
    """The bytes that full training of the model keeps, and its trace with all of it frozen."""
    model = create(DEEP, seed=0)
    full = Change.of(traced(model)).kept
    model.requires_grad_(False)
    return full, Change.of(traced(model, flows=True), full)


@adapters_check(expensive=True)
def check_trace(subject: AdapterSubject) -> None:
    """Traced blocks differ from those without the adapter as its ledger says, within 5 %.

    Plans trace models that have no memory, so an adapted one of these must run in a trace too.
    """
    bare = llama("meta")
    attached(subject, bare)
    assert traced(bare).peak() > 0, "the trace of a model without memory finds no bytes"
    full, frozen = _without_adapter()
    model = create(DEEP, seed=0)
    adapter = attached(subject, model)
    kept = Change.of(traced(model)).kept
    found = Change.of(traced(model, flows=True), kept).since(frozen)
    found.assert_said(
        Change.of(adapter_ledger(adapter), saved_said(adapter) - saved_said(None)), full
    )
