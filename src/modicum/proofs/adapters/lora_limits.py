"""The proof of the limits of LoRA: gradients in linear time below the threshold, and none above it.

Heads of width 4 whose entries are at most Gamma (`attention_bench.py`): below the threshold, at
Gamma 1, a series of degree 3 gives the gradient of W_Q to 1e-3; above it, at Gamma 3, degree 6 is
off by more than 0.1, and the diagnosis, which sees sampled scores alone and no gradient, says so.
Its nulls are a series of degree 1, activations below the threshold, and forecasts of another head.
Time is taken against exact attention with its full matrix, in chunks of queries (the same memory),
and PyTorch's fused kernel, which is the best simple alternative; its null is exact attention in
chunks. Last, a small attention is adapted to turned digits with exact and approximate attention.

What cannot be shown here is the threshold itself: it is asymptotic, and that nothing sub-quadratic
exists above it follows from a hypothesis (SETH). Reduced: the quick run has three seeds, sequences
of 1,024 for errors and up to 16,384 for time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from modicum.adapters.head_scores import HeadMaxima, measured
from modicum.adapters.lora_limits import EXACT, LoRALimits
from modicum.core.contracts.method import Context
from modicum.core.layers.attention_calls import SeenAttention
from modicum.core.layers.taylor_attention import columns
from modicum.proofs.adapters.attention_bench import (
    Attend,
    chunked,
    exact,
    fused,
    head,
    series_of,
)
from modicum.proofs.adapters.turned_digits_bench import TurnedDigitsBench
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.distances import worst

LENGTH, DEGREE, BEYOND = 1024, 3, 6
GAMMAS, ABOVE = (0.5, 1.0, 2.0, 3.0), 3.0
COMPARED_AT = 4096


def prove(run: ProofRun) -> None:
    """Errors, forecasts, time, and an adaptation."""
    run.seeds = tuple(range(5 if run.full else 3))
    exactness(run)
    errors(run)
    above(run)
    forecasts(run)
    times(run)


def exactness(run: ProofRun) -> None:
    """A series of high degree is exact attention."""
    degree = run.contender(12, null=6, null_is="a series of degree 6")
    found = head(0.5, 256, dtype=torch.float64).error(series_of(degree))
    run.at_most("error of dW_Q at degree 12, Gamma 0.5, fp64", found, 1e-10, part="check")


def errors(run: ProofRun) -> None:
    """Gradients below the threshold, and what an adaptation learns with them."""
    degree = run.contender(DEGREE, null=1, null_is="a series of degree 1")
    heads = [head(1.0, LENGTH, seed=seed) for seed in run.seeds]
    found = [each.error(series_of(degree)) for each in heads]
    in_fp32 = fmean(each.error(exact) for each in heads)
    run.figure("relative error of dW_Q, Gamma 1", method=fmean(found), baseline=in_fp32)
    run.at_most("relative error of dW_Q, Gamma 1, degree 3", fmean(found), 1e-3, seeds=found)
    for gamma in GAMMAS if run.full else ():
        for g in (1, 2, 3, 4, 6):
            each = fmean(head(gamma, LENGTH, seed=s).error(series_of(g)) for s in run.seeds)
            label = f"relative error of dW_Q, Gamma {gamma:g}, degree {g}"
            run.figure(label, method=each, baseline=in_fp32)
    lost = []
    for seed in run.seeds if run.full else run.seeds[:2]:
        bench = TurnedDigitsBench(run, seed)
        mine, theirs = bench.accuracy(series_of(degree)), bench.accuracy(fused)
        run.figure(f"accuracy on turned digits, seed {seed}", method=mine, baseline=theirs)
        lost.append(theirs - mine)
    run.at_most("accuracy lost to exact attention", fmean(lost), 0.005, part="check", seeds=lost)


def above(run: ProofRun) -> None:
    """Gradients above the threshold, and what the diagnosis says of such a head."""
    gamma = run.contender(ABOVE, null=1.0, null_is="activations below the threshold")
    heads = [head(gamma, LENGTH, seed=seed) for seed in run.seeds]
    found = [each.error(series_of(BEYOND)) for each in heads]
    run.figure("Gamma over sqrt(log L)", method=gamma / math.sqrt(math.log(LENGTH)), baseline=1.0)
    run.at_least("relative error of dW_Q above the threshold", min(found), 0.1, seeds=found)
    said = [_verdict(each.q, each.k) for each in heads]
    share = said.count(EXACT) / len(said)
    run.at_least("share of these heads that the diagnosis says are exact only", share, 1.0)


def _verdict(q: Tensor, k: Tensor) -> str:
    """What the diagnosis says of a head."""

    class Attention(torch.nn.Module):
        def forward(self) -> Tensor:
            return fused(q, k, q)

    model = Attention()
    limits = LoRALimits().bind(Context(model))
    with limits.looking():
        model()
    return str(limits.findings()[0]["verdict"])


def forecasts(run: ProofRun) -> None:
    """The diagnosis's error of attention weights next to the measured one of gradients."""
    heads = {gamma: head(gamma, LENGTH) for gamma in GAMMAS}
    looked = {gamma: _measured(each.seen) for gamma, each in heads.items()}
    others = dict(zip(GAMMAS, reversed(list(looked.values())), strict=True))
    said = run.contender(looked, null=others, null_is="the forecast of another head")
    factors, below = [], []
    for gamma, each in heads.items():
        for degree in (2, 4, 6):
            error, foretold = each.error(series_of(degree)), float(said[gamma].errors[degree - 1])
            label = f"foretold error, of the measured one, Gamma {gamma:g}, degree {degree}"
            if degree == 4:
                run.figure(label, method=foretold, baseline=error)
            if error > 1e-5:  # below it, fp32 decides
                factors.append(worst((foretold / error, error / foretold)))
                below.append(error / foretold)
    run.at_most("factor between foretold and measured errors, at most", worst(factors), 10.0)
    run.at_most("measured errors over foretold ones, at most", worst(below), 2.0, part="check")


def _measured(seen: SeenAttention) -> HeadMaxima:
    return measured(seen, LoRALimits().closely)


def times(run: ProofRun) -> None:
    """Seconds of a forward and a backward pass, by length, next to exact attention's."""
    mine: Attend = run.contender(
        series_of(DEGREE), null=chunked, null_is="exact attention in chunks"
    )
    lengths = [1024, 2048, 4096] if run.null else [4096, 8192, 16384]
    if run.full and not run.null:
        lengths += [32768, 65536]
    repeats = 9 if run.full else 5
    taken = _seconds({f"{length}": (length, mine) for length in lengths}, repeats)
    slope = _slope(lengths, [min(taken[f"{length}"]) for length in lengths])
    run.figure("slope of the time in L, log-log", method=slope, baseline=2.0)
    run.at_most("slope of the time in L, log-log", slope, 1.15)
    arms = {"mine": mine, "full": exact, "chunked": chunked, "fused": fused}
    taken = _seconds({name: (COMPARED_AT, attend) for name, attend in arms.items()}, repeats)
    label = {"full": "its full matrix", "chunked": "chunks of queries", "fused": "a fused kernel"}
    for name, words in label.items():
        run.figure(
            f"seconds at L = {COMPARED_AT}, against exact attention with {words}",
            method=min(taken["mine"]),
            baseline=min(taken[name]),
        )
    gained = min(taken["full"]) / min(taken["mine"])
    run.at_least(f"time of exact attention, of its own, at L = {COMPARED_AT}", gained, 10.0)
    each = [one / other for one, other in zip(taken["mine"], taken["fused"], strict=True)]
    run.against("PyTorch's fused attention", f"seconds at L = {COMPARED_AT}", each)
    beyond(run, repeats)
    run.figure("columns of a head of width 64 at degree 3", method=columns(64, 3), baseline=4096)


def beyond(run: ProofRun, repeats: int) -> None:
    """What of the time is left with a causal mask, and for wider heads."""
    arms: dict[str, Attend]
    arms = {"mine": series_of(DEGREE, causal=True), "fused": partial(fused, causal=True)}
    taken = _seconds({name: (COMPARED_AT, attend) for name, attend in arms.items()}, repeats)
    label = f"seconds at L = {COMPARED_AT}, against a fused kernel, causal"
    run.figure(label, method=min(taken["mine"]), baseline=min(taken["fused"]))
    for width in (8, 16) if run.full else ():
        arms = {"mine": series_of(DEGREE), "fused": fused}
        both = {name: (COMPARED_AT, attend) for name, attend in arms.items()}
        taken = _seconds(both, repeats, width)
        label = f"seconds at L = {COMPARED_AT}, against a fused kernel, width {width}"
        run.figure(label, method=min(taken["mine"]), baseline=min(taken["fused"]))


def _seconds(
    arms: Mapping[str, tuple[int, Attend]], repeats: int, width: int = 4
) -> dict[str, tuple[float, ...]]:
    heads = {length: head(1.0, length, width) for length, _ in arms.values()}

    def step(length: int, attend: Attend) -> None:
        each = heads[length]
        tensors = [t.requires_grad_() for t in (each.q, each.k, each.v)]
        torch.autograd.grad(attend(*tensors), tensors, each.gradient)

    steps = {name: partial(step, *arm) for name, arm in arms.items()}
    return {name: taken.seconds for name, taken in in_turns(steps, repeats).items()}


def _slope(lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Of a line through the logarithms, by least squares."""
    x, y = [math.log(n) for n in lengths], [math.log(s) for s in seconds]
    mean_x, mean_y = fmean(x), fmean(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)
