"""The proof of SoKA: more accurate than LoRA at no more numbers, in fewer steps.

In the lab (`digits_bench.py`) a network must change a lot: digits turned by a quarter. SoKA with
4 terms a layer has 5,120 trained numbers, LoRA of rank 4 has 5,376. Accuracy is compared with each
side at its most accurate rate, steps to LoRA's final loss with each side at the rate with the
lowest loss after half of them. PEFT's LoKr, one Kronecker product with a random start, is there
with as many numbers.

Which layers get the terms: 2 terms a layer against as many numbers handed out over the layers by
what the terms hold. The full run does that with 4 terms a layer too, where both end near a loss of
zero, and hands out at random.

A change of exactly rank 4 is shown too, of a 64 x 64 weight: LoRA wins there. In the full run a
change with a flat spectrum is next to it.

Reduced: the quick run has 2 seeds and 3 learning rates, the full one 5 and 6, and PiSSA. LLaMA-2-7B
is not run.
"""

from __future__ import annotations

import copy
import statistics
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.base import Adapter
from modicum.adapters.lora import LoRA
from modicum.adapters.pissa import PiSSA
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.adapters.soka import SoKA
from modicum.core.random import derive_seed, normal_
from modicum.proofs.adapters.digits_bench import (
    HIDDEN,
    RATES,
    STEPS,
    Curve,
    DigitsBench,
    losses_after,
    mean_losses,
    steps_to,
)
from modicum.proofs.adapters.randlora import WIDTH, best_low_rank, captured, targets
from modicum.proofs.base import ProofRun, ratios
from modicum.proofs.bench.sweep import Sweep, Swept

TERMS, LORA_RANK, TERM = 4, 4, 1280  # numbers of a term in each layer
# Of the full run; the quick one tries three around the best, and others where one is at an edge.
TERM_RATES = (1e-2, 2e-2, 3e-2, 4.5e-2, 6.5e-2, 1e-1)
QUICK_RATES, UNIFORM_RATES = (2e-2, 3e-2, 4.5e-2), (3e-2, 4.5e-2, 6.5e-2)
LOKR_RATES, SHARED_RATES = (4.5e-2, 6.5e-2, 9e-2), (6.5e-2, 1e-1, 1.5e-1)
HALF = STEPS // 2  # after which a side's loss says which of its rates is the fastest
# Of LoKr: kron of a 4 x 4 matrix and one of rank 15, 5,088 numbers.
LOKR: dict[str, Any] = {"r": 15, "alpha": 15, "decompose_factor": 4}


def prove(run: ProofRun) -> None:
    """Against LoRA, PiSSA and LoKr; how terms are handed out; changes that are given."""
    run.seeds = tuple(range(5 if run.full else 2))
    bench, lora = DigitsBench(run), LoRA(rank=LORA_RANK)
    asked: Adapter = SoKA(rank=TERMS)
    value = run.contender(asked, null=lora, null_is="LoRA in SoKA's place")
    lora_rates = RATES if run.full else RATES[2:]
    rates = lora_rates if value is lora else TERM_RATES if run.full else QUICK_RATES
    accuracy(run, bench, (value, lora), (rates, lora_rates))
    speed(run, bench, (value, lora), (rates, lora_rates))
    for terms in (2, 4) if run.full else (2,):
        handing_out(run, bench, terms)
    given_changes(run, value)


def accuracy(
    run: ProofRun,
    bench: DigitsBench,
    values: tuple[Adapter, Adapter],
    rates: tuple[tuple[float, ...], tuple[float, ...]],
) -> None:
    """On images that nobody has seen, each side at its most accurate rate."""
    mine = bench.most_accurate(values[0], rates[0])
    lora = bench.most_accurate(values[1], rates[1], baseline=True)
    others = {"LoRA": lora}
    if run.full:
        others["PiSSA"] = bench.most_accurate(PiSSA(rank=LORA_RANK), rates[1])
    for name, other in others.items():
        for figure in ("accuracy", "trained"):
            label = f"{figure}, against {name}"
            run.figure(label, method=mine.mean(figure), baseline=other.mean(figure))
    numbers = mine.mean("trained") / lora.mean("trained")
    run.at_most("trained numbers over LoRA's", numbers, 1.0, part="check")
    pairs = zip(mine.each("accuracy"), lora.each("accuracy"), strict=True)
    above = [one - other for one, other in pairs]
    run.at_least("accuracy above LoRA's", statistics.fmean(above), 0.02, seeds=above)
    each = ratios(mine.each("error"), lora.each("error"))
    run.against("LoRA of as many trained numbers", f"test errors after {STEPS} steps", each)


def speed(
    run: ProofRun,
    bench: DigitsBench,
    values: tuple[Adapter, Adapter],
    rates: tuple[tuple[float, ...], tuple[float, ...]],
) -> None:
    """Steps to LoRA's final loss, each side at its fastest rate."""
    mine = bench.fastest(values[0], HALF, rates[0])
    lora = bench.fastest(values[1], HALF, rates[1], baseline=True)
    lokr = _lokr(run, bench)
    last = mean_losses(lora)[-1]
    steps, of_lokr = (steps_to(mean_losses(swept), last) for swept in (mine, lokr))
    label = f"steps to LoRA's loss after {STEPS}"
    run.figure(label, method=steps, baseline=STEPS, claimed="faster convergence")
    run.figure("the same, against LoKr of PEFT", method=steps, baseline=of_lokr)
    for name, other in (("LoRA", lora), ("LoKr", lokr)):
        rate = mine.learning_rate, other.learning_rate
        run.figure(f"learning rate, against {name}", method=rate[0], baseline=rate[1])
    for figure in ("accuracy", "trained"):
        label = f"{figure}, against LoKr, at the fastest rates"
        run.figure(label, method=mine.mean(figure), baseline=lokr.mean(figure))
    early = STEPS // 4
    loss = run.figure(
        f"training loss after {early} steps (nats), against LoRA",
        method=mean_losses(mine)[early - 1],
        baseline=mean_losses(lora)[early - 1],
    )
    pairs = zip(mine.outcomes, losses_after(lora, STEPS), strict=True)
    each = [steps_to(curve.losses, loss) / STEPS for curve, loss in pairs]
    sentence = f"steps to LoRA's loss after {STEPS}, of these"
    run.at_most(sentence, steps / STEPS, 0.9, seeds=each)
    each = ratios(losses_after(mine, early), losses_after(lora, early))
    run.at_most(f"training loss after {early} steps, of LoRA's", loss.ratio, 0.8, seeds=each)
    sentence = "steps to LoRA's final loss, of those of LoKr"
    run.at_most(sentence, steps / of_lokr, 0.95)


def handing_out(run: ProofRun, bench: DigitsBench, terms: int) -> None:
    """The final loss with terms handed out over the layers, against `terms` each."""
    value = SoKA(rank=None, total=TERM * terms)
    shared = bench.fastest(value, STEPS, TERM_RATES if run.full else SHARED_RATES)
    rates = TERM_RATES if run.full else UNIFORM_RATES
    attached = value.with_fields(targets=HIDDEN).attach(copy.deepcopy(bench.base))
    for name, layer in attached.layers():
        count = len(layer.get_parameter("outer"))
        run.figure(f"terms handed out to layer {name}", method=count, baseline=terms)
    others = {f"{terms} terms a layer": bench.fastest(SoKA(rank=terms), STEPS, rates)}
    if run.full:
        random = RandomShares(rank=None, total=TERM * terms)
        others[f"as many at random, {terms} a layer"] = bench.fastest(random, STEPS, rates)
    for name, other in others.items():
        for figure in ("loss", "accuracy", "trained"):
            label = f"{figure}, handed out by the weights, against {name}"
            run.figure(label, method=shared.mean(figure), baseline=other.mean(figure))
        each = ratios(shared.each("loss"), other.each("loss"))
        over = shared.mean("loss") / other.mean("loss")
        sentence = f"final loss with terms handed out, of that with {name}"
        run.at_most(sentence, over, 1.0, part="check", seeds=each)


class RandomShares(SoKA):
    """SoKA whose terms are handed out at random: each next one to any layer that it still fits."""

    def prepare(self, context: PreparationContext) -> Preparation:
        generator = torch.Generator().manual_seed(derive_seed(context.seed, "shares"))
        shapes = {site.name: self.shape(site) for site in context.sites}
        ranks = dict.fromkeys(shapes, 1)
        left = (self.total or 0) - sum(shape.numbers for shape in shapes.values())
        while fits := [name for name, shape in shapes.items() if shape.numbers <= left]:
            name = fits[int(torch.randint(len(fits), (1,), generator=generator))]
            ranks[name] += 1
            left -= shapes[name].numbers
        return Preparation({name: {"rank": rank} for name, rank in ranks.items()})


def given_changes(run: ProofRun, value: Adapter) -> None:
    """The share that is captured of a change of a 64 x 64 weight, at 512 numbers each."""
    low = normal_(torch.empty(WIDTH, LORA_RANK), seed=0, name="low rank")
    other = normal_(torch.empty(LORA_RANK, WIDTH), seed=0, name="low rank, right")
    changes = {"rank 4": low @ other}
    if run.full:
        changes["a flat spectrum"] = targets()["a flat spectrum"]
    for name, change in changes.items():
        change = change * (WIDTH**0.5 / change.norm())
        found = _captured(run, f"fitting a change of {name}", value, change)
        lora = best_low_rank(change, LORA_RANK)
        run.figure(f"captured of a change of {name}", method=found, baseline=lora)


def _captured(run: ProofRun, name: str, value: Adapter, change: Tensor) -> float:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the weight of which it takes its start
        return captured(run, name, value, change)


def _lokr(run: ProofRun, bench: DigitsBench) -> Swept[Curve]:
    """PEFT's LoKr at its fastest rate."""
    peft = run.library("peft", "hf")

    def adapt(arm: str, rate: float, seed: int) -> Curve:
        model = copy.deepcopy(bench.base)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = peft.LoKrConfig(target_modules=list(HIDDEN), **LOKR)
            model = peft.inject_adapter_in_model(config, model)
        trained = [parameter for n, parameter in model.named_parameters() if "lokr_" in n]
        for parameter in set(model.parameters()) - set(trained):
            parameter.requires_grad_(False)
        return bench.fit(model, trained, rate, seed)

    sweep: Sweep[str, Curve] = Sweep(run, adapt, lambda curve: curve.losses[HALF - 1])
    return sweep.best("LoKr of PEFT", "lokr", TERM_RATES if run.full else LOKR_RATES)
