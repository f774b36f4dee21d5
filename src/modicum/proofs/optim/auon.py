"""The proof of AuON: what it spends, what it is, and where it stands between SGD, AdamW and Muon.

AuON sends two numbers of a sharded matrix where Muon sends its gradient, and with one step of
Newton-Schulz it takes a fifth of Muon's products. Without such steps it is normalized momentum SGD,
to a factor that is 1 but for one part in the number of elements; so the loss is that of normalized
momentum SGD, which this proof says. Losses are those of a character model, each side at the best of
its own learning rates.

Reduced: 0.2 million parameters and a third of a token for each, instead of a model of width 512.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery, TrainedParameter
from modicum.core.random import normal_
from modicum.optim import AuON, Muon
from modicum.optim.auon import AuonMode
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.distances import worst
from modicum.proofs.optim.data_speed_up import ADAMW, AgainstAdamW, TunedArm
from modicum.proofs.optim.text_bench import Plain

# Frobenius norms of steps without Newton-Schulz; with it singular values, as Muon's.
PLAIN_RATES = (0.1, 0.2, 0.4)
HYBRID_RATES = (2e-2, 4e-2, 8e-2)
LARGE = TrainedParameter("w", (2048, 2048), "matrix")


def prove(run: ProofRun) -> None:
    """The wire, the products, the authors' updates, the loss with one step and without."""
    little_on_the_wire(run)
    few_products(run)
    as_the_authors(run)
    if run.full:
        as_fast(run)
    losses(run)


def little_on_the_wire(run: ProofRun) -> None:
    """Bytes that ranks exchange for a sharded matrix, against Muon's gathered gradient."""
    at = OptimizerQuery((LARGE,), shards=2)
    value = run.contender(AuON.value(), null=Muon.value(), null_is="Muon in its place")
    sent, gathered = (sum(w.bytes for w in v.ledger(at).wire) for v in (value, Muon.value()))
    run.figure("bytes on the wire of a matrix of 2048 x 2048", method=sent, baseline=gathered)
    run.at_most("bytes on the wire of a matrix", sent, 8)


def few_products(run: ProofRun) -> None:
    """Operations of products with one step of Newton-Schulz, against Muon's five."""
    at = OptimizerQuery((LARGE,))
    value = run.contender(
        AuON.value(newton_schulz_steps=1), null=Muon.value(), null_is="Muon in its place"
    )
    one, five = (sum(w.flops for w in v.ledger(at).work) for v in (value, Muon.value()))
    figure = run.figure("operations of products of 2048 x 2048", method=one, baseline=five)
    run.at_most("operations of products with one step, of Muon's", figure.ratio, 0.25)


def as_the_authors(run: ProofRun) -> None:
    """Twenty steps in float64 against both forms of the algorithm, written out with cosh."""
    rate, mu, decay = 0.02, 0.95, 0.1
    brakes = run.contender(1.0, null=2.0, null_is="twice the argument of cosh")
    apart = 0.0
    both: tuple[tuple[AuonMode, float], ...] = (("paper", 1.0), ("code", 1.5))
    for mode, gamma in both:
        weight = nn.Parameter(normal_(torch.empty(24, 16).double(), seed=0, name="weight"))
        optimizer = AuON([weight], lr=rate, momentum=mu, mode=mode, weight_decay=decay)
        theirs, moment = weight.detach().clone(), torch.zeros(24, 16).double()
        for step in range(20):
            gradient = normal_(torch.empty(24, 16).double(), seed=0, name="gradient", step=step)
            weight.grad = gradient.clone()
            optimizer.step()
            moment = mu * moment + (1 - mu) * gradient
            ahead = (1 - mu) * gradient + mu * moment
            x = ahead / (ahead.norm() + 1e-7)
            r = (brakes * gamma * x).cosh().square().mean().sqrt() + 1e-8
            update = (x if mode == "paper" else ahead) / r
            theirs = (1 - rate * decay) * theirs - rate * update
        apart = worst((apart, (weight.detach() - theirs).abs().max().item()))
    words = "largest difference of a weight from the authors' after 20 steps"
    run.at_most(words, apart, 1e-8, part="check")


def as_fast(run: ProofRun) -> None:
    """Seconds of a step in turns with momentum SGD's."""
    shape = (1024, 1024)
    steps = run.contender(0, null=5, null_is="five steps of Newton-Schulz")
    ours, theirs = (nn.Parameter(normal_(torch.empty(shape), seed=0, name="w")) for _ in range(2))
    ours.grad, theirs.grad = ours.detach().clone(), theirs.detach().clone()
    optimizer = AuON([ours], lr=1e-4, newton_schulz_steps=steps)
    sgd = torch.optim.SGD([theirs], lr=1e-4, momentum=0.95, nesterov=True, foreach=False)
    times = in_turns({"ours": optimizer.step, "SGD": sgd.step}, 30, warm_up=3)
    ratio = times["ours"].median / times["SGD"].median
    run.at_most("time of a step, of momentum SGD's", ratio, 1.2)


def losses(run: ProofRun) -> None:
    """Held-out losses against tuned AdamW's: with one step as good, without comparable."""
    bench = AgainstAdamW(run)
    hybrid: list[TunedArm] = [
        ("one step of Newton-Schulz", Plain(AuON.value(newton_schulz_steps=1, adam_rate=0.2)),
         HYBRID_RATES)
    ]  # fmt: skip
    plain: list[TunedArm] = [("AuON", Plain(AuON.value(adam_rate=0.02)), PLAIN_RATES)]
    adam: list[TunedArm] = [("AdamW", Plain(ADAMW), ())]
    words = "AdamW with half of the tokens in its place"
    chosen, has = run.contender((hybrid, 1.0), null=(adam, 0.5), null_is=words)
    said = "with one Newton-Schulz step less loss than AdamW: 0.0422 and 0.0686"
    found = bench.speed_up("one step", chosen, claimed=said, adamw_has=has)
    run.at_most(
        "held-out loss with one step, of AdamW's", statistics.fmean(found.losses), 1.01,
        seeds=found.losses,
    )  # fmt: skip
    chosen, has = run.contender((plain, 1.0), null=(adam, 0.5), null_is=words)
    said = "comparable to AdamW; by its own table 0.4305 and 0.0686"
    found = bench.speed_up("no step", chosen, claimed=said, adamw_has=has)
    run.at_most(
        "held-out loss without a step, of AdamW's", statistics.fmean(found.losses), 1.01,
        seeds=found.losses,
    )  # fmt: skip
    run.against("AdamW, tuned alike", "held-out loss at equal tokens", found.losses)
