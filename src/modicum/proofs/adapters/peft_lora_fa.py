"""LoRA-FA next to PEFT's: the same model, factors and data, twenty updates of each.

PEFT corrects gradients in its optimizer, `create_lorafa_optimizer`, and multiplies in bf16 where
the processor can, in an fp32 run too; here that product is set to fp32. Its AdamW adds epsilon to
the second moment's root before that is corrected for its start, so ours is the same rule written
out.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.lora_fa import LoRAFA
from modicum.core.extras import library
from modicum.proofs.distances import worst

STEPS, RANK, ALPHA, RATE, EPSILON = 20, 8, 16.0, 1e-3, 1e-6
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Differences:
    """The largest differences from PEFT's: of a loss, and of an entry of B at the end."""

    loss: float
    factor: float


class _PeftAdamW:
    """AdamW with PEFT's place of epsilon."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        self.step_number = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter."""
        self.step_number += 1
        first, second = (1 - beta**self.step_number for beta in BETAS)
        for parameter, (mean, square) in zip(self.parameters, self.moments, strict=True):
            assert parameter.grad is not None
            mean.mul_(BETAS[0]).add_(parameter.grad, alpha=1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(parameter.grad, parameter.grad, value=1 - BETAS[1])
            rate = RATE * second**0.5 / first
            parameter.addcdiv_(mean, square.sqrt().add_(EPSILON), value=-rate)


def differences(*, correct: bool) -> Differences:
    """How far twenty updates of ours are from PEFT's, `correct` or not."""
    transformers, peft = library("transformers", "hf", "PEFT"), library("peft", "hf", "PEFT")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    ours = transformers.LlamaForCausalLM(config)
    ours.load_state_dict(plain.state_dict())
    adapter = LoRAFA(rank=RANK, alpha=ALPHA, correct=correct).attach(ours)
    lora = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    theirs = peft.get_peft_model(plain, lora)
    twins = {name: theirs.get_submodule(f"base_model.model.{name}") for name in adapter.sites}
    with torch.no_grad():
        for name, layer in adapter.layers():
            twins[name].lora_A["default"].weight.copy_(layer.get_buffer("A"))
    rival = importlib.import_module("peft.optimizers.lorafa")
    optimizer = rival.create_lorafa_optimizer(theirs, r=RANK, lora_alpha=ALPHA, lr=RATE)
    mine = _losses(ours, _PeftAdamW(list(adapter.parameters())))
    with _product_in_fp32(rival):
        their = _losses(theirs, optimizer)
    loss = worst(abs(one - other) for one, other in zip(mine, their, strict=True))
    factor = worst(
        (layer.get_parameter("B") - twins[name].lora_B["default"].weight).abs().max().item()
        for name, layer in adapter.layers()
    )
    return Differences(loss, factor)


@contextmanager
def _product_in_fp32(module: Any) -> Iterator[None]:
    """In here PEFT takes the processor for one that has no bf16."""
    before = module.is_bf16_available
    module.is_bf16_available = lambda *given: False
    try:
        yield
    finally:
        module.is_bf16_available = before


def _losses(model: Any, optimizer: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(64, (4, 24), generator=torch.Generator().manual_seed(step))
        logits: Tensor = model(tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses
