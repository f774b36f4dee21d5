from __future__ import annotations

import pytest
import torch

from modicum.compress import FWSVD
from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.compress import fwsvd
from modicum.proofs.compress.recovery_bench import Code, Digits, OutputSVD, PlainSVD, RecoveryBench
from modicum.proofs.optim.text_bench import TextSize
from modicum.proofs.proof import Proof

TINY = TextSize(width=16, layers=1, mlp_width=32, tokens=16, rows=4, steps=20)


@pytest.fixture
def run() -> ProofRun:
    pytest.importorskip("sklearn")
    return ProofRun(find("fwsvd"), null=False, full=False)


def shrunk(monkeypatch: pytest.MonkeyPatch, *, null: bool, full: bool = False) -> Proof:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(fwsvd, "QUICK", TINY)
    monkeypatch.setattr(fwsvd, "FULL", TINY)
    monkeypatch.setattr(fwsvd, "Code", lambda size, steps, rows, *which: Code(size, 3, 8, *which))
    run = ProofRun(find("fwsvd"), null=null, full=full)
    digits = Digits(run, 3, seed=0)
    monkeypatch.setattr(fwsvd, "Digits", lambda run, steps, seed: digits)
    fwsvd.prove(run)
    return run.conclude()


def test_parts_of_the_digits_are_apart_and_differ_by_seed(run: ProofRun) -> None:
    one, other = Digits(run, 3, seed=0), Digits(run, 3, seed=1)
    sizes = {part: sum(len(y) for _, y in one.held_out(part)) for part in ("validation", "test")}
    assert sizes == {"validation": 400, "test": 397}
    assert one.images.shape == (1797, 64)
    assert not torch.equal(one.labels, other.labels)
    assert sorted(one.labels.tolist()) == sorted(other.labels.tolist())
    x, _ = one.train_batch("a")
    assert all((row == one.images[:1000]).all(dim=1).any() for row in x)
    assert torch.equal(x, one.train_batch("a")[0])
    assert not torch.equal(x, one.train_batch("b")[0])


def test_parts_of_the_code_are_apart() -> None:
    code = Code(TINY, steps=3, rows=8)
    train, held = code.text.halves
    assert len(train) > 8 * len(held)
    parts = {part: next(code.held_out(part))[0] for part in ("validation", "test")}
    assert parts["test"].shape == (8, 16)
    assert not torch.equal(parts["test"], parts["validation"])
    x, y = code.train_batch("a")
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_seeds_of_the_code_share_a_decoder_and_shuffle_its_recovery() -> None:
    first = Code(TINY, 3, 8)
    second = Code(TINY, 3, 8, first, seed=1)
    assert second.model is first.model
    assert second.calibration is first.calibration
    assert not torch.equal(second.train_batch("a")[0], first.train_batch("a")[0])


def test_a_bench_recovers_all_alike_and_leaves_the_model(run: ProofRun) -> None:
    tasks = [Digits(run, 3, seed) for seed in (0, 1)]
    bench = RecoveryBench(run, tasks)
    weights = [p.detach().clone() for p in tasks[0].model.parameters()]
    dense = bench.recovered(None)
    assert bench.rise(dense) == 0
    svd = bench.recovered(PlainSVD(share=0.4))
    assert bench.recovered(PlainSVD(share=0.4)) == svd
    assert bench.rise(svd) > 0
    assert all(arm.test < arm.before for arm in svd)
    values = [PlainSVD(share=0.4), FWSVD(share=0.4), OutputSVD(share=0.4)]
    best = bench.best(values)
    arms = [bench.recovered(value) for value in values]
    assert [arm.validation for arm in best] == [min(a.validation, b.validation, c.validation)
        for a, b, c in zip(*arms, strict=True)]  # fmt: skip
    for before, now in zip(weights, tasks[0].model.parameters(), strict=True):
        assert torch.equal(before, now)


def test_weighted_errors_are_smallest_where_they_are_minimised(run: ProofRun) -> None:
    task = Digits(run, 3, seed=0)
    errors = {
        name: fwsvd.weighted_error(task, value)
        for name, value in {
            "paper": FWSVD(share=0.4, damping=0.0),
            "damped": FWSVD(share=0.4, damping=1.0),
            "plain": PlainSVD(share=0.4),
        }.items()
    }
    assert errors["paper"] < errors["damped"] < errors["plain"]
    expected = FWSVD(share=0.4, damping=0.0).fit(Digits(run, 3, 0).model, task.calibration)
    assert expected.report is not None
    assert errors["paper"] == pytest.approx(expected.report.error, rel=1e-5)


@pytest.mark.expensive
def test_a_null_is_noticed_on_both_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = shrunk(monkeypatch, null=True)
    assert proof.verdict == "does not hold"
    assert proof.undetected == ()
    *judged, against = proof.criteria
    assert [criterion.figure for criterion in judged] == [1.0] * 4
    assert against.rival == "LoRD"


@pytest.mark.expensive
def test_the_full_experiment_has_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = shrunk(monkeypatch, null=False, full=True)
    assert proof.seeds == (0, 1, 2)
    assert len(proof.criteria) == 9
    names = " ".join(figure.name for figure in proof.figures)
    for word in ("kappa 0,", "kappa 0.3,", "kappa 1,", "LoRD", "code at 0.5", "digits at 0.4"):
        assert word in names
    weighted = [c for c in proof.criteria if c.sentence.startswith("Fisher")]
    assert all(criterion.passed for criterion in weighted)
    assert "sklearn" in proof.versions
