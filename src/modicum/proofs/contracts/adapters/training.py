"""Adapters in other people's training loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from modicum.proofs.contracts.adapters.subjects import (
    AdapterSubject,
    adapters_check,
    attached,
    numbers,
    odd_model,
    stir,
    tokens,
)
from modicum.proofs.contracts.small_training import constants_stay
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers


@adapters_check(proves="alone")
def check_learns_in_a_plain_loop(subject: AdapterSubject) -> None:
    """Attach, an optimizer of torch's, a loop: the loss falls by a fifth at least.

    The targets are what a model with another state of the same adapter computes.
    """
    model, other, inputs = odd_model(subject), odd_model(subject), numbers(32, 7)
    stir(attached(subject, other), std=0.5)
    with torch.no_grad():
        targets = other.eval()(inputs)
    adapter = attached(subject, model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=2e-2)
    losses = []
    with constants_stay(model):
        for _ in range(60):
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], f"the loss goes from {losses[0]:.4f} to {losses[-1]:.4f}"


@adapters_check(expensive=True, proves="transformers")
def check_trains_under_transformers(subject: AdapterSubject) -> None:
    """`transformers.Trainer` trains the factors of a Hugging Face model, and nothing else."""
    model = hugging_face_llama()
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    # Where the first weights can be read, they come back to the bit.
    adapter = attached(subject, model, weights=lambda name: base[f"{name}.weight"])
    before = {name: value.detach().clone() for name, value in adapter.named_parameters()}
    train_under_transformers(model, tokens(8), max_steps=3, learning_rate=1e-2)
    after = adapter.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before), "a factor is stuck"
    adapter.detach()
    changed = [
        name for name, value in model.named_parameters() if not torch.equal(value, base[name])
    ]
    assert not changed, f"the trainer changed the frozen {changed[0]}"
