"""Few shots of new classes: what the network knows, what is drawn, and that a run is repeatable."""

from __future__ import annotations

import pytest
import torch

from modicum.adapters import LoRA
from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import few_shot_bench
from modicum.proofs.adapters.few_shot_bench import KNOWN, FewShotBench
from modicum.proofs.base import ProofRun


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> FewShotBench:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(few_shot_bench, "PRETRAINING_STEPS", 60)
    monkeypatch.setattr(few_shot_bench, "STEPS", 30)
    return FewShotBench(ProofRun(find("lora"), null=False, full=False), (1, 16))


def test_draws_are_of_each_new_class_and_never_tested_on(bench: FewShotBench) -> None:
    few, many = bench.drawn(1, seed=3), bench.drawn(16, seed=3)
    assert torch.equal(many[1].bincount(), torch.full((10 - KNOWN,), 16))
    assert torch.equal(few[0], many[0][::16])  # what comes later is added
    assert not torch.equal(few[0], bench.drawn(1, seed=4)[0])
    tested = {tuple(image) for image in bench.test[0].tolist()}
    assert not tested & {tuple(image) for image in bench.drawn_from[0].tolist()}
    assert len(bench.known[1]) + len(bench.test[1]) + len(bench.drawn_from[1]) == 1797


@pytest.mark.expensive
def test_more_shots_teach_more_and_frozen_parts_stay(bench: FewShotBench) -> None:
    images, labels = bench.known
    known = bench.base(images)[:, :KNOWN].argmax(1) == labels
    assert known.float().mean() > 0.9
    before = {name: value.clone() for name, value in bench.base.named_parameters()}
    found = bench.adapt(LoRA(rank=4), 3e-2, seed=1)
    assert found == bench.adapt(LoRA(rank=4), 3e-2, seed=1)
    assert found.trained == 4 * (64 + 5 * 256)
    assert found.accuracies[1] > found.accuracies[0]
    assert found.accuracies[1] > 0.6
    assert found.error == pytest.approx(1 - sum(found.accuracies) / 2)
    assert all(torch.equal(value, before[name]) for name, value in bench.base.named_parameters())
