"""The proof of GaLore, part by part, and that each part can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from modicum.core.contracts.catalog import find
from modicum.models import create
from modicum.proofs.base import ProofRun
from modicum.proofs.optim import galore
from modicum.proofs.optim.text_bench import SCHEDULE, SYMBOLS, Adapted, Text
from modicum.proofs.proof import Proof

PARTS = [galore.less_state, galore.as_the_authors, galore.one_gradient_at_a_time]


def proof_of(part: Callable[[ProofRun], None], *, null: bool, full: bool = False) -> Proof:
    run = ProofRun(find("galore"), null=null, full=full)
    part(run)
    return run.conclude()


@pytest.mark.expensive
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_part_holds_and_its_null_does_not(part: Callable[[ProofRun], None]) -> None:
    proof = proof_of(part, null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    null = proof_of(part, null=True)
    assert null.undetected == ()
    assert len(null.criteria) == len(proof.criteria)


def test_the_state_of_7b_is_the_published() -> None:
    proof = proof_of(galore.less_state, null=False)
    figures = {figure.name: figure for figure in proof.figures}
    seven = figures["bytes of optimizer state, LLaMA 7B, rank 1024, 32-bit moments"]
    # Elements: of each matrix m r + 2 n r instead of 2 m n, and two of each other parameter.
    attention, mlp, rest = 3 * 4096 * 1024, (4096 + 2 * 11008) * 1024, 2 * 32000 * 4096
    matrices = 32 * (4 * attention + 3 * mlp)
    vectors = 65 * 4096
    parameters = 32 * 9 + 3
    assert seven.method == 4 * (matrices + 2 * rest + 2 * vectors) + 4 * parameters
    plain = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + rest + vectors
    assert seven.baseline == 8 * plain + 4 * parameters


@pytest.mark.slow
def test_every_arm_of_the_full_experiment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(galore, "FULL", replace(galore.QUICK, width=32, mlp_width=48, steps=20))
    proof = proof_of(galore.nearly_the_loss, null=False, full=True)
    arms = {"LoRA", "ReLoRA", "AdamW", "AdamW, matrices a quarter"}
    assert {f"held-out loss (nats), {arm}" for arm in arms} <= {f.name for f in proof.figures}
    null = proof_of(galore.nearly_the_loss, null=True, full=True)
    assert len(null.criteria) == len(proof.criteria) == 5
    assert proof.against.rival == "LoRA of the same rank"
    assert null.against.result == "equal"


def test_the_text_and_its_schedule() -> None:
    text = Text(galore.QUICK)
    training, held_out = text.halves
    assert len(held_out) > 100_000
    assert 0 <= int(training.min()) < int(training.max()) == SYMBOLS - 1
    one, again = (text.batch("step 3", 4, training) for _ in range(2))
    assert torch.equal(one, again)
    assert one.shape == (4, galore.QUICK.tokens + 1)
    assert not torch.equal(one, text.batch("step 4", 4, training))
    factors = [SCHEDULE(step, 100) for step in range(100)]
    assert (factors[0], max(factors), factors[9]) == (0.1, 1.0, 1.0)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)


def test_merging_a_pair_of_factors_leaves_the_weights_of_the_model() -> None:
    text = Text(replace(galore.QUICK, width=32, mlp_width=48, steps=9))
    model = create(text.size.model, seed=0)
    started = Adapted(rank=4, every=3).start(model, 1e-2)
    assert started.before_update is not None
    rows = text.batch("held out", 8, text.halves[1])
    for step in range(9):
        galore.loss_of(model, rows).backward()
        before, factors = text.held_out(model), started.optimizers[1]
        started.before_update(step)
        assert (started.optimizers[1] is not factors) == (step in (3, 6))
        for optimizer in started.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step in (3, 6):  # merged and begun anew, and nothing else
            assert text.held_out(model) == pytest.approx(before, abs=1e-4)
