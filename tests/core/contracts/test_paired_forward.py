"""Two passes of each batch under `transformers.Trainer`: as in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from modicum.adapters import AttachedAdapter, MoSA
from modicum.core.contracts.paired_forward import pair_forward
from modicum.core.errors import InputError

ROWS, LENGTH, BATCH, UPDATES = 12, 8, 4, 3


def decoder() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_labels=3,
        num_attention_heads=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def rows_of(kind: str) -> list[dict[str, Any]]:
    ids = torch.randint(29, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    if kind == "classifier":
        return [{"input_ids": row, "labels": int(row[0]) % 3} for row in ids]
    labels = ids.clone()
    labels[::2, 5:] = -100  # as padding is
    return [{"input_ids": row, "labels": own} for row, own in zip(ids, labels, strict=True)]


def adapted(kind: str) -> tuple[Any, AttachedAdapter]:
    model = decoder() if kind == "decoder" else classifier()
    value = MoSA(bottleneck=5, experts=2, scale=1.0, consistency=30.0, targets=("all-blocks",))
    adapter = value.attach(model)
    # Up begins at zero, where experts agree.
    for name, parameter in adapter.named_parameters():
        if ".up_" in name:
            torch.nn.init.normal_(parameter, std=2.0, generator=torch.Generator().manual_seed(7))
    return model, adapter


def under_the_trainer(kind: str, folder: Path) -> tuple[dict[str, Tensor], list[float], Any]:
    model, adapter = adapted(kind)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=UPDATES, per_device_train_batch_size=BATCH, use_cpu=True,
        save_strategy="no", report_to=[], disable_tqdm=True, logging_steps=1, max_grad_norm=0.0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    optimizer = torch.optim.SGD(adapter.parameters(), lr=0.05)
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows_of(kind), optimizers=(optimizer, None),
        callbacks=[adapter.steps().callback()],
    )  # fmt: skip
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return dict(adapter.state_dict()), losses, model


def in_a_loop(kind: str) -> tuple[dict[str, Tensor], list[float]]:
    model, adapter = adapted(kind)
    model.train()
    optimizer, steps, losses = torch.optim.SGD(adapter.parameters(), lr=0.05), adapter.steps(), []
    rows = rows_of(kind)
    for update in range(UPDATES):
        batch = rows[BATCH * update : BATCH * (update + 1)]
        ids = torch.stack([row["input_ids"] for row in batch])
        labels = torch.stack([torch.as_tensor(row["labels"]) for row in batch])
        logits = model(input_ids=ids.repeat(2, 1)).logits
        if kind == "decoder":
            logits, labels = logits[:, :-1], labels[:, 1:]
        first, second = logits.chunk(2)
        count = (labels >= 0).sum()
        loss = torch.nn.functional.cross_entropy(
            first.reshape(-1, first.shape[-1]), labels.flatten()
        )
        between = steps.disagreement(first, second, labels) / count
        assert float(between.detach()) > 1e-4
        (loss + between).backward()
        losses.append(float((loss + between).detach()))
        optimizer.step()
        steps.update()
        optimizer.zero_grad()
    return dict(adapter.state_dict()), losses


@pytest.mark.parametrize("kind", ["decoder", "classifier"])
def test_updates_are_those_of_a_loop_that_repeats_rows(kind: str, tmp_path: Path) -> None:
    state, losses, model = under_the_trainer(kind, tmp_path)
    wanted, others = in_a_loop(kind)
    assert losses == pytest.approx(others, abs=2e-4)  # that trainer's log is rounded
    for name, value in wanted.items():
        torch.testing.assert_close(state[name].float(), value.float(), rtol=1e-4, atol=1e-6)
    # The model is as it was: nothing is repeated in an evaluation, or any more.
    ids = torch.ones(3, LENGTH, dtype=torch.long)
    assert len(model(input_ids=ids).logits) == len(model.eval()(input_ids=ids).logits) == 3
    assert not model._forward_pre_hooks


def test_a_batch_without_classes_is_refused() -> None:
    model, adapter = adapted("classifier")
    undo, ids = pair_forward(model, adapter.steps()), torch.ones(2, LENGTH, dtype=torch.long)
    model.train()
    for labels in (None, torch.ones(2)):
        with pytest.raises(InputError, match="labels that are classes"):
            model(input_ids=ids, labels=labels)
    model.eval()
    assert len(model(input_ids=ids).logits) == 2
    undo()
