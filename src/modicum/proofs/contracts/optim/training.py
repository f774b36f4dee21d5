"""Optimizers in other people's training loops."""

from __future__ import annotations

import importlib.util
import tempfile

import torch

from modicum.proofs.contracts.base import NotApplicable
from modicum.proofs.contracts.optim.subjects import (
    RATE,
    Subject,
    optimizers_check,
    small,
    tokens,
)


@optimizers_check(dear=True)
def check_trains_under_transformers(subject: Subject) -> None:
    """`transformers.Trainer(optimizers=(optimizer, None))` trains, saves and resumes with it."""
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise NotApplicable(f"{name} is not installed")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens(16)]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for resume in (False, True):
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(config)
            start = {name: value.detach().clone() for name, value in model.named_parameters()}
            optimizer = small(subject).optimizer_class(
                model.named_parameters(), lr=RATE, **small(subject).fields()
            )
            arguments = transformers.TrainingArguments(
                folder,
                max_steps=4,
                per_device_train_batch_size=4,
                save_steps=3,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            )
            trainer = transformers.Trainer(
                model, arguments, train_dataset=rows, optimizers=(optimizer, None)
            )
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
            found.append({name: value.detach() for name, value in model.named_parameters()})
            stuck = [name for name in start if torch.equal(found[-1][name], start[name])]
            assert not stuck, f"three steps of training leave {stuck[0]} as it was"
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), f"{name} differs after resuming"
