"""The proof of Monarch's speed; of times nothing is asserted: other tests run next to these."""

from __future__ import annotations

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.layers.form_plan import DENSE_FORM, LayerForm
from modicum.proofs.base import ProofRun
from modicum.proofs.linears import monarch


@pytest.mark.parametrize("null", [False, True])
def test_a_null_run_times_dense_products(null: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[LayerForm] = []

    def gain(width: int, form: LayerForm, turns: int) -> float:
        seen.append(form)
        return 1.0 if form == DENSE_FORM else 4.0

    monkeypatch.setattr(monarch, "_gain", gain)
    run = ProofRun(find("monarch"), null=null, full=False)
    monarch._speed(run)
    (criterion,) = run.conclude().criteria
    assert criterion.passed is not null
    assert {form.arguments.get("blocks") for form in seen} == ({None} if null else {4, 16})


def test_products_of_a_form_are_timed_next_to_dense_ones() -> None:
    assert monarch._gain(32, LayerForm("monarch", {"blocks": 4}), 1) > 0
