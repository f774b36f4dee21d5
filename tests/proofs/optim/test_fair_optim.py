"""The proof of the fair benchmark, part by part, and that each part can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from modicum.core.contracts.catalog import find
from modicum.optim import FairOptim
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial
from modicum.proofs.base import ProofRun
from modicum.proofs.optim import fair_known, fair_optim
from modicum.proofs.optim.fair_bench import LOOKS, FairBench, parameters_of, trained
from modicum.proofs.proof import Proof

EXACT = [
    fair_known.the_known_optimum,
    fair_known.beyond_the_grid,
    fair_known.the_known_speedup,
]
TINY = replace(fair_optim.QUICK_SIZES[0], rows=4, tokens=16, steps=12)
SETTINGS = {"learning_rate": 4e-3, "weight_decay": 0.1, "warm_up": 0.3, "betas": (0.9, 0.99)}


def run_of(*, null: bool, full: bool = False) -> ProofRun:
    return ProofRun(find("fair_optim"), null=null, full=full)


def proof_of(part: Callable[[ProofRun], None], *, null: bool) -> Proof:
    run = run_of(null=null)
    part(run)
    return run.conclude()


@pytest.mark.parametrize("part", EXACT, ids=lambda part: part.__name__)
def test_each_exact_part_holds_and_its_null_does_not(part: Callable[[ProofRun], None]) -> None:
    proof = proof_of(part, null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    assert proof_of(part, null=True).undetected == ()


@pytest.mark.slow
def test_one_side_left_at_its_default_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_optim, "QUICK_TOKENS", 5.0)
    proof = proof_of(fair_optim.both_sides_tuned, null=False)
    assert all(criterion.passed for criterion in proof.criteria), proof.reason
    null = proof_of(fair_optim.both_sides_tuned, null=True)
    assert null.undetected == ()
    assert null.claim_verdict == "does not hold"


def test_the_full_experiment_has_every_optimizer_of_the_catalog_in_twelve_regimes() -> None:
    sides = fair_optim.sides_of(run_of(null=False, full=True))
    assert sides.spaces[fair_optim.REFERENCE] == sides.spaces[fair_optim.AGAIN]
    assert sides.methods[fair_optim.AGAIN] == "adamw"
    for side, space in sides.spaces.items():
        fields = find(sides.methods[side]).fields.keys() | {"learning_rate", "warm_up"}
        assert space.keys() <= fields
    sizes = {parameters_of(size) for size in sides.sizes}
    assert len(sizes) == 3
    assert max(sizes) < 50_000
    assert len(fair_known.RATIOS) == 4


@pytest.mark.expensive
def test_a_seed_has_its_own_tokens_whatever_the_settings() -> None:
    one, other = (
        trained(TINY, "adamw", SETTINGS, 1),
        trained(TINY, "sgd", {"learning_rate": 0.1}, 1),
    )
    assert one.data == other.data != trained(TINY, "adamw", SETTINGS, 2).data
    assert one == trained(TINY, "adamw", SETTINGS, 1)
    assert one.curve == ((1.0, one.loss),)
    for name, value in {"weight_decay": 0.9, "warm_up": 0.0, "betas": (0.5, 0.5)}.items():
        assert trained(TINY, "adamw", {**SETTINGS, name: value}, 1).loss != one.loss


def test_curves_of_judges_end_where_training_does() -> None:
    found = trained(TINY, "adamw", SETTINGS, 1, curved=True)
    assert found.loss == trained(TINY, "adamw", SETTINGS, 1).loss
    assert len(found.curve) == LOOKS
    assert found.curve[-1] == (1.0, found.loss)
    assert trained(replace(TINY, steps=1), "adamw", SETTINGS, 1, curved=True).curve[0][0] == 1.0


def test_what_diverges_has_no_loss() -> None:
    found = trained(TINY, "sgd", {"learning_rate": 1e30}, 1, curved=True)
    assert (found.loss, found.curve) == (None, ())


def test_a_training_is_done_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    regime = ProtocolRegime(parameters_of(TINY), 0.01)
    trial = ProtocolTrial("adamw", regime, SETTINGS, 1, "judge")
    first, second = run_of(null=False), run_of(null=False)
    for run, reused in ((first, 0), (second, 1)):
        bench = FairBench(run, {regime.parameters: TINY}, {"adamw": "adamw", "again": "adamw"})
        result = bench.trial(trial)
        assert bench.trial(replace(trial, side="again")) == result
        assert run.reused == reused
        assert bench.size(regime).steps == round(regime.tokens / 64)
        assert list(map(len, bench.orders.values())) == [1]
    assert FairOptim.info.slot == "protocol"
