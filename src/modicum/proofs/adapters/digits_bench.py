"""The lab on which adapters are compared where the testbed is too slow: digits, and turned ones.

A multilayer perceptron 64-256-256-256-10 with GELU learns 900 upright images of scikit-learn's
digits; then 400 others are shown turned by a quarter, and a contender adapts the three hidden
layers (biases and head stay frozen) in 200 steps. A run gives the loss on all 400 images after
every step, which has no noise of batches, and the accuracy on 497 images that nobody has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.known_outcomes import described
from modicum.core.random import derive_seed
from modicum.data.images import ImageBatch
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.bench.training import RateSchedule, train
from modicum.tasks.modes import evaluating

UPRIGHT, TURNED = 900, 400
PRETRAINING_STEPS, PRETRAINING_RATE, PRETRAINING_BATCH = 600, 1e-3, 128
STEPS, BATCH, DECAY = 200, 64, 1e-2
CONSTANT, ADAPTING = RateSchedule(last=1.0), RateSchedule(10)
WIDTHS = (64, 256, 256, 256)
HIDDEN = ("0", "2", "4")
# Both sides' fastest lies inside: tried were 1e-3 to 5e-2 for LoRA and PiSSA of rank 4.
RATES = (5e-3, 1e-2, 2e-2, 3e-2, 5e-2)


@dataclass(frozen=True)
class Curve:
    """An adaptation: the loss on the training images after each step.

    Args:
        accuracy: on the test images at the end.
        trained: parameters that were trained.
    """

    losses: tuple[float, ...]
    accuracy: float
    trained: int

    @property
    def loss(self) -> float:
        """The loss after the last step."""
        return self.losses[-1]

    @property
    def error(self) -> float:
        """The share of test images that it gets wrong."""
        return 1 - self.accuracy


def mean_losses(swept: Swept[Curve]) -> list[float]:
    """The loss after each step, the mean over the seeds."""
    return [mean(values) for values in zip(*(c.losses for c in swept.outcomes), strict=True)]


def losses_after(swept: Swept[Curve], step: int) -> list[float]:
    """Each seed's loss after so many steps."""
    return [curve.losses[step - 1] for curve in swept.outcomes]


def steps_to(losses: Sequence[float], loss: float) -> int:
    """Steps until the loss was first at most so high; one more than all if it never was.

    >>> [steps_to((3.0, 2.0, 2.5, 1.0), loss) for loss in (5.0, 2.0, 1.5, 0.1)]
    [1, 2, 4, 5]
    """
    reached = (step for step, value in enumerate(losses, start=1) if value <= loss)
    return next(reached, len(losses) + 1)


class DigitsBench:
    """The data, the base model, and adaptations of it.

    Args:
        run: the proof's run; scikit-learn, from which the images are, is noted there.
        multiplied: whether factors have their own multiples of the rate and of the decay, as a
            recipe gives them.

    Attributes:
        name: of the bench, by which baselines that several proofs train are known.
        targets: where a contender is in the model.
    """

    name = "digits, turned"
    targets: tuple[str, ...] = HIDDEN

    def __init__(self, run: ProofRun, *, multiplied: bool = False) -> None:
        self.run, self.multiplied = run, multiplied
        images, labels = digits(run)
        order = torch.randperm(len(labels), generator=_generator("images", 0))
        images, labels = images[order] - 0.3, labels[order]
        turned = torch.rot90(images, dims=(1, 2)).flatten(1)
        end = UPRIGHT + TURNED
        self.upright = images[:UPRIGHT].flatten(1), labels[:UPRIGHT]
        self.turned = turned[UPRIGHT:end], labels[UPRIGHT:end]
        self.test = turned[end:], labels[end:]

    @cached_property
    def base(self) -> nn.Sequential:
        """The model that knows upright digits."""
        self.run.progress("pretraining")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.drawn()
        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
        loss = self._loss(model, self.upright, PRETRAINING_BATCH, _generator("pretraining", 0))
        train([optimizer], loss, PRETRAINING_STEPS, schedule=CONSTANT)
        return model

    def drawn(self) -> nn.Sequential:
        """The model before it has learned anything."""
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(WIDTHS):
            layers += [nn.Linear(inputs, outputs), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 10))

    @property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """The images to adapt to, for adapters that look at data first."""
        return list(zip(*(part.split(BATCH) for part in self.turned), strict=True))

    def adapt(self, adapter: Adapter, learning_rate: float, seed: int = 0) -> Curve:
        """Adapt a copy of the base model; AdamW with warm-up and a linear fall to nothing.

        One that pairs passes has each batch twice.
        """
        model = copy.deepcopy(self.base)
        adapter = adapter.with_fields(targets=self.targets)
        attached = adapter.attach(model, seed=seed, batches=self.batches, loss=_loss_sum)
        hooks = RunHooks({"adapter": adapter.run_hook(attached)})
        return self.fit(model, list(attached.parameters()), learning_rate, seed, hooks)

    def fit(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        learning_rate: float,
        seed: int = 0,
        hooks: RunHooks | None = None,
    ) -> Curve:
        """Train parameters of a model, whoever's they are, as `adapt` does."""
        groups: Any = parameters
        if self.multiplied:
            groups = optimizer_groups(model, learning_rate=learning_rate, weight_decay=DECAY)
        optimizer = torch.optim.AdamW(groups, lr=learning_rate, weight_decay=DECAY)
        losses: list[float] = []

        @torch.no_grad()
        def note(step: int) -> None:
            with evaluating(model):
                losses.append(F.cross_entropy(model(self.turned[0]), self.turned[1]).item())

        loss = self._loss(model, self.turned, BATCH, _generator("adapting", seed), hooks)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "lab dropout"))
            train([optimizer], loss, STEPS, schedule=ADAPTING, after_update=note, hooks=hooks)
        trained = sum(parameter.numel() for parameter in parameters)
        return Curve(tuple(losses), self.accuracy(model), trained)

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of test images that a model gets right."""
        images, labels = self.test
        with evaluating(model):
            return (model(images).argmax(1) == labels).float().mean().item()

    def fastest(
        self, adapter: Adapter, step: int, rates: Sequence[float] = RATES, *, baseline: bool = False
    ) -> Swept[Curve]:
        """At the learning rate whose loss after `step` steps is lowest on average over the seeds.

        Args:
            baseline: whether other proofs train it too.
        """
        return self._best(adapter, lambda curve: curve.losses[step - 1], rates, baseline)

    def most_accurate(
        self, adapter: Adapter, rates: Sequence[float] = RATES, *, baseline: bool = False
    ) -> Swept[Curve]:
        """At the learning rate with the fewest test errors on average over the seeds."""
        return self._best(adapter, lambda curve: curve.error, rates, baseline)

    def _best(
        self,
        adapter: Adapter,
        score: Callable[[Curve], float],
        rates: Sequence[float],
        baseline: bool,
    ) -> Swept[Curve]:
        name = described(adapter)
        return self.sweep.best(name, adapter, rates, score=score, baseline=baseline)

    @cached_property
    def sweep(self) -> Sweep[Adapter, Curve]:
        """Of adapters: each is trained once at a rate from a seed, by whatever it is judged."""
        shared = {"bench": self.name, "steps": STEPS, "multiplied": self.multiplied}
        return Sweep(self.run, self.adapt, lambda curve: curve.error, shared=shared, kind=Curve)

    @staticmethod
    def _loss(
        model: nn.Module,
        data: tuple[Tensor, Tensor],
        batch: int,
        generator: torch.Generator,
        hooks: RunHooks | None = None,
    ) -> Callable[[int], Tensor]:
        def loss(step: int) -> Tensor:
            rows = torch.randint(len(data[0]), (batch,), generator=generator)
            part = ImageBatch(data[0][rows], data[1][rows])
            if hooks is None or not hooks.pair_passes:
                return F.cross_entropy(model(part.images), part.labels)
            first, second = model(part.twice().images).chunk(2)
            between = hooks.pair_loss(first, second, part) / batch
            return F.cross_entropy(first, part.labels) + between

        return loss


def _loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, f"lab {name}"))
