"""The proof of Trion: Muon at full rank, fewer operations below it, and nearly GaLore's loss.

At r = n Trion is Muon with plain momentum, which is checked over twenty steps. The operations of a
step are the ledger's, which counts matrix products as PyTorch does, and no FFT. A new subspace by
FFT, with what is inside of it, is timed in turns with Dion's: a step of a power iteration, a QR and
the product with its basis. Quality is that of a character model, at equal rank with GaLore, each
side at the best of its own learning rates; Muon, which has as much state, is the best simple
alternative.

Dion itself is not trained here. Reduced: widths of 96 and 128.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.random import normal_
from modicum.optim import SGD, GaLore, Muon, Trion
from modicum.optim.dct import DCTProjector
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.distances import worst
from modicum.proofs.optim.subspace_bench import FULL, QUICK, text_sweep
from modicum.proofs.optim.text_bench import Plain

SHORT = replace(QUICK, steps=80)  # three arms, and two of them of Newton-Schulz
BETAS = (0.9, 0.999)
RATES = (2e-2, 4e-2)
GALORE_RATES = (4e-2, 8e-2)
SGD_RATES = (0.3, 1.0)
SHAPES = ((24, 16), (16, 24), (40, 40), (7, 64))


def prove(run: ProofRun) -> None:
    """Muon at full rank, operations of a step, a subspace's time, the loss."""
    as_muon(run)
    fewer_operations(run)
    cheap_subspaces(run)
    as_low_a_loss(run)


def as_muon(run: ProofRun) -> None:
    """Twenty steps at r = n against our Muon without Nesterov's step, with both factors."""
    run.progress("comparing with Muon")
    less = run.contender(0, null=1, null_is="a rank below the full one")
    for factor in ("original", "match_rms_adamw"):
        apart = 0.0
        for shape in SHAPES:
            one, other = (_matrix(shape, "weight") for _ in range(2))
            ours = Trion([one], 0.02, rank=min(shape) - less, shape_factor=factor)
            theirs = Muon([other], 0.02, nesterov=False, shape_factor=factor)
            for step in range(20):
                gradient = _matrix(shape, f"step {step}").detach()
                one.grad, other.grad = gradient.clone(), gradient
                ours.step()
                theirs.step()
            apart = worst((apart, (one - other).abs().max().item()))
        words = f"largest difference of a weight from Muon's after 20 steps, r = n, {factor}"
        run.at_most(words, apart, 1e-5, part="check")


def _matrix(shape: tuple[int, ...], name: str) -> nn.Parameter:
    return nn.Parameter(normal_(torch.empty(shape), seed=0, name=f"{name} {shape}"))


def fewer_operations(run: ProofRun) -> None:
    """Operations of the products of a step at r = n / 4, over Muon's, n = 1024."""
    at = OptimizerQuery((TrainedParameter("weight", (1024, 1024), "matrix"),))
    muon = Muon.value()
    value = run.contender(Trion.value(rank=256), null=muon, null_is="Muon in Trion's place")
    figure = run.figure(
        "operations of matrix products in a step, n = 1024, r = n / 4",
        method=value.ledger(at).flops("step"),
        baseline=muon.ledger(at).flops("step"),
    )
    run.at_most("operations of a step, of Muon's", figure.ratio, 0.25)


def cheap_subspaces(run: ProofRun) -> None:
    """Seconds of a new subspace at n = 1024, r = n / 4, and of what is inside, over Dion's."""
    run.progress("timing subspaces")
    matrix = normal_(torch.empty(1024, 1024), seed=0, name="momentum")
    start = normal_(torch.empty(1024, 256), seed=0, name="last basis")
    projector = DCTProjector(256)

    def iteration() -> object:
        basis = torch.linalg.qr(matrix @ start).Q
        return basis, matrix.mT @ basis

    ours = run.contender(
        lambda: projector.refresh(matrix, 0, 0),
        null=iteration,
        null_is="a power iteration with QR in place of the cosines",
    )
    times = in_turns({"ours": ours, "QR": iteration}, 31 if run.full else 9)
    figure = run.figure(
        "seconds of a new subspace, n = 1024, r = n / 4, over a power iteration's and QR's",
        method=times["ours"].median,
        baseline=times["QR"].median,
        claimed="faster",
    )
    run.at_most("time of a new subspace, of a power iteration's and QR's", figure.ratio, 0.8)


def as_low_a_loss(run: ProofRun) -> None:
    """Held-out loss of a character model at equal rank, over GaLore's; and over Muon's."""
    size = FULL if run.full else SHORT
    rank = size.width // 4
    run.seeds = (0, 1, 2) if run.full else (0,)
    sweep = text_sweep(run, SHORT)
    galore = Plain(GaLore.value(rank=rank, update_gap=size.steps // 20, betas=BETAS))
    theirs = sweep.best("GaLore", galore, GALORE_RATES, baseline=True)
    muon = sweep.best("Muon", Plain(Muon.value()), RATES, baseline=True)
    arm, rates = run.contender(
        (Plain(Trion.value(rank=rank)), RATES),
        null=(Plain(SGD.value(momentum=0.0)), SGD_RATES),
        null_is="plain descent in Trion's place",
    )
    ours = sweep.best("Trion", arm, rates)
    for name, other in (("GaLore", theirs), ("Muon", muon)):
        for words, figure in (("held-out loss (nats)", "loss"), ("bytes of state", "state_bytes")):
            mine, its = ours.mean(figure), other.mean(figure)
            run.figure(f"{words}, over {name}", method=mine, baseline=its)
    loss = ours.mean("loss") / theirs.mean("loss")
    each = ratios(ours.each("loss"), theirs.each("loss"))
    run.at_most("loss at equal rank, of GaLore's", loss, 1.03, seeds=each)
    run.against("Muon", "held-out loss", ratios(ours.each("loss"), muon.each("loss")))
