"""The proof of PiSSA: it learns in fewer steps than LoRA, and quantizing its residual loses less.

Speed is measured in the lab (`digits_bench.py`), each side with the learning rate at which its
loss is lowest after 100 steps. The paper's own tasks (GSM8K with 7B models) are out of reach; what
is compared is the same thing, the loss after equal steps. Against LoRA of the same rank counts what
comes of all steps: errors on images that nobody has seen.

Quantization is measured on 512 x 512 matrices as the paper does, by the nuclear norm of what is
lost: against the quantized weight alone (QLoRA), and LoftQ with as many rounds at equal rank.

Reduced: the quick run has 3 learning rates and 3 seeds where the full one has 5 and 10, and rank 16
where the full one has 16 and 64. A pretrained language model on a GPU is not run here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, PiSSA
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.truncated_svd import truncated_svd
from modicum.core.random import normal_
from modicum.proofs.adapters.digits_bench import (
    RATES,
    DigitsBench,
    losses_after,
    mean_losses,
    steps_to,
)
from modicum.proofs.base import ProofRun, ratios

RANK, STEP, WIDTH, ROUNDS = 4, 100, 512, 5
Reconstruct = Callable[[Tensor, int], Tensor]


def prove(run: ProofRun) -> None:
    """Compare with LoRA in speed, then with QLoRA and LoftQ in what quantization loses."""
    learns_faster(run)
    quantizes_better(run)


def learns_faster(run: ProofRun) -> None:
    """Steps to the loss that LoRA has after 100, and losses after 50, means over seeds."""
    lab = DigitsBench(run)
    run.seeds = tuple(range(10 if run.full else 3))
    rates = RATES if run.full else RATES[1:4]
    value = run.contender(PiSSA(rank=RANK), null=LoRA(rank=RANK), null_is="LoRA in PiSSA's place")
    mine = lab.fastest(value, STEP, rates)
    theirs = lab.fastest(LoRA(rank=RANK), STEP, rates, baseline=True)
    ours, baseline = mean_losses(mine), mean_losses(theirs)
    steps = run.figure(
        f"steps to LoRA's loss after {STEP}",
        method=steps_to(ours, baseline[STEP - 1]),
        baseline=STEP,
        claimed="converges faster (loss curves of 7B models)",
    )
    half = STEP // 2
    early = run.figure(
        f"training loss after {half} steps (nats)",
        method=ours[half - 1],
        baseline=baseline[half - 1],
    )
    run.figure("learning rate", method=mine.learning_rate, baseline=theirs.learning_rate)
    run.figure(
        "test accuracy after all steps",
        method=mine.mean("accuracy"),
        baseline=theirs.mean("accuracy"),
        claimed="72.9 % against 67.7 % (Mistral-7B, GSM8K)",
    )
    run.figure("trained parameters", method=mine.mean("trained"), baseline=theirs.mean("trained"))
    pairs = zip(mine.outcomes, losses_after(theirs, STEP), strict=True)
    each = [steps_to(curve.losses, loss) / STEP for curve, loss in pairs]
    run.at_most(f"steps to LoRA's loss after {STEP}, of these", steps.ratio, 0.8, seeds=each)
    each = ratios(losses_after(mine, half), losses_after(theirs, half))
    run.at_most(f"training loss after {half} steps, of LoRA's", early.ratio, 0.8, seeds=each)
    errors = "test errors after all steps, at the rates that are fastest"
    run.against("LoRA of the same rank", errors, ratios(mine.each("error"), theirs.each("error")))


def quantizes_better(run: ProofRun) -> None:
    """Nuclear norm of what four bits lose, on a decaying and on a spiked spectrum."""

    def pissa(rounds: int) -> Reconstruct:
        return lambda weight, rank: reconstructed(PiSSA(rank=rank, rounds=rounds), weight)

    one_shot = run.contender(pissa(1), null=plain, null_is="the quantized weight alone (QLoRA)")
    for spectrum, rank, weight in _weights(run):
        run.progress(f"quantizing, {spectrum} spectrum, rank {rank}")
        lost = run.figure(
            f"lost in NF4, one round, {spectrum} spectrum, rank {rank} (against QLoRA)",
            method=_lost(one_shot, weight, rank),
            baseline=_lost(plain, weight, rank),
            claimed="19 % less (LLaMA-2-7B, rank 128)",
        )
        run.at_most(f"lost of QLoRA's, {spectrum} spectrum, rank {rank}", lost.ratio, 0.9)
    iterated = run.contender(pissa(ROUNDS), null=loftq, null_is="LoftQ in PiSSA's place")
    for spectrum, rank, weight in _weights(run):
        run.progress(f"quantizing in rounds, {spectrum} spectrum, rank {rank}")
        lost = run.figure(
            f"lost in NF4, {ROUNDS} rounds, {spectrum} spectrum, rank {rank} (against LoftQ)",
            method=_lost(iterated, weight, rank),
            baseline=_lost(loftq, weight, rank),
            claimed="GSM8K 49.1 % against LoftQ's 40.7 % (LLaMA-2-7B)",
        )
        run.at_most(f"lost of LoftQ's, {spectrum} spectrum, rank {rank}", lost.ratio, 0.95)


def reconstructed(value: PiSSA, weight: Tensor) -> Tensor:
    """What a layer on a quantized base represents right after PiSSA is attached: [out, in]."""
    model = nn.Sequential(linear_form("nf4").from_dense(weight, None))
    value.attach(model, weights=lambda name: weight).merge(dense=torch.float32)
    return model.get_submodule("0").get_parameter("weight")


def plain(weight: Tensor, rank: int) -> Tensor:
    """The quantized weight alone: QLoRA's update is zero at first."""
    return linear_form("nf4").round_trip(weight)


def loftq(weight: Tensor, rank: int) -> Tensor:
    """Q + B A of LoftQ: Q = nf4(W - B A), then B A the best rank-r part of W - Q, in turn.

    Source: Li et al., arXiv 2310.08659, algorithm 1.
    """
    update = torch.zeros_like(weight)
    for _ in range(ROUNDS):
        held = linear_form("nf4").round_trip(weight - update)
        left, singular, right = truncated_svd(weight - held, rank)
        update = (left * singular) @ right
    return held + update


def _weights(run: ProofRun) -> list[tuple[str, int, Tensor]]:
    """The matrices: singular values that fall as 1 / sqrt(i), and 16 large ones over noise."""
    sides = [
        torch.linalg.qr(normal_(torch.empty(WIDTH, WIDTH), seed=0, name=name)).Q for name in "UV"
    ]
    decaying = (sides[0] / torch.arange(1, WIDTH + 1).sqrt()) @ sides[1].T
    noise = normal_(torch.empty(WIDTH, WIDTH), seed=0, name="noise", std=WIDTH**-0.5)
    spiked = noise + 8 * sides[0][:, :16] @ sides[1][:, :16].T
    ranks = (16, 64) if run.full else (16,)
    return [(n, r, w) for n, w in (("decaying", decaying), ("spiked", spiked)) for r in ranks]


def _lost(reconstruct: Reconstruct, weight: Tensor, rank: int) -> float:
    return torch.linalg.matrix_norm(reconstruct(weight, rank) - weight, ord="nuc").item()
