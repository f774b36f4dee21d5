"""An adapter next to PEFT's of the same numbers: same model, same data, logits and losses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter
from modicum.proofs.base import ProofRun
from modicum.proofs.distances import worst

STEPS = 20
NOTHING: Mapping[str, str] = MappingProxyType({})


def same_as_peft(
    run: ProofRun, value: Adapter, config: dict[str, Any], more: Mapping[str, str] = NOTHING
) -> None:
    """Add the check that logits and 20 losses of AdamW equal PEFT's, in a transformers Llama.

    Args:
        value: a LoRA, or what has its factors and others that PEFT has.
        config: of PEFT's `LoraConfig`, without the targets.
        more: the names of PEFT's other factors, by those here.
    """
    run.progress("comparing with peft")
    transformers, peft = run.library("transformers", "hf"), run.library("peft", "hf")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    llama = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(llama)
    ours = transformers.LlamaForCausalLM(llama)
    ours.load_state_dict(theirs.state_dict())
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(target_modules="all-linear", **config))
    adapter = value.attach(ours)
    with torch.no_grad():
        for site, layer in adapter.layers():
            twin = theirs.get_submodule(f"base_model.model.{site}")
            layer.get_parameter("A").copy_(twin.lora_A["default"].weight)
            layer.get_parameter("B").copy_(twin.lora_B["default"].weight.normal_(std=0.05))
            for name, their_name in more.items():
                moved = getattr(twin, their_name)["default"].weight
                moved.mul_(torch.rand_like(moved) + 0.5)
                if name in dict(layer.named_parameters()):
                    layer.get_parameter(name).copy_(moved)
    tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(1))
    different = (_logits(ours, tokens) - _logits(theirs, tokens)).abs().max().item()
    run.at_most("largest difference of a logit from PEFT's", different, 1e-6, part="check")
    losses = [_losses(model, tokens) for model in (ours, theirs)]
    gap = worst(abs(one - other) for one, other in zip(*losses, strict=True))
    sentence = f"largest difference of a loss from PEFT's in {STEPS} steps"
    run.at_most(sentence, gap, 1e-5, part="check")


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
