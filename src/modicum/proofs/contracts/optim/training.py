"""Optimizers in other people's training loops."""

from __future__ import annotations

import tempfile

import torch

from modicum.proofs.contracts.optim.subjects import (
    RATE,
    OptimizerSubject,
    optimizers_check,
    small,
    tokens,
)
from modicum.proofs.contracts.transformers_loop import hugging_face_llama, train_under_transformers


@optimizers_check(expensive=True, proves="transformers")
def check_trains_under_transformers(subject: OptimizerSubject) -> None:
    """`transformers.Trainer(optimizers=(optimizer, None))` trains, saves and resumes with it."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (False, True):
            model = hugging_face_llama()
            start = {name: value.detach().clone() for name, value in model.named_parameters()}
            optimizer = small(subject).optimizer_class(
                model.named_parameters(), lr=RATE, **small(subject).fields()
            )
            train_under_transformers(
                model,
                tokens(16),
                folder=folder,
                resume_from=f"{folder}/checkpoint-3" if resume else None,
                optimizer=optimizer,
                max_steps=4,
                save_steps=3,
            )
            found.append({name: value.detach() for name, value in model.named_parameters()})
            stuck = [name for name in start if torch.equal(found[-1][name], start[name])]
            assert not stuck, f"three steps of training leave {stuck[0]} as it was"
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), f"{name} differs after resuming"
