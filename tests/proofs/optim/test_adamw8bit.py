"""The proof of 8-bit AdamW, and that each part can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.optim import adamw8bit
from modicum.proofs.optim.adamw8bit import Even
from modicum.proofs.proof import Proof


def proof_of(part: Callable[[ProofRun], None], *, null: bool) -> Proof:
    run = ProofRun(find("adamw8bit"), null=null, full=False)
    part(run)
    return run.conclude()


def test_the_state_is_a_quarter_and_adamws_is_not() -> None:
    proof = proof_of(adamw8bit.less_state, null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    assert 0.25 < proof.figures[0].ratio < 0.26
    assert proof_of(adamw8bit.less_state, null=True).undetected == ()


@pytest.mark.expensive
def test_the_loss_is_adamws_and_that_of_one_scale_is_not() -> None:
    proof = proof_of(adamw8bit.the_same_loss, null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    assert proof_of(adamw8bit.the_same_loss, null=True).undetected == ()


def test_even_levels_are_rounded_in_blocks_and_never_to_zero_without_a_sign() -> None:
    moment = torch.tensor([[1.0, 0.5, 1e-9, 0.0]])
    assert Even(None)._rounded(moment, 127)[0].tolist() == pytest.approx([1, 64 / 127, 0, 0])
    blocks = Even(2)._rounded(moment, 255)[0]
    assert blocks[2:].tolist() == pytest.approx([1e-9, 1e-9 / 255])
