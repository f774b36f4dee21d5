"""The proof of LoRA-FA: what it keeps for the backward pass, and what freezing A costs.

Saved bytes are counted on four decoder blocks of width 256, where all linear layers are adapted.
The floor is what frozen blocks keep for gradients to flow through them, so LoRA over the floor is
the most that any adapter can save there: 1.36 of saved bytes. The paper's 1.4 of total memory is
that of other models, ranks and lengths, and of a GPU. Quality is compared on the permutations at
twice LoRA's rank, which has about as many trained parameters, each side at its best rate.

Reduced: the quick run has a smaller decoder, 2 seeds and 2 learning rates where the full one has 3
and 5. Runs on a GPU are not made here.
"""

from __future__ import annotations

import torch

from modicum.adapters import LoRA, LoRAFA
from modicum.proofs.adapters.activation_bench import ActivationBench
from modicum.proofs.adapters.peft_lora_fa import STEPS, differences
from modicum.proofs.adapters.permutation_bench import PermutationBench
from modicum.proofs.base import ProofRun, ratios

RATES = (3e-3, 1e-2, 2e-2, 3e-2, 6e-2)
QUICK_RATES = (1e-2, 3e-2)
RANK, LOW, HIGH = 16, 8, 128


def prove(run: ProofRun) -> None:
    """Saved bytes, then PEFT's updates, then held-out losses."""
    saved_activations(run)
    same_as_peft(run)
    nearly_lora(run)


def saved_activations(run: ProofRun) -> None:
    """Bytes that autograd keeps, over the frozen floor and over LoRA's."""
    run.progress("counting saved bytes")
    bench, lora = ActivationBench(), LoRA(rank=RANK)
    value = run.contender(LoRAFA(rank=RANK), null=lora, null_is="LoRA in LoRA-FA's place")
    mine, theirs = bench.kept(value), bench.kept(lora)
    run.figure(
        "saved bytes, rank 16", method=mine, baseline=theirs, claimed="1.4x less of total memory"
    )
    run.figure("saved bytes over the frozen floor's", method=mine, baseline=bench.floor)
    run.at_most("saved bytes over the frozen floor's", mine / bench.floor, 1.05)
    run.at_least("LoRA's saved bytes over its own", theirs / mine, 1.25)
    grown = bench.kept(value.with_fields(rank=HIGH)) - bench.kept(value.with_fields(rank=LOW))
    thin = 4 * bench.positions * (HIGH - LOW) * bench.sites(value)
    sentence = "saved bytes from rank 8 to 128 over those of the thin products"
    run.at_most(sentence, grown / thin, 1.001, part="check")
    dropped = value.with_fields(dropout=0.05)
    kept = bench.kept(dropped) / bench.floor
    run.figure("saved bytes with dropout, over the frozen floor's", method=kept, baseline=1.0)
    half = ActivationBench(dtype=torch.bfloat16)
    run.figure("saved bytes in bf16", method=half.kept(value), baseline=half.kept(lora))


def same_as_peft(run: ProofRun) -> None:
    """The same losses as PEFT's LoRA with its LoRA-FA optimizer, whose product is set to fp32."""
    run.progress("comparing with peft")
    run.library("peft", "hf")
    correct = run.contender(True, null=False, null_is="B's gradient uncorrected")
    sentence = f"largest difference of a loss from PEFT's in {STEPS} steps"
    run.at_most(sentence, differences(correct=correct).loss, 1e-4, part="check")


def nearly_lora(run: ProofRun) -> None:
    """Held-out loss at twice LoRA's rank."""
    bench, rank = PermutationBench(run), 4
    value = run.contender(
        LoRAFA(rank=2 * rank), null=LoRAFA(rank=1), null_is="a frozen A of one row"
    )
    mine = bench.best(value, RATES if run.full else QUICK_RATES)
    lora = bench.best(LoRA(rank=rank), None if run.full else QUICK_RATES, baseline=True)
    for name in ("excess", "trained", "state_bytes", "peak_bytes"):
        run.figure(
            f"{name}, LoRA of half the rank", method=mine.mean(name), baseline=lora.mean(name)
        )
    above = [a - b for a, b in zip(mine.each("excess"), lora.each("excess"), strict=True)]
    sentence = "held-out loss above that of LoRA of half the rank (nats)"
    run.at_most(sentence, mine.mean("excess") - lora.mean("excess"), 0.01, seeds=above)
    each = ratios(mine.each("excess"), lora.each("excess"))
    run.against("LoRA of half the rank", "held-out loss above the floor", each)
