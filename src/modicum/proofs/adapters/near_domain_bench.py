"""A task near the one that a network knows, with a new head: where rescaling directions may do.

The network of `digits_bench.py` knows upright digits. Here 400 others come darker, with noise and
under new names, so its head is begun anew and trained; a contender adapts the three hidden layers
next to it, or nothing does. A run gives the accuracy on 497 such images that nobody has seen.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.known_outcomes import described
from modicum.core.random import derive_seed
from modicum.proofs.adapters.digits_bench import HIDDEN, DigitsBench
from modicum.proofs.adapters.permutation_bench import FullTuning
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.bench.training import RateSchedule, train

SIZE, NOISE = 0.8, 0.25
STEPS, BATCH, WARM_UP = 200, 64, RateSchedule(10)
# As good for the head alone as any of 1e-3 to 3e-2; every contender trains its head at it.
HEAD_RATE = 3e-3


@dataclass(frozen=True)
class HeadAlone:
    """Nothing but the head is trained."""


NearContender = Adapter | HeadAlone | FullTuning


@dataclass(frozen=True)
class Near:
    """What an adaptation ended with.

    Args:
        loss: the mean over the last tenth of the steps, of the batches that they were trained on.
        accuracy: on images that nobody has seen.
        trained: parameters that were trained next to the head.
    """

    loss: float
    accuracy: float
    trained: int

    @property
    def error(self) -> float:
        """The share of test images that it gets wrong."""
        return 1 - self.accuracy


class NearDomainBench:
    """The data, and adaptations to it.

    Args:
        run: the proof's run.
        images: of how many the adaptation learns, at most 400.
    """

    def __init__(self, run: ProofRun, images: int = 400) -> None:
        self.digits = DigitsBench(run)
        self.images = images
        names = torch.randperm(10, generator=_generator("names", 0))
        self.data, self.test = (
            (_upright(turned) * SIZE + NOISE * _noise(part, turned), names[labels])
            for part, (turned, labels) in (
                ("training", self.digits.turned),
                ("test", self.digits.test),
            )
        )
        self.sweep: Sweep[NearContender, Near] = Sweep(
            run,
            self.adapt,
            lambda near: near.error,
            shared={"bench": "digits, near domain", "steps": STEPS, "images": images},
            kind=Near,
        )

    def adapt(self, contender: NearContender, learning_rate: float, seed: int = 0) -> Near:
        """Adapt a copy of the network with a new head; AdamW with warm-up and a linear fall."""
        model, hooks = copy.deepcopy(self.digits.base), RunHooks()
        parameters = self._adapted(model, contender, seed, hooks)
        head = nn.Linear(256, 10)
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
        model[-1] = head
        groups = [
            {"params": parameters, "lr": learning_rate},
            {"params": list(head.parameters()), "lr": HEAD_RATE},
        ]
        optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
        generator, losses = _generator("adapting", seed), list[float]()
        images, labels = (part[: self.images] for part in self.data)

        def loss(step: int) -> Tensor:
            rows = torch.randint(len(images), (BATCH,), generator=generator)
            found = F.cross_entropy(model(images[rows]), labels[rows])
            losses.append(found.item())
            return found

        train([optimizer], loss, STEPS, schedule=WARM_UP, hooks=hooks)
        last = losses[-STEPS // 10 :]
        with torch.no_grad():
            right = (model(self.test[0]).argmax(1) == self.test[1]).float().mean().item()
        trained = sum(parameter.numel() for parameter in parameters)
        return Near(sum(last) / len(last), right, trained)

    def best(
        self, contender: NearContender, rates: Sequence[float], *, baseline: bool = False
    ) -> Swept[Near]:
        """At the learning rate whose test error is lowest on average over the seeds.

        Args:
            baseline: whether other proofs train it too.
        """
        return self.sweep.best(described(contender), contender, rates, baseline=baseline)

    def head_alone(self) -> list[float]:
        """The test errors of the head alone, of each seed."""
        seeds = self.digits.run.seeds
        return [self.sweep.outcome("the head alone", HeadAlone(), 0.0, s).error for s in seeds]

    def _adapted(
        self, model: nn.Sequential, contender: NearContender, seed: int, hooks: RunHooks
    ) -> list[nn.Parameter]:
        """What a contender trains next to the head."""
        if isinstance(contender, FullTuning):
            return [model.get_submodule(name).get_parameter("weight") for name in HIDDEN]
        model.requires_grad_(False)
        if isinstance(contender, HeadAlone):
            return []
        batches = list(zip(*(part[: self.images].split(BATCH) for part in self.data), strict=True))
        attached = contender.with_fields(targets=HIDDEN).attach(
            model, seed=seed, batches=batches, loss=_loss_sum
        )
        hooks.add("adapter", contender.run_hook(attached))
        return list(attached.parameters())


def _loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def _upright(turned: Tensor) -> Tensor:
    """Images that `digits_bench` has turned by a quarter, turned back."""
    return torch.rot90(turned.view(-1, 8, 8), -1, dims=(1, 2)).flatten(1)


def _noise(part: str, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=_generator(f"noise of {part} images", 0))


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, f"near domain {name}"))
