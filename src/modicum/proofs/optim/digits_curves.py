"""Networks on scikit-learn's digits, trained by momentum with or without something before it.

Every rule is trained at each learning rate and seed, on one linear schedule down to zero; what is
compared is how many steps it takes to come down to a loss.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.optim.sgd import SGD
from modicum.optim.transform import GradientTransform, TransformContext
from modicum.proofs.base import ProofRun

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
MOMENTUM, BATCH, DAMPING, KL_CLIP = 0.9, 128, 0.03, 1e-3
AUTOENCODER = (64, 250, 125, 62, 8, 62, 125, 250, 64)
DEEP = (64,) * 20 + (10,)


@dataclass(frozen=True)
class CurveRule:
    """What stands before momentum's update, if anything.

    Args:
        transform: a gradient transform.
        clipped: scale the gradient by nu / gamma, as Eva does where every mean is zero.
    """

    name: str
    transform: GradientTransform | None = None
    clipped: bool = False


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,797 digits [64] in [0, 1], and which they are."""
    loaded = importlib.import_module("sklearn.datasets").load_digits()
    return torch.tensor(loaded.data / 16, dtype=torch.float32), torch.tensor(loaded.target)


class CurveTask:
    """Training of one network on the digits, and what is known of it so far."""

    def __init__(self, name: str, widths: Sequence[int], epochs: int, run: ProofRun) -> None:
        self.name, self.widths, self.epochs, self.run = name, widths, epochs, run
        self.images, self.labels = digits()
        self.steps = epochs * -(-len(self.images) // BATCH)
        self._curves: dict[tuple[str, float, int], list[float]] = {}
        self._seconds: dict[str, list[float]] = {}

    def ends(self, rule: CurveRule) -> list[float]:
        """The last loss of each seed at the rate that is best over all seeds."""
        last = [[curve[-1] for curve in curves] for curves in self.grid(rule)]
        return min(last, key=sum)

    def reaches(self, rule: CurveRule, losses: Sequence[float]) -> list[float]:
        """Each seed's steps until its loss, at the rate that needs fewest on average."""
        each = self.steps / self.epochs
        needed = [
            [each * crossing(curve, loss) for curve, loss in zip(curves, losses, strict=True)]
            for curves in self.grid(rule)
        ]
        return min(needed, key=sum)

    def seconds(self, rule: CurveRule) -> float:
        """The median time of a step."""
        return statistics.median(self._seconds[rule.name])

    def grid(self, rule: CurveRule) -> list[list[list[float]]]:
        """The curve of each rate and seed."""
        total = len(RATES) * len(self.run.seeds)
        found = []
        for place, rate in enumerate(RATES):
            self.run.progress(f"{self.name}: {rule.name}", place * len(self.run.seeds), total)
            found.append([self.curve(rule, rate, seed) for seed in self.run.seeds])
        return found

    def curve(self, rule: CurveRule, rate: float, seed: int) -> list[float]:
        """The training loss before the first epoch and after each; infinite once it diverged."""
        key = (rule.name, rate, seed)
        if key not in self._curves:
            self._curves[key] = self._trained(rule, rate, seed)
        return self._curves[key]

    def _trained(self, rule: CurveRule, rate: float, seed: int) -> list[float]:
        model = self._network(seed)
        optimizer = SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        context = TransformContext(model, optimizer=optimizer)
        runtime = None if rule.transform is None else rule.transform.bind(context)
        generator = torch.Generator().manual_seed(seed)
        curve, step = [self._evaluated(model)], 0
        for _ in range(self.epochs):
            for rows in torch.randperm(len(self.images), generator=generator).split(BATCH):
                started = time.perf_counter()
                optimizer.param_groups[0]["lr"] = rate * (1 - step / self.steps)
                self._loss(model, rows).backward()
                if runtime is not None:
                    runtime.apply()
                elif rule.clipped:
                    clip(optimizer)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                self._seconds.setdefault(rule.name, []).append(time.perf_counter() - started)
            curve.append(self._evaluated(model))
            if not curve[-1] < 100 * curve[0]:
                return [*curve[:-1], *([float("inf")] * (self.epochs + 2 - len(curve)))]
        return curve

    def _network(self, seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, o in pairwise(self.widths):
            linear = nn.Linear(i, o)
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)
            # The autoencoder's code is linear, as in the paper's.
            layers += [linear] if o == min(self.widths) else [linear, nn.Tanh()]
        return (
            nn.Sequential(*layers[:-1])
            if isinstance(layers[-1], nn.Tanh)
            else nn.Sequential(*layers)
        )

    def _loss(self, model: nn.Module, rows: Tensor) -> Tensor:
        outputs = model(self.images[rows])
        if self.widths[-1] == 10:
            return F.cross_entropy(outputs, self.labels[rows])
        return (outputs - self.images[rows]).square().sum() / len(rows)

    @torch.no_grad()
    def _evaluated(self, model: nn.Module) -> float:
        return self._loss(model, torch.arange(len(self.images))).item()


def clip(optimizer: torch.optim.Optimizer) -> None:
    """Eva's scale and clip on gradients as they are."""
    (group,) = optimizer.param_groups
    gradients = [p.grad for p in group["params"]]
    along = sum(float(g.square().sum()) for g in gradients) / DAMPING * group["lr"] ** 2
    nu = min(1.0, (KL_CLIP / max(along, 1e-30)) ** 0.5)
    for gradient in gradients:
        gradient.mul_(nu / DAMPING)


def crossing(curve: Sequence[float], loss: float) -> float:
    """After how many epochs the curve first comes down to `loss`, between them on a line."""
    for epoch, (before, after) in enumerate(pairwise(curve)):
        if after <= loss:
            return epoch + max(0.0, (before - loss) / max(before - after, 1e-30))
    return float("inf")
