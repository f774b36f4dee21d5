"""The proof of MoSA: merged, it is at least as good as the standard adapter whose size it has.

The bench is `serial_bench.py`: digits turned by a quarter, 60 or 200 images, adapters behind three
hidden blocks of width 256, bottleneck 32, four experts. Each side has its own best learning rate,
and what is compared are the same seeds. The best simple alternative at equal work is a standard
adapter with dropout and the same second pass: it says whether experts are worth anything.
The merged matrix gives the mean of the experts' outputs, which is checked.

Reduced: the quick run has 60 images, 3 seeds and 2 rates and no times where the full one has 60 and
200 images, 10 seeds and 4 rates. The paper's 27 visual tasks are not run here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean, median, stdev

import torch
import torch.nn.functional as F
from torch import nn

from modicum.adapters import MoSA
from modicum.adapters.base import Adapter
from modicum.adapters.mosa import MoSALayer
from modicum.core.random import normal_
from modicum.proofs.adapters.digits_bench import BATCH, Curve
from modicum.proofs.adapters.serial_bench import WIDTH, Bottleneck, SerialBench
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept

VALUE = MoSA(bottleneck=32, place="after", scale=1.0, dropout=0.1)
RATES = (1e-3, 3e-3, 6e-3, 1e-2)
# Of accuracy, which is a share of 497 images: two and a half of them.
AS_GOOD, ROUNDS = 0.005, 30
# Student's t, two-sided at 95 %, by the number of seeds.
T = {3: 4.303, 10: 2.262}


class SummedLayer(MoSALayer):
    """Merged without the division by the number of experts."""

    def mean_matrix(self, which: str) -> torch.Tensor:
        return self.method.experts * super().mean_matrix(which)


class Summed(MoSA):
    """The sum of all experts where their mean belongs."""

    layer = SummedLayer


def prove(run: ProofRun) -> None:
    """Compare accuracies at equal numbers, and what is merged with the experts."""
    run.seeds = tuple(range(10 if run.full else 3))
    summed = Summed(**VALUE.model_dump())
    value = run.contender(VALUE, null=summed, null_is="experts summed, where their mean belongs")
    found = [_accuracies(run, value, images) for images in ((60, 200) if run.full else (60,))]
    mine = [each for side, _ in found for each in side.each("error")]
    paired = [each for _, side in found for each in side.each("error")]
    rival = "a standard adapter with dropout and a second pass"
    run.against(rival, "test errors", ratios(mine, paired))
    sentence = "how far the merged adapter is from its experts' mean"
    run.at_most(sentence, _apart(value), 1e-6, part="check")
    if run.full:
        _cost(run)


def _accuracies(run: ProofRun, value: Adapter, images: int) -> tuple[Swept[Curve], Swept[Curve]]:
    bench = SerialBench(run, images)
    rates = RATES if run.full else RATES[1:3]
    mine = bench.most_accurate(value, rates)
    standard = bench.most_accurate(Bottleneck(), rates, baseline=True)
    paired = bench.most_accurate(VALUE.with_fields(experts=1), rates, baseline=True)
    for name, side in (("the standard adapter", standard), ("one with a second pass", paired)):
        run.figure(
            f"accuracy from {images} images, against {name}",
            method=mine.mean("accuracy"),
            baseline=side.mean("accuracy"),
            claimed="above it" if side is standard else "",
        )
    pairs = zip(mine.each("accuracy"), standard.each("accuracy"), strict=True)
    gains = [own - other for own, other in pairs]
    low, high = _interval(gains)
    named = f"the gain's 95 % interval, {images} images: its lower end, over its upper"
    run.figure(named, method=low, baseline=high)
    sentence = f"accuracy behind the standard adapter's, {images} images"
    run.at_most(sentence, -fmean(gains), AS_GOOD, seeds=[-gain for gain in gains])
    trained = mine.mean("trained") / standard.mean("trained")
    sentence = f"trained numbers over the standard adapter's, {images} images"
    run.at_most(sentence, trained, 1.0, part="check")
    return mine, paired


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean."""
    half = T[len(values)] * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def _attached(value: MoSA) -> tuple[nn.Sequential, MoSALayer]:
    """Blocks of which one has an adapter whose numbers mean something."""
    norms = (nn.LayerNorm(WIDTH) for _ in range(2))
    model = nn.Sequential(*(nn.Sequential(norm, nn.Linear(WIDTH, WIDTH)) for norm in norms))
    adapter = value.with_fields(targets=("0",)).attach(model)
    for name, parameter in adapter.named_parameters():
        normal_(parameter.data, std=0.05, seed=0, name=name)
    [(_, layer)] = adapter.layers()
    assert isinstance(layer, MoSALayer)
    return model, layer


@torch.no_grad()
def _apart(value: MoSA) -> float:
    """Of what Up gives, merged and as the mean over its experts, for hidden numbers at random."""
    _, layer = _attached(value)
    hidden = normal_(torch.empty(BATCH, value.bottleneck), seed=0, name="hidden")
    chosen = torch.eye(value.experts)
    each = [F.linear(hidden, layer.matrix("up", weights.tolist())) for weights in chosen]
    found = F.linear(hidden, layer.mean_matrix("up")) - torch.stack(each).mean(0)
    return float(found.abs().max())


def _cost(run: ProofRun) -> None:
    """Median seconds of a step with two passes and with one, measured in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    x = normal_(torch.empty(BATCH, WIDTH), seed=0, name="x")
    for _ in range(ROUNDS):
        for passes, taken in seconds.items():
            model, layer = _attached(VALUE.with_fields(passes=passes))
            layer.attend(paired=passes == 2)
            layer.begin(1, seed=0)
            begun = time.perf_counter()
            model(x.repeat(passes, 1)).square().mean().backward()
            taken.append(time.perf_counter() - begun)
    run.figure(
        "seconds of a step with a second pass, over one",
        method=median(seconds[2]),
        baseline=median(seconds[1]),
        claimed="1.9 to 2.0 times",
    )
