"""Few shots of new classes: a network that knows the digits 0 to 4 is adapted to 5 to 9.

A multilayer perceptron 64-256-256-256-10 with GELU learns all images of scikit-learn's digits 0 to
4, by their part of the output layer. Its part for 5 to 9 stays as it was drawn, as a class's text
does in CLIP: biases and output layer are frozen, and a contender adapts the three hidden layers to
1 to 16 images of each new class, all of them in each step. A run gives, for each number of shots,
the accuracy on the images of the new classes that are never drawn from, the same 480 for all.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter
from modicum.core.contracts.hooks_in_order import RunHooks
from modicum.core.known_outcomes import described
from modicum.core.random import derive_seed
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits
from modicum.proofs.bench.sweep import Sweep, Swept
from modicum.proofs.bench.training import RateSchedule, train

SHOTS = (1, 2, 4, 8, 16)
KNOWN = 5  # classes that the network knows; the others are new
TESTED = 480
PRETRAINING_STEPS, PRETRAINING_RATE, PRETRAINING_BATCH = 400, 1e-3, 128
STEPS = 100
CONSTANT, ADAPTING = RateSchedule(last=1.0), RateSchedule(10)
WIDTHS = (64, 256, 256, 256)
HIDDEN = ("0", "2", "4")
RATES = (3e-3, 1e-2, 3e-2)


@dataclass(frozen=True)
class FewShot:
    """What a contender learned from so many images of each new class, one accuracy for each.

    Args:
        trained: parameters that were trained.
    """

    accuracies: tuple[float, ...]
    trained: int

    @property
    def accuracy(self) -> float:
        """The mean over the numbers of shots."""
        return fmean(self.accuracies)

    @property
    def error(self) -> float:
        """The share of test images that it gets wrong, the mean over the numbers of shots."""
        return 1 - self.accuracy


class FewShotBench:
    """The data, the network that knows five digits, and adaptations of it to five others.

    Args:
        run: the proof's run; scikit-learn, from which the images are, is noted there.
        shots: images of each new class, one adaptation for each number.
    """

    def __init__(self, run: ProofRun, shots: Sequence[int] = SHOTS) -> None:
        self.run, self.shots = run, tuple(shots)
        images, labels = digits(run)
        images, known = images.flatten(1) - 0.3, labels < KNOWN
        self.known = images[known], labels[known]
        images, labels = images[~known], labels[~known] - KNOWN
        order = torch.randperm(len(labels), generator=_generator("test images", 0))
        self.test = images[order[:TESTED]], labels[order[:TESTED]]
        self.drawn_from = images[order[TESTED:]], labels[order[TESTED:]]
        shared = {"bench": "digits, few shots", "shots": self.shots, "steps": STEPS}
        self.sweep = Sweep(run, self.adapt, lambda found: found.error, shared=shared, kind=FewShot)

    @cached_property
    def base(self) -> nn.Sequential:
        """The network that knows the first digits."""
        self.run.progress("pretraining")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            layers: list[nn.Module] = []
            for inputs, outputs in pairwise(WIDTHS):
                layers += [nn.Linear(inputs, outputs), nn.GELU()]
            model = nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 10))
        images, labels = self.known
        generator = _generator("pretraining", 0)

        def loss(step: int) -> Tensor:
            rows = torch.randint(len(labels), (PRETRAINING_BATCH,), generator=generator)
            return F.cross_entropy(model(images[rows])[:, :KNOWN], labels[rows])

        optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
        train([optimizer], loss, PRETRAINING_STEPS, schedule=CONSTANT)
        return model

    def drawn(self, shots: int, seed: int) -> tuple[Tensor, Tensor]:
        """So many images of each new class, another draw for each seed."""
        images, labels = self.drawn_from
        order = torch.randperm(len(labels), generator=_generator("shots", seed))
        rows = torch.cat([order[labels[order] == each][:shots] for each in range(10 - KNOWN)])
        return images[rows], labels[rows]

    def adapt(self, adapter: Adapter, learning_rate: float, seed: int = 0) -> FewShot:
        """Adapt a copy of the network for each number of shots; AdamW, up and down on lines."""
        found = [self._adapted(adapter, learning_rate, seed, shots) for shots in self.shots]
        return FewShot(tuple(accuracy for accuracy, _ in found), found[0][1])

    def best(
        self, adapter: Adapter, rates: Sequence[float] = RATES, *, baseline: bool = False
    ) -> Swept[FewShot]:
        """At the learning rate whose mean accuracy over shots and seeds is highest.

        Args:
            baseline: whether other proofs train it too.
        """
        return self.sweep.best(described(adapter), adapter, rates, baseline=baseline)

    def _adapted(
        self, adapter: Adapter, learning_rate: float, seed: int, shots: int
    ) -> tuple[float, int]:
        model, (images, labels) = copy.deepcopy(self.base), self.drawn(shots, seed)

        def loss_sum(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0])[:, KNOWN:], batch[1], reduction="sum")

        adapter = adapter.with_fields(targets=HIDDEN)
        attached = adapter.attach(model, seed=seed, batches=[(images, labels)], loss=loss_sum)
        hooks = RunHooks({"adapter": adapter.run_hook(attached)})
        optimizer = torch.optim.AdamW(attached.parameters(), lr=learning_rate)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "few-shot dropout"))
            train(
                [optimizer],
                lambda step: loss_sum(model, (images, labels)) / len(labels),
                STEPS,
                schedule=ADAPTING,
                hooks=hooks,
            )
        trained = sum(parameter.numel() for parameter in attached.parameters())
        model.eval()
        with torch.no_grad():
            right = model(self.test[0])[:, KNOWN:].argmax(1) == self.test[1]
        return right.float().mean().item(), trained


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, f"few-shot {name}"))
