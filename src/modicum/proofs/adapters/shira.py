"""The proof of SHiRA: LoRA's loss at as many trained numbers, where the mask looks at gradients.

A small decoder learns new permutations (`permutation_bench.py`), each side at its best learning
rate. The mask of |W G| is examined; its null is as many entries on the diagonal and in few rows: a
random mask did as well as |W G| in the quick run, each at its own best rate, so the criterion that
it does worse is missed. In the full run the other masks are there too, at the numbers of a LoRA of
rank 1 and of rank 4.

What the layers keep for the backward pass is counted (`activation_bench.py`), and how often two
adapters meet: of random masks of 1 % the share of zeros in S1^T S2 has a closed form, (1 - q^2)^m.
The paper's tasks, with LLaMA of 7 billion, are out of reach; how fast adapters are switched is
measured elsewhere.

Reduced: the quick run has two seeds, a smaller decoder, on which losses are smaller and so is what
they may be apart, and the smaller of the two sizes.
"""

from __future__ import annotations

import torch

from modicum.adapters.lora import LoRA
from modicum.adapters.shira import Drawn, SHiRA
from modicum.proofs.adapters.activation_bench import ActivationBench
from modicum.proofs.adapters.permutation_bench import PermutationBench
from modicum.proofs.base import ProofRun, ratios

# The sweep tries further rates where the best lies at an edge.
RATES = (3e-2, 1e-1, 2e-1)
DENSITY, WIDTH = 0.01, 1024


def prove(run: ProofRun) -> None:
    """Loss, activations, and how often two adapters meet."""
    loss(run)
    saved(run)
    meetings(run)


def loss(run: ProofRun) -> None:
    """Held-out loss against a random mask, and against LoRA of as many numbers."""
    bench = PermutationBench(run)
    for rank, bar in ((1, 0.02), (4, 0.005)) if run.full else ((1, 0.01),):
        drawn = SHiRA(rank=rank)
        value = run.contender(
            SHiRA(rank=rank, mask="snip"),
            null=SHiRA(rank=rank, mask="struct"),
            null_is="the diagonal and few rows",
        )
        mine, lora = bench.best(value, RATES), bench.best(LoRA(rank=rank), baseline=True)
        random = bench.best(drawn, RATES)
        for name, other in ((f"LoRA of rank {rank}", lora), ("a random mask", random)):
            run.figure(
                f"held-out loss above the floor (nats), rank {rank}, against {name}",
                method=mine.mean("excess"),
                baseline=other.mean("excess"),
                claimed="better than LoRA" if other is lora else "",
            )
            rates = mine.learning_rate, other.learning_rate
            run.figure(f"learning rate, against {name}", method=rates[0], baseline=rates[1])
        numbers = mine.mean("trained") / lora.mean("trained")
        run.at_most("trained numbers, of LoRA's", numbers, 1.0, part="check")
        for mask in ("magnitude", "gradient") if run.full else ():
            other = bench.best(SHiRA(rank=rank, mask=mask), RATES)
            label = f"the same, against the mask {mask}, rank {rank}"
            run.figure(label, method=mine.mean("excess"), baseline=other.mean("excess"))
        pairs = zip(mine.each("excess"), lora.each("excess"), strict=True)
        above = [one - two for one, two in pairs]
        mean = sum(above) / len(above)
        run.at_most(f"loss above LoRA's of rank {rank} (nats)", mean, bar, seeds=above)
        each = ratios(mine.each("excess"), random.each("excess"))
        share = mine.mean("excess") / random.mean("excess")
        run.at_most(f"loss, of a random mask's, rank {rank}", share, 0.95, seeds=each)
        if rank == 1 and run.full:  # two seeds decide nothing between these two
            each = ratios(mine.each("excess"), lora.each("excess"))
            run.against("LoRA of as many numbers", "loss above the floor", each)


def saved(run: ProofRun) -> None:
    """Bytes kept for the backward pass: a patched layer keeps its input, and no weight."""
    bench = ActivationBench()
    mine, lora = (bench.kept(value) for value in (SHiRA(rank=16), LoRA(rank=16)))
    found = run.figure("bytes kept for the backward pass, rank 16", method=mine, baseline=lora)
    run.at_most("kept for the backward pass, of LoRA's", found.ratio, 1.0, part="check")


def meetings(run: ProofRun) -> None:
    """How many entries of S1^T S2 are zero, of two random masks with a hundredth of the entries."""
    count = round(DENSITY * WIDTH * WIDTH)
    draw = Drawn(WIDTH, WIDTH, count, spaced=False)
    one, two = (torch.zeros(WIDTH * WIDTH) for _ in range(2))
    one[draw(0, "one").long()] = 1
    two[draw(0, "two").long()] = 1
    product = one.view(WIDTH, WIDTH).T @ two.view(WIDTH, WIDTH)
    found = float((product == 0).float().mean())
    expected = (1 - DENSITY**2) ** WIDTH
    run.figure("share of zeros in S1^T S2, width 1024", method=found, baseline=expected)
    off = abs(found / expected - 1)
    run.at_most("that share's distance from (1 - q^2)^m", off, 0.01, part="check")
