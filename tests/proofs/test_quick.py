"""Every method's quick proof shows what its committed one did, and its null is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from modicum.core.contracts.catalog import MethodRecord, catalog
from modicum.core.errors import InputError
from modicum.proofs import prove

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "proofs"
PROVEN = [
    pytest.param(record, id=name, marks=pytest.mark.ranks if record.room == "comm" else ())
    for name, record in catalog().items()
    if (RESULTS / f"{name}.json").exists()
]


def proved(record: MethodRecord, *, null: bool) -> Any:
    try:
        return prove(record.name, null=null)
    except InputError as error:
        if "cannot be imported" not in str(error):
            raise
        pytest.skip(str(error))  # a library that a proof compares with


@pytest.mark.slow
@pytest.mark.parametrize("record", PROVEN)
def test_a_quick_proof_says_what_it_said(record: MethodRecord) -> None:
    committed = json.loads((RESULTS / f"{record.name}.json").read_text(encoding="utf-8"))
    proof = proved(record, null=False)
    assert proof.mode == "quick"
    known = {c["sentence"] for c in committed["criteria"] if not c["passed"]}
    missed = {c.sentence for c in proof.criteria if not c.passed and c.part == "claim"} - known
    # A criterion about time may hold on one day and not on another; no other may.
    assert all(re.search("time|seconds", sentence) for sentence in missed), proof.reason
    assert [c.sentence for c in proof.criteria] == [c["sentence"] for c in committed["criteria"]]
    assert not any(swept.at_edge for swept in proof.sweeps)


@pytest.mark.slow
@pytest.mark.parametrize("record", PROVEN)
def test_a_null_is_noticed(record: MethodRecord) -> None:
    proof = proved(record, null=True)
    assert proof.defects == (), proof.reason
    assert proof.planted or proof.verdict == "does not hold"
