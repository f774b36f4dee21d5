"""The proof of FRUGAL: in at most GaLore's bytes, half of what GaLore loses to AdamW.

The budget is the state of GaLore at a quarter of the width. FRUGAL has two matrices of seven at a
time, from both ends, which is nearly as many bytes in its largest round. AdamW and FRUGAL may give
matrices a quarter of the rate that all else has, as GaLore's alpha does. The null drops the
residual, and is BAdam. A gap of GaLore's to AdamW that is less than two deviations over seeds is no
gap to close: then that criterion is missed, whatever FRUGAL's loss.

The other parts (columns, singular vectors, nothing at all) are noted in the full proof, at FRUGAL's
rate. Reduced: widths of 96 and 128, 120 and 900 steps, a subspace for a third and a twentieth.
"""

from __future__ import annotations

import math
import statistics

import torch

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.random import normal_
from modicum.models import create
from modicum.optim import FRUGAL, AdamW, GaLore
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Swept
from modicum.proofs.optim.subspace_bench import FULL, QUICK, text_sweep
from modicum.proofs.optim.text_bench import Plain, TextResult

BETAS = (0.9, 0.999)
DENSITY = 2 / 7
RATES = (8e-3, 1.6e-2)
GALORE_RATES = (4e-2, 8e-2)
FULL_GALORE_RATES = (1e-2, 2e-2, 4e-2)
ALIKE_RATES = (3e-4, 1e-3, 3e-3)  # where matrices have the rate that all else has
QUARTER = 0.25


def prove(run: ProofRun) -> None:
    """AdamW at its one end, bytes, the loss at equal bytes."""
    as_adamw(run)
    in_the_budget(run)
    half_of_the_gap(run)


def as_adamw(run: ProofRun) -> None:
    """Twenty steps with all of the gradient against PyTorch's unfused AdamW."""
    density = run.contender(1.0, null=0.9, null_is="nine tenths of the columns in place of all")
    one, other = (
        torch.nn.Parameter(normal_(torch.empty(24, 16), seed=0, name="weight")) for _ in range(2)
    )
    ours = FRUGAL([one], 0.01, density=density, part="columns", weight_decay=0.1)
    theirs = torch.optim.AdamW([other], 0.01, weight_decay=0.1, foreach=False, fused=False)
    for step in range(20):
        gradient = normal_(torch.empty(24, 16), seed=0, name="gradient", step=step)
        one.grad, other.grad = gradient.clone(), gradient
        ours.step()
        theirs.step()
    apart = (one - other).abs().max().item()
    words = "largest difference of a weight from AdamW's after 20 steps, rho = 1"
    run.at_most(words, apart, 1e-6, part="check")


def in_the_budget(run: ProofRun) -> None:
    """Bytes of state at each of 60 steps, switches among them, against the ledger's."""
    budget = GaLore.value(rank=QUICK.width // 4)
    value = run.contender(
        _frugal(2), null=AdamW.value(betas=BETAS), null_is="AdamW in FRUGAL's place"
    )
    model = create(QUICK.model, seed=0)
    at = OptimizerQuery(trained_shapes(model))
    said = value.ledger(at).bytes("optimizer")
    figure = run.figure(
        "bytes of state in the largest round, over GaLore's",
        method=said,
        baseline=budget.ledger(at).bytes("optimizer"),
    )
    run.at_most("bytes of state, of GaLore's", figure.ratio, 1.0)
    optimizer = value.bind(optimizer_groups(model, learning_rate=1e-3, weight_decay=0.0))
    most = 0
    for step in range(60):
        for name, parameter in model.named_parameters():
            parameter.grad = normal_(torch.empty_like(parameter), seed=0, name=name, step=step % 3)
        optimizer.step()
        most = max(most, bytes_by_kind(model, optimizer)["optimizer"])
    run.at_most(
        "bytes by which the ledger is off the most state", abs(most - said), 0, part="check"
    )


def _frugal(gap: int, **fields: object) -> OptimizerMethod:
    given = {"density": DENSITY, "order": "mirror", "update_gap": gap, "betas": BETAS} | fields
    return FRUGAL.value(**given)


def half_of_the_gap(run: ProofRun) -> None:
    """Held-out loss of a character model between GaLore's and AdamW's."""
    size = FULL if run.full else QUICK
    run.seeds = (0, 1, 2, 3, 4) if run.full else (0, 1)
    sweep, gap = text_sweep(run), size.steps // (20 if run.full else 3)
    galore = Plain(GaLore.value(rank=size.width // 4, update_gap=size.steps // 20, betas=BETAS))
    rates = FULL_GALORE_RATES if run.full else GALORE_RATES
    theirs = sweep.best("GaLore", galore, rates, baseline=True)
    adamw = AdamW.value(betas=BETAS)

    def best(name: str, value: OptimizerMethod) -> tuple[Swept[TextResult], float]:
        """The better of both: matrices at a quarter of the rate, and in full proofs alike."""
        baseline = value == adamw
        found = [(sweep.best(name, Plain(value, QUARTER), RATES, baseline=baseline), QUARTER)]
        if run.full:
            alike = sweep.best(f"{name}, one rate", Plain(value), ALIKE_RATES, baseline=baseline)
            found.append((alike, 1.0))
        return min(found, key=lambda each: each[0].outcomes[0].loss)

    full, _ = best("AdamW", adamw)
    value = run.contender(
        _frugal(gap),
        null=_frugal(gap, outside="nothing"),
        null_is="nothing outside of the part, which is BAdam",
    )
    ours, part = best("FRUGAL", value)
    _note(run, "GaLore", ours, theirs)
    _note(run, "AdamW", ours, full)
    gaps = [one - two for one, two in zip(theirs.each("loss"), full.each("loss"), strict=True)]
    gained = [one - two for one, two in zip(theirs.each("loss"), ours.each("loss"), strict=True)]
    mean, spread = statistics.fmean(gaps), statistics.stdev(gaps)
    run.figure(
        "GaLore's loss above AdamW's (nats), and its deviation", method=mean, baseline=spread
    )
    run.at_least("GaLore's gap to AdamW, in deviations over seeds", mean / max(spread, 1e-9), 2)
    closed = statistics.fmean(gained) / mean if mean > 0 else -math.inf
    run.at_least("part of GaLore's gap to AdamW that is closed", closed, 0.5)
    each = ratios(ours.each("loss"), theirs.each("loss"))
    run.against("GaLore in as many bytes", "held-out loss", each)
    if run.full:
        for name, fields in (
            ("columns", {"part": "columns"}),
            ("singular vectors", {"part": "svd"}),
            ("nothing outside", {"outside": "nothing"}),
            ("signs alone", {"density": 0.0}),
        ):
            arm = Plain(_frugal(gap, **fields), part)
            _note(run, f"that with {name}", ours, sweep.at(name, arm, ours.learning_rate))


def _note(run: ProofRun, name: str, ours: Swept[TextResult], theirs: Swept[TextResult]) -> None:
    for words, figure in (("held-out loss (nats)", "loss"), ("bytes of state", "state_bytes")):
        run.figure(f"{words}, over {name}", method=ours.mean(figure), baseline=theirs.mean(figure))
