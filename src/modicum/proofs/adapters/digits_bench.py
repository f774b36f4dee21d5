"""The lab on which adapters are compared where the testbed is too slow: digits, and turned ones.

A multilayer perceptron 64-256-256-256-10 with GELU learns 900 upright images of scikit-learn's
digits; then 400 others are shown turned by a quarter, and a contender adapts the three hidden
layers (biases and head stay frozen) in 200 steps. A run gives the loss on all 400 images after
every step, which has no noise of batches, and the accuracy on 497 images that nobody has seen.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.core.random import derive_seed
from modicum.proofs.base import ProofRun

UPRIGHT, TURNED = 900, 400
PRETRAINING_STEPS, PRETRAINING_RATE, PRETRAINING_BATCH = 600, 1e-3, 128
STEPS, BATCH, WARM_UP = 200, 64, 10
WIDTHS = (64, 256, 256, 256)
HIDDEN = ("0", "2", "4")
# Both sides' fastest lies inside: tried were 1e-3 to 5e-2 for LoRA and PiSSA of rank 4.
RATES = (5e-3, 1e-2, 2e-2, 3e-2, 5e-2)


@dataclass(frozen=True)
class Curve:
    """Adaptations at one learning rate: the loss on the training images after each step.

    Args:
        losses: means over the seeds.
        accuracy: on the test images at the end, the mean over the seeds.
        trained: parameters that were trained.
        seeds: the curve of each seed alone, where it is a mean.
    """

    learning_rate: float
    losses: tuple[float, ...]
    accuracy: float
    trained: int
    seeds: tuple[Curve, ...] = ()

    def losses_after(self, step: int) -> list[float]:
        """Each seed's loss after so many steps."""
        return [curve.losses[step - 1] for curve in self.seeds]

    @property
    def errors(self) -> list[float]:
        """The share of test images that each seed's adaptation gets wrong."""
        return [1 - curve.accuracy for curve in self.seeds]

    def steps_to(self, loss: float) -> int:
        """Steps until the loss was first at most so high; one more than all if it never was."""
        reached = (step for step, value in enumerate(self.losses, start=1) if value <= loss)
        return next(reached, len(self.losses) + 1)


class DigitsBench:
    """The data, the base model, and adaptations of it.

    Args:
        run: the proof's run; scikit-learn, from which the images are, is noted there.
    """

    def __init__(self, run: ProofRun) -> None:
        self.progress = run.progress
        run.library("sklearn", "proofs")
        datasets: Any = importlib.import_module("sklearn.datasets")
        digits = datasets.load_digits()
        order = torch.randperm(len(digits.target), generator=_generator("images", 0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order] / 16 - 0.3
        labels = torch.tensor(digits.target)[order]
        turned = torch.rot90(images, dims=(1, 2)).flatten(1)
        end = UPRIGHT + TURNED
        self.upright = images[:UPRIGHT].flatten(1), labels[:UPRIGHT]
        self.turned = turned[UPRIGHT:end], labels[UPRIGHT:end]
        self.test = turned[end:], labels[end:]

    @cached_property
    def base(self) -> nn.Sequential:
        """The model that knows upright digits."""
        self.progress("pretraining", 0, PRETRAINING_STEPS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for inputs, outputs in pairwise(WIDTHS):
                layers += [nn.Linear(inputs, outputs), nn.GELU()]
            model = nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 10))
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
        batches = _generator("pretraining", 0)
        for _ in range(PRETRAINING_STEPS):
            _step(model, optimizer, self.upright, PRETRAINING_BATCH, batches)
        return model

    def adapt(self, adapter: Adapter, learning_rate: float, seed: int = 0) -> Curve:
        """Adapt a copy of the base model; AdamW with warm-up and a linear fall to nothing."""
        model = copy.deepcopy(self.base)
        attached = adapter.with_fields(targets=HIDDEN).attach(model, seed=seed)
        optimizer = torch.optim.AdamW(attached.parameters(), lr=learning_rate)
        batches, losses = _generator("adapting", seed), []
        for step in range(STEPS):
            warm = min(1.0, (step + 1) / WARM_UP)
            optimizer.param_groups[0]["lr"] = learning_rate * warm * (1 - step / STEPS)
            _step(model, optimizer, self.turned, BATCH, batches)
            with torch.no_grad():
                losses.append(F.cross_entropy(model(self.turned[0]), self.turned[1]).item())
        trained = sum(parameter.numel() for parameter in attached.parameters())
        return Curve(learning_rate, tuple(losses), self.accuracy(model), trained)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of test images that a model gets right."""
        images, labels = self.test
        return (model(images).argmax(1) == labels).float().mean().item()

    def fastest(
        self, adapter: Adapter, step: int, seeds: Sequence[int], rates: Sequence[float] = RATES
    ) -> Curve:
        """The mean over the seeds at the learning rate whose loss after `step` steps is lowest."""
        found = []
        for number, rate in enumerate(rates):
            self.progress(f"{adapter.info.name}, learning rate {rate:g}", number, len(rates))
            found.append(_mean([self.adapt(adapter, rate, seed) for seed in seeds]))
        return min(found, key=lambda curve: curve.losses[step - 1])


def _mean(curves: Sequence[Curve]) -> Curve:
    losses = tuple(mean(values) for values in zip(*(c.losses for c in curves), strict=True))
    accuracy = mean(curve.accuracy for curve in curves)
    return replace(curves[0], losses=losses, accuracy=accuracy, seeds=tuple(curves))


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    batch: int,
    generator: torch.Generator,
) -> None:
    rows = torch.randint(len(data[0]), (batch,), generator=generator)
    F.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, f"lab {name}"))
