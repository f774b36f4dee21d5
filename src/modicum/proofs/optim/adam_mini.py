"""The proof of Adam-mini: half of AdamW's state, and its loss within a percent.

Bytes are those of a decoder's shapes, reported by the ledger, which is checked on a real state. The
loss is that of a character model, both sides at the best of their own learning rates.

Reduced: 0.2 million parameters and a third of a token for each, instead of 130 million with 20.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

from modicum.core.contracts.ledger import OptimizerQuery
from modicum.core.contracts.parameters import optimizer_groups, trained_shapes
from modicum.core.machine.memory import bytes_by_kind
from modicum.core.random import normal_
from modicum.models import create
from modicum.optim import AdamMini
from modicum.proofs.base import ProofRun
from modicum.proofs.optim.as_good import APART_RATES, RATES
from modicum.proofs.optim.data_speed_up import ADAMW, QUICK, AgainstAdamW, TunedArm
from modicum.proofs.optim.text_bench import Plain

BETAS = (0.9, 0.95)
NULL = "AdamW in its place"


def prove(run: ProofRun) -> None:
    """Bytes, the authors' updates, the loss."""
    half_the_state(run)
    as_the_authors(run)
    as_low_a_loss(run)


def half_the_state(run: ProofRun) -> None:
    """Bytes of state of a decoder's shapes, against AdamW's; and of a real state."""
    value = run.contender(AdamMini.value(betas=BETAS), null=ADAMW, null_is=NULL)
    model = create(QUICK.model, seed=0)
    at = OptimizerQuery(trained_shapes(model))
    kept, adam = (each.ledger(at).bytes("optimizer") for each in (value, ADAMW))
    figure = run.figure("bytes of state", method=kept, baseline=adam, claimed="half")
    run.at_most("bytes of state, of AdamW's", figure.ratio, 0.51)
    optimizer = value.bind(optimizer_groups(model, learning_rate=1e-3, weight_decay=0.0))
    for name, parameter in model.named_parameters():
        parameter.grad = normal_(torch.empty_like(parameter), seed=0, name=name)
    optimizer.step()
    off = abs(bytes_by_kind(model, optimizer)["optimizer"] - kept)
    run.at_most("bytes by which the ledger is off a real state", off, 0, part="check")


def as_the_authors(run: ProofRun) -> None:
    """Twenty steps in float64 of a matrix of three heads against algorithm 3, written out."""
    (first, second), rate, epsilon, decay = BETAS, 0.01, 1e-8, 0.1
    blocks = run.contender(3, null=24, null_is="a second moment for each row")
    weight = nn.Parameter(normal_(torch.empty(24, 16).double(), seed=0, name="weight"))
    group = {"params": [weight], "names": ["w"], "classes": ["matrix"], "heads": [3]}
    optimizer = AdamMini([group], lr=rate, betas=BETAS, epsilon=epsilon, weight_decay=decay)
    theirs = weight.detach().clone()
    mean, square = torch.zeros_like(theirs), torch.zeros(blocks, 1).double()
    for step in range(1, 21):
        gradient = normal_(torch.empty(24, 16).double(), seed=0, name="gradient", step=step)
        # Rows of unlike sizes, as rows of heads have them.
        gradient *= torch.arange(1, 25)[:, None]
        weight.grad = gradient.clone()
        optimizer.step()
        mean = first * mean + (1 - first) * gradient
        each = gradient.reshape(blocks, -1).square().mean(1, keepdim=True)
        square = second * square + (1 - second) * each
        root = (square / (1 - second**step)).sqrt() + epsilon
        update = (mean.reshape(blocks, -1) / (1 - first**step) / root).view(24, 16)
        theirs = theirs * (1 - rate * decay) - rate * update
    apart = (weight.detach() - theirs).abs().max().item()
    words = "largest difference of a weight from the authors' after 20 steps"
    run.at_most(words, apart, 1e-10, part="check")


def as_low_a_loss(run: ProofRun) -> None:
    """The loss at the same tokens, and the data speed-up over AdamW with its interval."""
    bench = AgainstAdamW(run)
    value = AdamMini.value(betas=BETAS)
    arms: list[TunedArm] = [("Adam-mini", Plain(value), RATES)]
    if run.full:
        arms.append(("Adam-mini, matrices a quarter", Plain(value, 0.25), APART_RATES))
    chosen, has = run.contender(
        (arms, 1.0),
        null=([("AdamW", Plain(ADAMW), ())], 0.5),
        null_is="AdamW with half of the tokens in its place",
    )
    found = bench.speed_up("Adam-mini", chosen, claimed="on par with AdamW", adamw_has=has)
    words = "held-out loss, of AdamW's"
    run.at_most(words, statistics.fmean(found.losses), 1.01, seeds=found.losses)
    run.against("AdamW, tuned alike", "held-out loss at equal tokens", found.losses)
