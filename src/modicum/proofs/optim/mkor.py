"""The proof of MKOR: a refresh next to K-FAC's inverse, bytes on the wire, steps, and the hybrid.

A refresh of a factor is timed next to what K-FAC needs for it, a Cholesky inverse. Bytes are those
of two ranks' exchanges in one update. Steps are those on Eva's autoencoder of digits, each rule at
the best of its own learning rates, until the loss that momentum ends with: a transform that keeps
the norm of each gradient can take momentum's rates. The hybrid's time is that of full trainings,
taken in turns with MKOR's at one rate.

No BERT, and no 64 accelerators, where the claim was made. The best simple alternative is momentum
with Eva's clip: it has no curvature and exchanges nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.ranks.ranks import Ranks
from modicum.optim.layer_factors import RankOneInverse
from modicum.optim.mkor import MKOR, MKORRuntime
from modicum.optim.transform import TransformContext
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.optim.digits_curves import AUTOENCODER, DEEP, RATES, CurveRule, CurveTask
from modicum.proofs.optim.eva import CLIPPED, PLAIN, WITH_EVA
from modicum.proofs.ranks import at_ranks

WIDTH = 1024  # at which a refresh is judged
OFTEN = CurveRule("MKOR of 10", MKOR(every=10))
SELDOM = CurveRule("MKOR of 100", MKOR(every=100))
ALWAYS = CurveRule("MKOR of 1", MKOR(every=1))
AVERAGE = CurveRule("MKOR of 10, average", MKOR(every=10, form="average"))
HYBRID = CurveRule("MKOR-H", MKOR(every=10, hybrid=True))
SIDES = ((96, 64), (64, 96), (10, 64))  # out, in: of the layers whose bytes are counted


@dataclass(frozen=True)
class InverseByCholesky(RankOneInverse):
    """What `code` makes of a vector, by two decompositions, as K-FAC has one: cubic."""

    def refreshed(self, inverse: Tensor, vector: Tensor) -> Tensor:
        """The inverse with a vector taken up."""
        near = self.decay * inverse.double()
        near.diagonal().add_(1 - self.decay)
        wide = vector.double()
        summed = torch.cholesky_inverse(torch.linalg.cholesky(near)) + torch.outer(wide, wide)
        return torch.cholesky_inverse(torch.linalg.cholesky(summed)).to(inverse.dtype)


class InvertingMKOR(MKOR):
    """MKOR of which each refresh inverts."""

    def bind(self, context: TransformContext) -> MKORRuntime:
        """MKOR's runtime with that rule."""
        runtime = super().bind(context)
        rule = runtime.rule
        runtime.rule = InverseByCholesky(rule.form, rule.decay, rule.bound, rule.keep)
        return runtime


INVERTING = CurveRule("MKOR of 4, by Cholesky", InvertingMKOR(every=4, factors="full"))


def prove(run: ProofRun) -> None:
    """Time of a refresh, bytes, steps to momentum's loss, and what ending early spares."""
    refreshes(run)
    wire(run)
    convergence(run)


def refreshes(run: ProofRun) -> None:
    """Milliseconds in which a factor takes a vector up, and in which its like is inverted."""
    for width in (256, 512, WIDTH, 2048) if run.full else (256, WIDTH):
        run.progress(f"timing refreshes, width {width}")
        mine, dense = rank_one(width), cholesky(width)
        contender = run.contender(mine, null=dense, null_is="a Cholesky inverse as refresh")
        times = in_turns({"mine": contender, "dense": dense}, 5 if run.null else 9)
        figure = run.figure(
            f"milliseconds of a refresh, width {width}",
            method=1e3 * times["mine"].median,
            baseline=1e3 * times["dense"].median,
            claimed="quadratic, not cubic",
        )
        if width == WIDTH:
            sentence = f"times a Cholesky inverse takes as long, width {width}"
            run.at_least(sentence, 1 / figure.ratio, 10.0)


def rank_one(width: int) -> Callable[[], None]:
    """A refresh of one factor in fp16."""
    factor, vector = torch.eye(width, dtype=torch.float16), torch.randn(width) / width**0.5
    rule = RankOneInverse("code", 0.95, 2.0, 0.9)
    return lambda: rule.take_up(factor, vector)


def cholesky(width: int) -> Callable[[], Any]:
    """K-FAC's inverse of one damped factor."""
    samples = torch.randn(width, 2 * width) / width**0.5
    factor = samples @ samples.T + 0.1 * torch.eye(width)
    return lambda: torch.cholesky_inverse(torch.linalg.cholesky(factor))


def wire(run: ProofRun) -> None:
    """Bytes that two ranks exchange in an update that refreshes, and in one that does not."""
    run.progress("counting bytes at two ranks")
    dense = 4 * sum(o * o + i * i for o, i in SIDES)
    (counts, vectors, other), _ = at_ranks(f"{__name__}:exchanged", 2)
    sent = run.contender(vectors, null=dense, null_is="K-FAC's factors on the wire")
    run.figure("bytes of an exchange", method=sent, baseline=dense, claimed="linear in d")
    formula = 2 * sum(o + i + 1 for o, i in SIDES)
    run.at_most("bytes beyond 2 (in + 1 + out) a layer", abs(sent - formula), 0, part="check")
    extra = abs(counts - 4 * (len(SIDES) + 1)) + other
    run.figure("bytes of counts next to it", method=counts, baseline=0)
    run.at_most("bytes beyond these, and of an update in between", extra, 0, part="check")


def exchanged(ranks: Ranks) -> list[int]:
    """Bytes of both exchanges of the first update, and of all in the second."""
    layers = nn.ModuleList(nn.Linear(i, o) for o, i in SIDES)
    runtime = MKOR(every=2).bind(TransformContext(layers, ranks=ranks))
    sent: list[list[int]] = []
    for _ in range(2):
        for layer, (_, width) in zip(layers, SIDES, strict=True):
            layer(torch.ones(3, width)).square().sum().backward()
        with counting() as seen:
            runtime.apply()
        sent.append(seen)
    return [*sent[0], sum(sent[1])]


@contextmanager
def counting() -> Iterator[list[int]]:
    """The bytes of each sum over ranks that is made in here."""
    seen, original = list[int](), dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        seen.append(tensor.numel() * tensor.element_size())
        return original(tensor, *arguments, **named)

    dist.all_reduce = counted
    try:
        yield seen
    finally:
        dist.all_reduce = original


def convergence(run: ProofRun) -> None:
    """Steps to the loss that momentum ends with, and the hybrid's time and last loss."""
    run.seeds = (0, 1, 2) if run.full else (0, 1)
    epochs = 20 if run.full else 12
    tasks = [CurveTask("autoencoder", AUTOENCODER, epochs, run, RATES if run.full else RATES[1:])]
    if run.full:
        tasks.append(CurveTask("20 layers", DEEP, epochs, run))
    over_clipped: list[float] = []
    for task in tasks:
        plain = task.ends(PLAIN, baseline=True)
        contender = run.contender(OFTEN, null=PLAIN, null_is="momentum in MKOR's place")
        mine, seldom = task.reaches(contender, plain), task.reaches(SELDOM, plain)
        over_clipped += ratios(mine, task.reaches(CLIPPED, plain, baseline=True))
        needed = statistics.mean(mine)
        label = f"steps to momentum's last loss, {task.name}"
        run.figure(label, method=needed, baseline=task.steps, claimed="600 of 1,563 steps")
        figure = run.figure(
            f"{label}, refreshed every 10 and every 100 updates",
            method=needed,
            baseline=statistics.mean(seldom),
        )
        if task is tasks[0]:
            each = [one / task.steps for one in mine]
            run.at_most(f"steps, of momentum's, {task.name}", needed / task.steps, 0.8, seeds=each)
        sentence = f"steps of a refresh every 10 updates, of one every 100, {task.name}"
        run.at_most(sentence, figure.ratio, 1.0, seeds=ratios(mine, seldom))
        for other in (ALWAYS, AVERAGE, WITH_EVA) if run.full else ():
            needed = statistics.mean(task.reaches(other, plain))
            run.figure(f"{label}, {other.name}", method=needed, baseline=task.steps)
    run.against("momentum with the clip alone", "steps to momentum's last loss", over_clipped)
    ends_early(run, tasks[0])


def ends_early(run: ProofRun, task: CurveTask) -> None:
    """Trainings with and without the end, at the rate that suits MKOR; timed in turns."""
    full, rate = task.ends(OFTEN), task.rate(OFTEN)
    null_is = "a Cholesky inverse in every fourth update, which never ends"
    timed = run.contender(HYBRID, null=INVERTING, null_is=null_is)
    run.progress("timing trainings")
    both = {
        "hybrid": lambda: task.curve(timed, rate, run.seeds[0]),
        "full": lambda: task.curve(OFTEN, rate, run.seeds[0]),
    }
    times = in_turns(both, 5 if run.full else 2)
    seconds = run.figure(
        "seconds of a training, MKOR-H and MKOR",
        method=times["hybrid"].fastest,
        baseline=times["full"].fastest,
    )
    run.at_most("time of MKOR-H's training, of MKOR's", seconds.ratio, 1.0)
    null_is = "momentum, which ends before it begins"
    judged = run.contender(HYBRID, null=PLAIN, null_is=null_is)
    early = [task.curve(judged, rate, seed).losses[-1] for seed in run.seeds]
    label = "last loss, MKOR-H and MKOR"
    last = run.figure(label, method=statistics.mean(early), baseline=statistics.mean(full))
    run.at_most("last loss of MKOR-H, of MKOR's", last.ratio, 1.02, seeds=ratios(early, full))
