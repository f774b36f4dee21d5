"""The proof of low-rank layers: half of the weights train to nearly the dense decoder's loss.

A character model of Python's standard library (`text_bench.py`), its projections dense, or factors
of half their elements, from random weights with the same batches; each at the best of its learning
rates. The best simple alternative is a narrower dense decoder of as many parameters.

Reduced: the paper predicts 95 % of the weights of perceptrons and convolutional networks; here it
is half of those of a decoder, and both factors are trained, where the paper fixes one.
"""

from __future__ import annotations

from dataclasses import replace

from modicum.linears.low_rank import LowRank
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept
from modicum.proofs.linears.formed_text import FormedArm, FormedSize, formed_sweep
from modicum.proofs.optim.text_bench import TextResult

RATES = (2e-3, 4e-3, 8e-3)

QUICK = FormedSize(width=64, layers=2, mlp_width=172, tokens=64, rows=8, steps=450)
FULL = FormedSize(width=128, layers=2, mlp_width=344, tokens=64, rows=8, steps=1000)
# Dense decoders with at least the parameters of the factored ones.
NARROW = replace(QUICK, width=46, mlp_width=136)
NARROW_FULL = replace(FULL, width=92, mlp_width=264)


def prove(run: ProofRun) -> None:
    """Train the dense decoder, factors of half of it, and a narrower one of as many parameters."""
    dense, narrow = (FULL, NARROW_FULL) if run.full else (QUICK, NARROW)
    run.seeds = (0, 1, 2) if run.full else (0,)
    form = run.contender(
        LowRank(share=0.5),
        null=LowRank(rank=1),
        null_is="factors of rank 1 in their place",
        planted=LowRank(share=0.55),
    )
    factored = dense.taking(form)
    sweep = formed_sweep(run)

    def best(name: str, size: FormedSize) -> Swept[TextResult]:
        return sweep.best(name, FormedArm(size), RATES, baseline=size is not factored)

    mine, full = best("low-rank", factored), best("dense", dense)
    loss = run.figure(
        "held-out loss (nats)",
        method=mine.mean("loss"),
        baseline=full.mean("loss"),
        claimed="no drop in accuracy in the best case",
    )
    each = ratios(mine.each("loss"), full.each("loss"))
    run.at_most("loss, of the dense decoder's", loss.ratio, 1.03, seeds=each)
    counts = {size: size.model.parameter_count() for size in (factored, dense, narrow)}
    run.figure("parameters", method=counts[factored], baseline=counts[dense])
    share = counts[factored] / counts[dense]
    run.at_most("parameters, of the dense decoder's", share, 0.65, part="check")
    rival = best("narrower", narrow)
    run.at_least(
        "parameters of the narrower decoder, of the factors'",
        counts[narrow] / counts[factored],
        1.0,
        part="check",
    )
    over = ratios(mine.each("loss"), rival.each("loss"))
    run.against("a narrower dense decoder", "held-out loss at as many parameters", over)
