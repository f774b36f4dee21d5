from __future__ import annotations

import sys

import pytest

from modicum.core.contracts.catalog import find
from modicum.core.errors import InputError
from modicum.proofs import prove
from modicum.proofs.adapters.lora import equal_to_peft
from modicum.proofs.base import ProofRun
from modicum.proofs.proof import Proof


def equality(*, null: bool) -> Proof:
    pytest.importorskip("peft")
    run = ProofRun(find("lora"), null=null, full=False)
    equal_to_peft(run)
    return run.conclude()


def test_lora_is_pefts_lora() -> None:
    proof = equality(null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    assert proof.claim_verdict == "not shown here"  # that it is PEFT's is a check, and no claim
    assert [criterion.bar for criterion in proof.criteria] == [1e-6, 1e-5]
    assert set(proof.versions) >= {"peft", "transformers"}


def test_a_wrong_scale_is_noticed() -> None:
    proof = equality(null=True)
    assert not any(criterion.passed for criterion in proof.criteria)


def test_without_peft_the_proof_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"pip install modicum\[hf\]"):
        prove("lora")
