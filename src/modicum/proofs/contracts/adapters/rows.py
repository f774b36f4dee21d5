"""Batches whose rows use different adapters."""

from __future__ import annotations

from modicum.adapters.batch_rows import adapter_names
from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    another,
    assert_close,
    attached,
    llama,
    stir,
    tokens,
)


@adapters_check()
def check_rows_of_a_batch_use_their_own(subject: AdapterSubject) -> None:
    """Rows of one batch with two adapters and with none are what each is alone, to 1e-6."""
    model, ids = llama().double(), tokens(5)
    first = stir(attached(subject, model, name="first"))
    second = stir(another(subject, model, "second"))
    names = ("first", None, "second", "first", None)
    first.activate()
    alone = {"first": model(ids)}
    second.activate()
    alone["second"] = model(ids)
    second.deactivate()
    plain = model(ids)
    with adapter_names(model, names):
        found = model(ids)
    for row, name in enumerate(names):
        expected = plain if name is None else alone[name]
        assert_close(
            found[row], expected[row], 1e-6, f"row {row}, of {name}, is another than alone"
        )
    assert not first.active, "afterwards other adapters are active than before"
    assert_close(model(ids), plain, 0.0, "afterwards the model is another")
