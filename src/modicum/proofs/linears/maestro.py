"""The proof of Maestro: prefixes are truncated SVDs, and one training gives a small model.

A planted linear map [9, 6] with a known spectrum, on isotropic inputs, is learned from another
random map, by the gradient of the full population: of every width the product must be the truncated
SVD of the map. An autoencoder of Gaussian inputs with another spectrum must span the first
principal components. Then an MLP on scikit-learn's digits at a quarter of the dense work: one
Maestro model, the dense model truncated by its SVD after training, and factors of that size that
are trained from the first step. Last, four penalties and the sizes that they lead to.

Reduced: the paper trains LeNet, ResNet and a transformer on MNIST, CIFAR-10, ImageNet and Multi30k.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.random import normal_, sample
from modicum.linears.base import LinearMethod
from modicum.linears.low_rank import LowRank
from modicum.linears.maestro import Maestro
from modicum.linears.ordered import OrderedLinear
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.digits import digits
from modicum.proofs.bench.sweep import Sweep
from modicum.proofs.distances import worst

RATES = (0.03, 0.1)
_Arm = tuple[str, LinearMethod | None, Maestro | None]  # a name, a form, what truncates it
LADDER = (1e-4, 1e-3, 3e-3, 1e-2)
SHARE, EPSILON, PENALTY = 0.25, 0.05, 3e-3


def prove(run: ProofRun) -> None:
    """Look for truncated SVDs and principal components, then train on digits."""
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    form = run.contender(
        Maestro(penalty=PENALTY, threshold=0.0),
        null=Maestro(ordered=False, penalty=0.0, threshold=0.0),
        null_is="factors whose prefixes are not trained",
        planted=Maestro(penalty=PENALTY, threshold=0.0),
    )
    _planted(run, form)
    _digits(run, form)
    _ladder(run, form)


def _planted(run: ProofRun, form: Maestro) -> None:
    """The theory of section 3."""
    form = form.model_copy(update={"penalty": 0.0})
    off, angles = [], []
    for seed in run.seeds:
        run.progress(f"planted maps, seed {seed}")
        weight = rotation(9, seed)[:, :6] * torch.linspace(3, 0.5, 6) @ rotation(6, seed + 9).T
        layer = learned(form, torch.eye(6), weight, seed, 4000 if run.full else 1200)
        off.append(worst(_off(layer, weight)))
        basis = rotation(8, seed)
        inputs = torch.linspace(2, 0.5, 8)[:, None] * basis.T  # rows; their second moment is known
        layer = learned(form, inputs, torch.eye(8), seed, 8000 if run.full else 1500)
        angles.append(worst(_angle(layer.up[:b].T, basis[:, :b]) for b in range(1, 8)))
    run.at_most("of all widths, distance to the truncated SVD", worst(off), 0.02, seeds=off)
    run.at_most("angle to the principal components (degrees)", worst(angles), 5.0, seeds=angles)


def rotation(size: int, seed: int) -> Tensor:
    """An orthogonal matrix."""
    return torch.linalg.qr(normal_(torch.empty(size, size), seed=seed, name="rotation"))[0]


def learned(
    form: Maestro, inputs: Tensor, weight: Tensor, seed: int, updates: int
) -> OrderedLinear:
    """The layer that learns y = W x, W [out, in], of inputs [rows, in], all in each update."""
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    normal_(model[0].get_parameter("weight"), seed=seed, name="begins", std=0.3)
    form.convert(model)
    targets = inputs @ weight.T

    def loss(step: int) -> Tensor:
        return (model(inputs) - targets).square().sum() / 2

    train(model, form, loss, 0.05, updates, seed)
    assert isinstance(model[0], OrderedLinear)
    return model[0]


def train(
    model: nn.Module,
    form: LinearMethod,
    loss: Callable[[int], Tensor],
    rate: float,
    updates: int,
    seed: int,
) -> None:
    """SGD with momentum, at a rate that falls to nothing."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    fall = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / updates)
    steps = form.steps(model, seed=seed) if isinstance(form, Maestro) else None
    for step in range(updates):
        loss(step).backward()
        if steps is not None:
            steps.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        fall.step()
        if steps is not None:
            steps.update()
    if steps is not None:
        steps.prune()
        steps.close()


@torch.no_grad()
def _off(layer: OrderedLinear, weight: Tensor) -> list[float]:
    """For each width the distance of the product to the truncated SVD, over the size of that."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    found = []
    for b in range(1, layer.rank + 1):
        best = left[:, :b] * values[:b] @ right[:b]
        mine = layer.up[:b].T @ layer.down[:b]
        found.append(((mine - best).norm() / best.norm()).item())
    return found


@torch.no_grad()
def _angle(columns: Tensor, others: Tensor) -> float:
    """The largest angle between the spaces that the columns of two matrices span, in degrees."""
    one = torch.linalg.qr(columns)[0]
    least = torch.linalg.svdvals((one.T @ others).double()).min().item()
    return math.degrees(math.acos(min(least, 1.0)))


@dataclass(frozen=True)
class Recognized:
    """Errors on held-out digits, in per cent, and those after a rival was truncated."""

    errors: float
    truncated: float


@dataclass(frozen=True)
class Handwriting:
    """An MLP on the digits, trained on two thirds of them.

    Args:
        images, labels: of all: [n, 64], [n].
        seed: of weights, batches and which digits are held out.
    """

    images: Tensor
    labels: Tensor
    seed: int
    updates: int = 1600
    widths: tuple[int, ...] = (64, 96, 96, 10)
    rate: float = 0.03

    def model(self) -> nn.Sequential:
        """The dense MLP as it begins."""
        layers: list[nn.Module] = []
        for ins, outs in zip(self.widths, self.widths[1:], strict=False):
            layer = nn.Linear(ins, outs)
            std = math.sqrt(2 / ins)
            normal_(layer.weight, seed=self.seed, name=f"layer {len(layers)}", std=std)
            nn.init.zeros_(layer.bias)
            layers += [layer, nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    @property
    def work(self) -> int:
        """Multiplications for an image, dense."""
        return sum(a * b for a, b in zip(self.widths, self.widths[1:], strict=False))

    def trained(self, form: LinearMethod | None) -> nn.Sequential:
        """The MLP in a form, which begins with the dense weights, after its training."""
        model, rows = self.model(), self._rows(held_out=False)
        if form is not None:
            form.convert(model)

        def loss(step: int) -> Tensor:
            at = sample(len(rows), 64, seed=self.seed, name=f"batch {step}")
            return F.cross_entropy(model(self.images[rows[at]]), self.labels[rows[at]])

        train(model, form or LowRank(), loss, self.rate, self.updates, self.seed)
        return model

    def rival(self, form: LinearMethod | None, by: Maestro | None) -> Recognized:
        """What a rival comes to.

        Args:
            by: what truncates it after training, if anything does.
        """
        model = self.trained(form)
        errors, truncated = self.errors(model), 0.0
        if by is not None:
            small = by.convert(model).model
            by.steps(small).keep_share(SHARE)
            truncated = self.errors(small)
        return Recognized(errors, truncated)

    def _rows(self, *, held_out: bool) -> Tensor:
        chosen = torch.zeros(len(self.labels), dtype=torch.bool)
        chosen[sample(len(chosen), len(chosen) // 3, seed=self.seed, name="held out")] = True
        return (chosen if held_out else ~chosen).nonzero().flatten()

    @torch.no_grad()
    def errors(self, model: nn.Module) -> float:
        """Of the held-out digits how many per cent it takes for another."""
        rows = self._rows(held_out=True)
        wrong = model.eval()(self.images[rows]).argmax(-1) != self.labels[rows]
        return 100 * wrong.double().mean().item()


def _digits(run: ProofRun, form: Maestro) -> None:
    """A quarter of the dense work."""
    images, labels = digits(run)
    updates = 5000 if run.full else 1600

    def train(arm: _Arm, rate: float, seed: int) -> Recognized:
        bench = Handwriting(images.flatten(1), labels, seed, updates, rate=rate)
        return bench.rival(*arm[1:])

    sweep: Sweep[_Arm, Recognized] = Sweep(
        run,
        train,
        lambda found: found.errors,
        shared={"bench": "digits, MLP", "updates": updates, "share": SHARE},
        kind=Recognized,
    )

    def best(arm: _Arm, seed: int) -> Recognized:
        """A rival at the better of two learning rates, as the held-out digits have it."""
        tried = [sweep.outcome(arm[0], arm, rate, seed, baseline=True) for rate in RATES]
        return min(tried, key=lambda found: found.errors)

    found: dict[str, list[float]] = {"Maestro": [], "dense": [], "SVD": [], "factors": []}
    for seed in run.seeds if run.full else run.seeds[:1]:
        run.progress(f"digits, seed {seed}")
        bench = Handwriting(images.flatten(1), labels, seed, updates)
        model = bench.trained(form)
        form.steps(model).keep_share(SHARE)
        assert work(model) <= SHARE * bench.work
        found["Maestro"].append(bench.errors(model))
        dense = best(("dense", None, form), seed)
        found["dense"].append(dense.errors)
        found["SVD"].append(dense.truncated)
        factors = best(("factors", LowRank(share=SHARE), None), seed)
        found["factors"].append(factors.errors)
    means = {name: sum(each) / len(each) for name, each in found.items()}
    for rival in ("dense", "SVD", "factors"):
        run.figure(
            f"errors on digits (%) over those of {rival}",
            method=means["Maestro"],
            baseline=means[rival],
        )
    pairs = list(zip(*(found[name] for name in ("Maestro", "dense", "SVD")), strict=True))
    more = [mine - dense for mine, dense, _ in pairs]
    run.at_most(
        "points of errors over the dense model, at a quarter of its work",
        sum(more) / len(more), 1.5, seeds=more,
    )  # fmt: skip
    less = [svd - mine for mine, _, svd in pairs]
    run.at_least(
        "points of errors that the truncated SVD has in addition",
        sum(less) / len(less), 3.0, seeds=less,
    )  # fmt: skip
    over = [
        (1 + mine) / (1 + its) for mine, its in zip(found["Maestro"], found["factors"], strict=True)
    ]
    run.against("factors of that size from the first step", "1 + errors (%), equal work", over)


def work(model: nn.Module) -> int:
    """Multiplications for an image, of the components that are kept."""
    layers = [layer for layer in model.modules() if isinstance(layer, OrderedLinear)]
    return sum(layer.kept * (layer.in_features + layer.out_features) for layer in layers)


def _ladder(run: ProofRun, form: Maestro) -> None:
    """Larger penalties, smaller models."""
    images, labels = digits(run)
    bench = Handwriting(images.flatten(1), labels, 0, updates=2000 if run.full else 500)
    sizes = []
    for penalty in LADDER:
        run.progress(f"penalty {penalty:g}")
        model = bench.trained(form.model_copy(update={"penalty": penalty, "threshold": EPSILON}))
        sizes.append(work(model) / bench.work)
        run.figure(f"work, penalty {penalty:g}", method=sizes[-1], baseline=1.0)
    growth = max(b - a for a, b in pairwise(sizes))
    run.at_most("growth of the work at a larger penalty", growth, 0.0, part="check")
