"""The proof of DCT-AdamW: a new subspace in a fraction of an SVD's time, nearly GaLore's loss.

A refresh is timed on one thread, in turns with LAPACK's SVD, on a square gradient. What is kept of
a subspace is counted by the ledger, which is checked on a real state. Quality is that of a
character model, at equal rank, each side at the best of its own learning rates; what else the full
run notes of DCT-AdamW is trained at its best rate.

The basis is fixed, so the question is whether gradients lie along cosines more than along anything.
Here they do not: random orthogonal columns, selected by the same rule, have as much of the energy.
The paper compares with random columns that nobody selects; both figures are noted.

Reduced: widths of 96 and 128, gradients of a model that has seen 60 batches.
"""

from __future__ import annotations

import statistics

import torch

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.random import normal_
from modicum.models import create
from modicum.optim import SGD, DCTAdamW, GaLore
from modicum.optim.dct import DCTProjector
from modicum.optim.projectors import SVDProjector
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept
from modicum.proofs.optim.subspace_bench import (
    FULL,
    QUICK,
    best_energy,
    cosines,
    energy,
    gradients,
    random_basis,
    refresh_speed,
    text_sweep,
)
from modicum.proofs.optim.text_bench import Plain, TextResult

BETAS = (0.9, 0.999)
RATES = (8e-3, 1.6e-2)
GALORE_RATES = (4e-2, 8e-2)
SGD_RATES = (0.3, 1.0)


def prove(run: ProofRun) -> None:
    """A refresh's time, the bytes of subspaces, the energy in them, the loss."""
    cheap_subspaces(run)
    places_alone(run)
    energy_of_gradients(run)
    as_low_a_loss(run)


def cheap_subspaces(run: ProofRun) -> None:
    """Seconds of a refresh at n = 1024, by FFT, over the SVD's."""
    run.progress("timing subspaces")
    rank = 256
    ours = run.contender(
        DCTProjector(rank), null=SVDProjector(rank), null_is="the SVD in place of the cosines"
    )
    repeats = 5 if run.full else 2
    found = refresh_speed(run, ours, SVDProjector(rank), "the SVD's", 1024, repeats)
    run.at_least("times as fast as an SVD for a new subspace, n = 1024", found, 20)
    if run.full:
        for width in (256, 512, 2048):
            refresh_speed(run, ours, SVDProjector(width // 4), "the SVD's", width, 1)
        product = DCTProjector(rank, transform="product")
        refresh_speed(run, ours, product, "the product's", 1024, repeats)
        drawn = SVDProjector(rank, method="randomized")
        refresh_speed(run, ours, drawn, "a randomized SVD's", 1024, repeats)


def places_alone(run: ProofRun) -> None:
    """Bytes of a decoder's state: r integers a matrix in place of GaLore's r n numbers."""
    rank = QUICK.width // 4
    galore = GaLore.value(rank=rank)
    value = run.contender(DCTAdamW.value(rank=rank), null=galore, null_is="GaLore at equal rank")
    model = create(QUICK.model, seed=0)
    shapes = trained_shapes(model)
    at = OptimizerQuery(shapes)
    said = value.ledger(at).bytes("optimizer")
    theirs = galore.ledger(at).bytes("optimizer")
    run.figure("bytes of state at equal rank, over GaLore's", method=said, baseline=theirs)
    matrices = [p.shape for p in shapes if p.parameter_class == "matrix"]
    less = sum(4 * rank * (min(shape) - 1) for shape in matrices)
    words = "bytes by which the state is off GaLore's without its bases"
    run.at_most(words, abs(theirs - less - said), 0)
    optimizer = value.bind(optimizer_groups(model, learning_rate=1e-3, weight_decay=0.0))
    for name, parameter in model.named_parameters():
        parameter.grad = normal_(torch.empty_like(parameter), seed=0, name=name)
    optimizer.step()
    off = abs(bytes_by_kind(model, optimizer)["optimizer"] - said)
    run.at_most("bytes by which the ledger is off a real state", off, 0, part="check")


def energy_of_gradients(run: ProofRun) -> None:
    """The share of real gradients' energy in r columns, over that in random ones selected alike."""
    run.progress("looking at gradients")
    size, draws = (FULL, 8) if run.full else (QUICK, 4)
    basis_of = run.contender(
        cosines, null=random_basis, null_is="a random orthogonal basis in place of the cosines"
    )
    found = [gradients(size, seed) for seed in ((0, 1, 2) if run.full else (0, 1))]
    over = []
    for part in (8, 4, 2):
        mine = statistics.fmean(energy(each, basis_of, part) for each in found)
        others = statistics.fmean(
            energy(each, lambda width, draw=draw: random_basis(width, draw + 1), part)  # type: ignore[misc]
            for each in found
            for draw in range(draws)
        )
        best = statistics.fmean(best_energy(each, part) for each in found)
        run.figure(
            f"share of gradients' energy, r = n / {part}, over random columns selected alike",
            method=mine,
            baseline=others,
        )
        run.figure(
            f"share of gradients' energy, r = n / {part}, over the SVD's",
            method=mine,
            baseline=best,
            claimed="less than the SVD's",
        )
        run.figure(
            f"share of gradients' energy, r = n / {part}, over columns that nobody selects",
            method=mine,
            baseline=1 / part,
        )
        over.append(mine / others)
    sentence = "energy in the chosen cosines, of that in random columns selected alike"
    run.at_least(sentence, statistics.fmean(over), 1.02, seeds=over)


def as_low_a_loss(run: ProofRun) -> None:
    """Held-out loss of a character model at equal rank, over GaLore's."""
    size = FULL if run.full else QUICK
    rank = size.width // 4
    run.seeds = (0, 1, 2) if run.full else (0,)
    sweep = text_sweep(run)
    galore = Plain(GaLore.value(rank=rank, update_gap=size.steps // 20, betas=BETAS))
    theirs = sweep.best("GaLore", galore, GALORE_RATES, baseline=True)
    value = DCTAdamW.value(rank=rank, betas=BETAS)
    method, rates = run.contender(
        (Plain(value), RATES),
        null=(Plain(SGD.value(momentum=0.0)), SGD_RATES),
        null_is="plain descent in DCT-AdamW's place",
    )
    ours = sweep.best("DCT-AdamW", method, rates)
    _note(run, "GaLore", ours, theirs)
    each = ratios(ours.each("loss"), theirs.each("loss"))
    loss = ours.mean("loss") / theirs.mean("loss")
    run.at_most("loss at equal rank, of GaLore's", loss, 1.03, seeds=each)
    run.against("GaLore of the same rank", "held-out loss", each)
    if not run.full:
        return
    for name, fields in (
        ("error feedback in 8 bits", {"feedback_bits": 8}),
        ("error feedback in 4 bits", {"feedback_bits": 4}),
        ("a subspace every 45 steps", {"update_gap": 45}),
        ("moments left where they are", {"on_refresh": "keep"}),
    ):
        other = Plain(DCTAdamW.value(**(value.fields() | fields)))
        _note(run, f"that with {name}", ours, sweep.at(name, other, ours.learning_rate))
    few = {"rank": size.width // 8}
    alone, fed = (
        sweep.at(
            f"r = n / 8, {bits} bits",
            Plain(DCTAdamW.value(**(value.fields() | few | {"feedback_bits": bits}))),
            ours.learning_rate,
        )
        for bits in (0, 8)
    )
    _note(run, "that without it: error feedback at r = n / 8", fed, alone)


def _note(run: ProofRun, name: str, ours: Swept[TextResult], theirs: Swept[TextResult]) -> None:
    for words, figure in (("held-out loss (nats)", "loss"), ("bytes of state", "state_bytes")):
        run.figure(f"{words}, over {name}", method=ours.mean(figure), baseline=theirs.mean(figure))
