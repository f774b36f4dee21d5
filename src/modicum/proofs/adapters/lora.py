"""The proof of LoRA: it is PEFT's, and nearly as good as full tuning at a little of its state.

Both parts are measured in one run. The paper's figures are GPT-3's, where the matrices are a
hundred times wider than here and the rank is as small; what carries over is that trained
parameters, gradients and optimizer state shrink together while the loss does not grow.
"""

from __future__ import annotations

from modicum.adapters.lora import LoRA
from modicum.proofs.adapters.peft_twin import same_as_peft
from modicum.proofs.adapters.permutation_bench import FullTuning, PermutationBench
from modicum.proofs.base import ProofRun

RANK, ALPHA = 4, 16.0


def prove(run: ProofRun) -> None:
    """Compare with PEFT, then with full fine-tuning at equal steps."""
    equal_to_peft(run)
    nearly_full_tuning(run)


def equal_to_peft(run: ProofRun) -> None:
    """Same model, factors and data: logits and 20 losses of AdamW equal PEFT's."""
    value = run.contender(
        LoRA(rank=RANK, alpha=ALPHA),
        null=LoRA(rank=RANK, alpha=ALPHA, rank_stabilized=True),
        null_is="the update scaled by alpha / sqrt(rank) instead of alpha / rank",
    )
    same_as_peft(run, value, {"r": RANK, "lora_alpha": ALPHA})


def nearly_full_tuning(run: ProofRun) -> None:
    """Loss, parameters and bytes against full fine-tuning at equal steps, each at its best rate."""
    testbed = PermutationBench(run)
    full = testbed.best(FullTuning())
    for rank in (1, 4) if run.full else ():
        label = f"held-out loss above the floor, rank {rank} (nats)"
        excess = testbed.best(LoRA(rank=rank)).mean("excess")
        run.figure(label, method=excess, baseline=full.mean("excess"))
    null_is = "full fine-tuning in LoRA's place"
    best = testbed.best(run.contender(LoRA(rank=2), null=FullTuning(), null_is=null_is))
    floor = testbed.size.floor
    loss = run.figure(
        "held-out loss (nats)",
        method=floor + best.mean("excess"),
        baseline=floor + full.mean("excess"),
        claimed="as good as full fine-tuning or better (GPT-3 175B)",
    )
    trained = run.figure(
        "trained parameters",
        method=best.mean("trained"),
        baseline=full.mean("trained"),
        claimed="10,000 times fewer (GPT-3 175B)",
    )
    state = run.figure(
        "gradient and optimizer bytes",
        method=best.mean("state_bytes"),
        baseline=full.mean("state_bytes"),
    )
    run.figure("learning rate", method=best.learning_rate, baseline=full.learning_rate)
    run.figure(
        "peak tensor bytes of a step",
        method=best.mean("peak_bytes"),
        baseline=full.mean("peak_bytes"),
        claimed="a third (GPT-3 175B)",
    )
    above = [
        one - other for one, other in zip(best.each("excess"), full.each("excess"), strict=True)
    ]
    run.at_most("loss above full tuning's (nats)", loss.method - loss.baseline, 0.01, seeds=above)
    run.at_most("trained parameters, of full tuning's", trained.ratio, 0.06)
    run.at_most("gradient and optimizer bytes, of full tuning's", state.ratio, 0.06)
