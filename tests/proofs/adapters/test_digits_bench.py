from __future__ import annotations

import pytest
import torch

from modicum.adapters import LoRA
from modicum.core.contracts.catalog import find
from modicum.proofs.adapters import digits_bench as lab_module
from modicum.proofs.adapters.digits_bench import (
    DigitsBench,
    losses_after,
    mean_losses,
    steps_to,
)
from modicum.proofs.base import ProofRun

pytest.importorskip("sklearn")


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> DigitsBench:
    monkeypatch.setattr(lab_module, "PRETRAINING_STEPS", 150)
    monkeypatch.setattr(lab_module, "STEPS", 12)
    return DigitsBench(ProofRun(find("lora"), null=False, full=False))


def test_images_are_split_once_and_turned_by_a_quarter(lab: DigitsBench) -> None:
    parts = [lab.upright, lab.turned, lab.test]
    assert [len(labels) for _, labels in parts] == [900, 400, 497]
    assert all(images.shape == (len(labels), 64) for images, labels in parts)
    everything = torch.cat([images for images, _ in parts])
    assert everything.min() == pytest.approx(-0.3)
    assert everything.max() == pytest.approx(0.7)
    # A digit stands upright: its columns at the sides are empty. Turned, its rows are.
    upright, turned = (images.view(-1, 8, 8).mean(0) for images, _ in parts[:2])
    assert upright[:, 0].mean() < upright[0].mean() - 0.1
    assert turned[0].mean() < turned[:, 0].mean() - 0.1


def test_the_base_knows_upright_digits_and_not_turned_ones(lab: DigitsBench) -> None:
    images, labels = lab.upright
    assert (lab.base(images).argmax(1) == labels).float().mean() > 0.95
    assert lab.accuracy(lab.base) < 0.3


def test_adapting_trains_three_layers_and_is_repeatable(lab: DigitsBench) -> None:
    before = [parameter.detach().clone() for parameter in lab.base.parameters()]
    curve = lab.adapt(LoRA(rank=4), 2e-2)
    assert curve.trained == 4 * (64 + 256 + 4 * 256)
    assert len(curve.losses) == 12
    assert curve.losses[-1] < 0.7 * curve.losses[0]
    assert lab.adapt(LoRA(rank=4), 2e-2) == curve
    assert lab.adapt(LoRA(rank=4), 2e-2, seed=1) != curve
    for parameter, value in zip(lab.base.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.requires_grad


def test_the_fastest_rate_has_the_lowest_loss_at_that_step(lab: DigitsBench) -> None:
    lab.run.seeds = (0, 1)
    fastest = lab.fastest(LoRA(rank=4), 12, rates=(1e-5, 2e-2, 10.0))
    assert fastest.learning_rate == 2e-2
    each = [lab.adapt(LoRA(rank=4), 2e-2, seed) for seed in (0, 1)]
    assert list(fastest.outcomes) == each
    assert mean_losses(fastest)[5] == pytest.approx((each[0].losses[5] + each[1].losses[5]) / 2)
    assert losses_after(fastest, 6) == [curve.losses[5] for curve in each]
    assert fastest.each("error") == [1 - curve.accuracy for curve in each]


def test_steps_to_a_loss_are_counted_from_one() -> None:
    losses = (3.0, 2.0, 2.5, 1.0)
    assert [steps_to(losses, loss) for loss in (5.0, 2.0, 1.5, 0.1)] == [1, 2, 4, 5]
