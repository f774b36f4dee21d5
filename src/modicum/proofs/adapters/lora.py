"""The proof of LoRA: it is PEFT's, and nearly as good as full tuning at a little of its state.

Both parts are measured in one run. The paper's figures are GPT-3's, where the matrices are a
hundred times wider than here and the rank is as small; what carries over is that trained
parameters, gradients and optimizer state shrink together while the loss does not grow.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.lora import LoRA
from modicum.proofs.adapters.permutation_bench import FullTuning, PermutationBench
from modicum.proofs.base import ProofRun

STEPS, RANK, ALPHA = 20, 4, 16.0


def prove(run: ProofRun) -> None:
    """Compare with PEFT, then with full fine-tuning at equal steps."""
    same_as_peft(run)
    nearly_full_tuning(run)


def same_as_peft(run: ProofRun) -> None:
    """Same model, factors and data: logits and 20 losses of AdamW equal PEFT's."""
    run.progress("comparing with peft")
    transformers, peft = run.library("transformers", "hf"), run.library("peft", "hf")
    value = run.contender(
        LoRA(rank=RANK, alpha=ALPHA),
        null=LoRA(rank=RANK, alpha=ALPHA * RANK**0.5),
        null_is="the update scaled by alpha / sqrt(rank) instead of alpha / rank",
    )
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config)
    ours = transformers.LlamaForCausalLM(config)
    ours.load_state_dict(theirs.state_dict())
    theirs = peft.get_peft_model(
        theirs, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    )
    adapter = value.attach(ours)
    with torch.no_grad():
        for site, layer in adapter.layers():
            twin = theirs.get_submodule(f"base_model.model.{site}")
            layer.get_parameter("A").copy_(twin.lora_A["default"].weight)
            layer.get_parameter("B").copy_(twin.lora_B["default"].weight.normal_(std=0.05))
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    different = (_logits(ours, tokens) - _logits(theirs, tokens)).abs().max().item()
    run.at_most("largest difference of a logit from PEFT's", different, 1e-6, part="check")
    losses = [_losses(model, tokens) for model in (ours, theirs)]
    gap = max(abs(one - other) for one, other in zip(*losses, strict=True))
    sentence = f"largest difference of a loss from PEFT's in {STEPS} steps"
    run.at_most(sentence, gap, 1e-5, part="check")


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


def _logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits


def _losses(model: torch.nn.Module, tokens: Tensor) -> list[float]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
