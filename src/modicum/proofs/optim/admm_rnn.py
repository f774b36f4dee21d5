"""The proof of ADMMiRNN: delayed recall solved, how many settings solve it, digits by rows.

A net must say at the end which class its first input was. It is judged by its own forward pass over
sequences that it has not seen; how well constraints hold says nothing, as weights that fit the
variables need not fit the net. "Solved" is 99 % of these. The share of settings that solve it is
that of eight pairs (mu, rho), and of eight learning rates of SGD through time over the same range
of three orders. Both have as many sweeps as updates.

SGD at its best rate solves the short task too, and Adam both; only the share is the method's. As
nothing of the claim stands here, Adam in the method's place is what a null run must find. No image
set larger than scikit-learn's 8x8 digits, and no text, where the paper's curves are from.
"""

from __future__ import annotations

import torch

from modicum.optim import ADMMRNN
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep
from modicum.proofs.optim.recall_bench import (
    ADAM_RATES,
    PAIRS,
    SGD_RATES,
    SOLVED,
    RecallBench,
    RecallResult,
    Train,
    by_admm,
    through_time,
)
from modicum.tasks.sequences import SequenceClasses

SWEEPS, EACH = 400, 10
LENGTH = 12
SOLVES = through_time(torch.optim.Adam, 1e-3, SWEEPS)  # recall of any length here


def prove(run: ProofRun) -> None:
    """The short task, the share of settings that solve the long one, digits next to Adam."""
    seeds = (0, 1, 2) if run.full else (0,)
    run.seeds = seeds
    short(run, seeds)
    for length in (25, 50) if run.full else (25,):
        shares(run, length)
    digits(run, seeds)


def recall(length: int, seed: int = 0) -> RecallBench:
    """Four classes, 256 sequences, a state of 16."""
    asked = SequenceClasses(length=length, sequences=256, held_out=256, width=16)
    return RecallBench(asked, seed)


def admm(mu: float = 1.0, rho: float = 30.0, sweeps: int = SWEEPS) -> Train:
    """So many sweeps, in updates of ten."""
    return by_admm(ADMMRNN(mu=mu, rho=rho, iterations=EACH), sweeps // EACH)


def short(run: ProofRun, seeds: tuple[int, ...]) -> None:
    """Held-out accuracy at twelve steps."""
    head = through_time(torch.optim.Adam, 3e-2, SWEEPS, only_head=True)
    contender = run.contender(
        admm(),
        null=head,
        null_is="an output layer on a recurrent layer that stays as it begins",
        planted=SOLVES,
    )
    found, first = [], []
    for seed in seeds:
        run.progress(f"recall over {LENGTH} steps, seed {seed}")
        found.append(recall(LENGTH, seed).result(contender).accuracy)
        first.append(recall(LENGTH, seed).result(head).accuracy)
    mean, base = (sum(each) / len(each) for each in (found, first))
    run.figure(
        f"held-out accuracy at T = {LENGTH}; an output layer alone", method=mean, baseline=base
    )
    run.at_least(
        f"held-out accuracy at T = {LENGTH} after {SWEEPS} iterations", mean, SOLVED, seeds=found
    )


def shares(run: ProofRun, length: int) -> None:
    """How many of each side's settings solve the task, and how far weights grow."""
    pairs = PAIRS if run.full else PAIRS[2:4]
    rates = SGD_RATES if run.full else SGD_RATES[3:5]
    mine = {f"mu {mu}, rho {rho}": admm(mu, rho) for mu, rho in pairs}
    theirs = {f"SGD at {rate}": through_time(torch.optim.SGD, rate, SWEEPS) for rate in rates}
    arms = run.contender(
        mine,
        null=theirs,
        null_is="SGD's rates instead of the pairs",
        planted=dict.fromkeys(mine, SOLVES),
    )
    sweep: Sweep[str, RecallResult] = Sweep(
        run,
        lambda arm, rate, seed: recall(length).result(theirs[f"SGD at {rate}"]),
        lambda result: 1 - result.accuracy,
        shared={"bench": "recall", "asked": recall(length), "updates": SWEEPS},
        kind=RecallResult,
    )
    name = f"recall over {length} steps"
    found = {"SGD": [sweep.outcome(f"{name}, SGD", "SGD", rate, 0, True) for rate in rates]}
    found["method"] = []
    for own, train in arms.items():
        run.progress(f"{name}, {own}")
        found["method"].append(recall(length).result(train))
    solved = {
        side: sum(each.accuracy >= SOLVED for each in results) / len(results)
        for side, results in found.items()
    }
    growth = {side: max(each.growth for each in results) for side, results in found.items()}
    words = f"share of settings that solve T = {length}"
    run.figure(words, method=solved["method"], baseline=solved["SGD"])
    run.figure(
        "largest growth of the weights' norm", method=growth["method"], baseline=growth["SGD"]
    )
    run.at_least(f"{words}, minus SGD's", solved["method"] - solved["SGD"], 1 / len(pairs))


def digits(run: ProofRun, seeds: tuple[int, ...]) -> None:
    """Errors on digits row by row, next to Adam through time at the best of its rates."""
    rates, updates = (ADAM_RATES, 300) if run.full else (ADAM_RATES[2:4], 100)
    asked = SequenceClasses(data="digits", held_out=397 if run.full else 1297, width=32)

    def errors(train: Train, seed: int) -> float:
        return 1 - RecallBench(asked, seed).result(train).accuracy

    def by_adam(arm: str, rate: float, seed: int) -> RecallResult:
        return RecallBench(asked, seed).result(through_time(torch.optim.Adam, rate, updates))

    sweep: Sweep[str, RecallResult] = Sweep(
        run,
        by_adam,
        lambda found: 1 - found.accuracy,
        chosen_by="first",
        shared={"bench": "digits by rows", "asked": asked, "updates": updates},
        kind=RecallResult,
    )
    adam = sweep.best("digits by rows, Adam", "Adam", rates, baseline=True)
    contender = run.contender(
        admm(sweeps=updates),
        null=through_time(torch.optim.SGD, 1e-3, updates),
        null_is="SGD at a rate of 0.001 in the method's place",
        planted=through_time(torch.optim.Adam, adam.learning_rate, updates),
    )
    pairs = []
    for seed, theirs in zip(seeds, adam.each("accuracy"), strict=True):
        run.progress(f"digits by rows, seed {seed}")
        pairs.append((errors(contender, seed), 1 - theirs))
    own, other = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    run.figure("errors on held-out digits by rows; Adam", method=own, baseline=other)
    run.at_most("errors on held-out digits, above Adam's", own - other, 0.02, part="check")
    run.against(
        "Adam through time, at the best of its rates",
        "errors on held-out digits by rows",
        [(mine + 1e-3) / (adams + 1e-3) for mine, adams in pairs],
    )
