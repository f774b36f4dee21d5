"""The proof of Compacter: as good as the standard serial adapter at a fifteenth of its numbers.

The bench is `serial_bench.py`: digits turned by a quarter, 60 or 200 images, adapters behind three
hidden blocks of width 256 without norms, bottleneck 32. Each side has its own best learning rate.
With norms, where the standard adapter is better, both are shown. The best simple
alternative at equal budget is the serial adapter whose matrices have rank one: it says whether
sums of Kronecker products with shared factors are worth anything. Timed are x H in parts and with
H built, in turns.

Reduced: the quick run has 60 images, 3 seeds and 2 rates, no times, and no word on matrices of rank
one as the alternative, where the full one has 60 and 200 images, 5 seeds and 4 rates. T5 on
GLUE and SuperGLUE is not run here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch
from torch import Tensor, nn

from modicum.adapters import Compacter
from modicum.adapters.base import Adapter, SharedFactors
from modicum.adapters.compacter import CompacterLayer
from modicum.adapters.sites import Site
from modicum.core.random import normal_
from modicum.proofs.adapters.digits_bench import Curve
from modicum.proofs.adapters.serial_bench import Bottleneck, SerialBench, ThinBottleneck
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept

REDUCTION = 8  # of width 256: a bottleneck of 32
RATES = (3e-2, 6e-2, 1e-1, 2e-1)
RIVAL_RATES = (3e-3, 1e-2, 3e-2, 6e-2)
STANDARD_RATES = (1e-3, 3e-3, 6e-3, 1e-2)
WIDTHS, TOKENS, ROUNDS = (768, 1024), 4096, 15


def prove(run: ProofRun) -> None:
    """Compare accuracies at a fifteenth of the numbers, and times of both ways to the product."""
    run.seeds = tuple(range(5 if run.full else 3))
    value = run.contender(
        Compacter(reduction_factor=REDUCTION),
        null=ThinBottleneck(),
        null_is="matrices of rank one in Compacter's place",
    )
    found = [_accuracies(run, value, images) for images in ((60, 200) if run.full else (60,))]
    mine = [each for side, _, _ in found for each in side.each("error")]
    thin = [each for _, _, side in found for each in side.each("error")]
    if run.full:  # three seeds and 60 images decide nothing between these two
        run.against("serial adapters of rank one", "test errors", ratios(mine, thin))
        _with_norms(run, value)
        _times(run)


def _with_norms(run: ProofRun, value: Adapter) -> None:
    """What both sides come to behind blocks that begin with a norm, which is no part of a claim."""
    bench = SerialBench(run, 60, nn.LayerNorm)
    mine = bench.most_accurate(value, RATES)
    standard = bench.most_accurate(Bottleneck(), STANDARD_RATES, baseline=True)
    run.figure(
        "accuracy from 60 images, blocks with norms, against the standard adapter",
        method=mine.mean("accuracy"),
        baseline=standard.mean("accuracy"),
    )


def _accuracies(
    run: ProofRun, value: Adapter, images: int
) -> tuple[Swept[Curve], Swept[Curve], Swept[Curve]]:
    bench = SerialBench(run, images)

    def best(adapter: Adapter, rates: Sequence[float], baseline: bool = False) -> Swept[Curve]:
        return bench.most_accurate(adapter, rates if run.full else rates[1:3], baseline=baseline)

    mine = best(value, RATES)
    standard = best(Bottleneck(), STANDARD_RATES, True)
    thin = best(ThinBottleneck(), RIVAL_RATES, True)
    for name, side in (("the standard adapter", standard), ("matrices of rank one", thin)):
        run.figure(
            f"accuracy from {images} images, against {name}",
            method=mine.mean("accuracy"),
            baseline=side.mean("accuracy"),
            claimed="full tuning's (GLUE)" if side is standard else "",
        )
    trained = run.figure(
        f"trained numbers, {images} images",
        method=mine.mean("trained"),
        baseline=standard.mean("trained"),
        claimed="0.073 % of T5-base's",
    )
    pairs = zip(mine.each("accuracy"), standard.each("accuracy"), strict=True)
    behind = [other - own for own, other in pairs]
    sentence = f"accuracy behind the standard adapter's, {images} images"
    run.at_most(sentence, fmean(behind), 0.015, seeds=behind)
    more = fmean(mine.each("accuracy")) - fmean(thin.each("accuracy"))
    run.at_least(f"accuracy over matrices of rank one, {images} images", more, 0.0025)
    run.at_least("numbers of the standard adapter, of its own", 1 / trained.ratio, 15, part="check")
    return mine, standard, thin


def _times(run: ProofRun) -> None:
    """Seconds of x H for 4,096 positions, from d to d/32: in parts, and with H built before."""
    for width in WIDTHS:
        method, site = Compacter(), Site("block", "block", width, width)
        layer = CompacterLayer(method, site, SharedFactors(method, [site]))
        for name, parameter in (*layer.named_parameters(), *layer.shared.named_parameters()):
            normal_(parameter.data, seed=0, name=f"{width}/{name}")
        x = normal_(torch.empty(TOKENS, width), seed=0, name=f"x/{width}")
        parts, built = _in_turns(layer, x)
        run.figure(f"seconds of x H, width {width}", method=parts, baseline=built)
        run.at_least(f"times as fast as with H built, width {width}", built / parts, 3.0)


def _in_turns(layer: CompacterLayer, x: Tensor) -> tuple[float, float]:
    """The median seconds of both ways, measured in turns, after one round that is not counted."""
    ways: tuple[Callable[[], Tensor], ...] = (lambda: layer.down(x), lambda: _built(layer, x))
    seconds: list[list[float]] = [[], []]
    with torch.no_grad():
        for _ in range(ROUNDS + 1):
            for place, way in enumerate(ways):
                begun = time.perf_counter()
                way()
                seconds[place].append(time.perf_counter() - begun)
    return median(seconds[0][1:]), median(seconds[1][1:])


def _built(layer: CompacterLayer, x: Tensor) -> Tensor:
    """The same by the definition, with H [k, o] made."""
    slow = layer.shared.get_parameter("A")
    s, t, bias = (layer.get_parameter(f"down_{name}") for name in ("s", "t", "bias"))
    terms = [torch.kron(a, torch.outer(s[i], t[i])) for i, a in enumerate(slow)]
    return x @ torch.stack(terms).sum(0) + bias
