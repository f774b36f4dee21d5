"""Networks on scikit-learn's digits, trained by momentum with or without something before it.

Every rule is trained at each learning rate and seed, on one linear schedule down to zero; what is
compared is how many steps it takes to come down to a loss.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.optim.sgd import SGD
from modicum.optim.transform import GradientTransform, TransformContext
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits
from modicum.proofs.bench.sweep import Sweep
from modicum.proofs.bench.training import train

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


@dataclass(frozen=True)
class TrainingCurve:
    """The training loss before the first epoch and after each; infinite once it diverged."""

    seed: int
    losses: tuple[float, ...]


class CurveTask:
    """Training of one network on the digits, and what is known of it so far."""

    def __init__(
        self,
        name: str,
        widths: Sequence[int],
        epochs: int,
        run: ProofRun,
        rates: Sequence[float] = RATES,
    ) -> None:
        self.name, self.widths, self.epochs, self.run = name, widths, epochs, run
        self.rates = rates
        images, self.labels = digits(run)
        self.images = images.flatten(1)
        self.steps = epochs * -(-len(self.images) // BATCH)
        self._sweep = Sweep(
            run,
            self.curve,
            lambda curve: curve.losses[-1],
            shared={"bench": "digits, curves", "widths": tuple(widths), "epochs": epochs},
            kind=TrainingCurve,
        )
        self._seconds: dict[CurveRule, list[float]] = {}

    def ends(self, rule: CurveRule, *, baseline: bool = False) -> list[float]:
        """The last loss of each seed at the rate that is best over all seeds.

        Args:
            baseline: whether other proofs train it too; it has no time of a step then.
        """
        words = f"{self.name}: {rule.name}, last loss"
        swept = self._sweep.best(words, rule, self.rates, baseline=baseline)
        return [curve.losses[-1] for curve in swept.outcomes]

    def reaches(
        self, rule: CurveRule, losses: Sequence[float], *, baseline: bool = False
    ) -> list[float]:
        """Each seed's steps until its loss, at the rate that needs fewest on average."""
        goals = dict(zip(self.run.seeds, losses, strict=True))

        def needed(curve: TrainingCurve) -> float:
            return self.steps / self.epochs * crossing(curve.losses, goals[curve.seed])

        words = f"{self.name}: {rule.name}, steps"
        swept = self._sweep.best(words, rule, self.rates, score=needed, baseline=baseline)
        return [needed(curve) for curve in swept.outcomes]

    def rate(self, rule: CurveRule) -> float:
        """The learning rate at which the last loss is lowest, of those that were tried."""
        return self._sweep.best(
            f"{self.name}: {rule.name}, last loss", rule, self.rates
        ).learning_rate

    def seconds(self, rule: CurveRule) -> float:
        """The median time of a step."""
        return statistics.median(self._seconds[rule])

    def curve(self, rule: CurveRule, rate: float, seed: int) -> TrainingCurve:
        """A rule's training at a rate from a seed."""
        model = self._network(seed)
        optimizer = SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
        context = TransformContext(model, optimizer=optimizer)
        runtime = None if rule.transform is None else rule.transform.bind(context)
        generator = torch.Generator().manual_seed(seed)
        curve, rows, epoch = [self._evaluated(model)], list[Tensor](), self.steps // self.epochs
        losses: deque[Tensor] = deque(maxlen=1)

        def loss(step: int) -> Tensor:
            if not rows:
                rows.extend(torch.randperm(len(self.images), generator=generator).split(BATCH))
            losses.append(self._loss(model, rows.pop(0)))
            return losses[-1]

        def before(step: int) -> None:
            if runtime is not None:
                runtime.update_loss(losses.pop().item())
                runtime.after_backward()
            elif rule.clipped:
                clip(optimizer)

        def after(step: int) -> bool:
            if (step + 1) % epoch:
                return False
            curve.append(self._evaluated(model))
            return not curve[-1] < 100 * curve[0]

        seconds = train([optimizer], loss, self.steps, before_update=before, after_update=after)
        self._seconds.setdefault(rule, []).extend(seconds)
        if not curve[-1] < 100 * curve[0]:
            curve[-1:] = [float("inf")] * (self.epochs + 2 - len(curve))
        return TrainingCurve(seed, tuple(curve))

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
