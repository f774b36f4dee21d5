"""COMET under `transformers.Trainer`, whose loop is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modicum.core.random import normal_
from modicum.memory import COMET, Activations

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def rows(count: int) -> list[dict[str, Any]]:
    images = normal_(torch.empty(count, 3, 16, 16), seed=0, name="images")
    labels = (images.mean((1, 2, 3)) * 40).long() % 3
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, labels, strict=True)]


@pytest.mark.expensive
def test_it_follows_the_trainers_optimizer(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(
        num_channels=3, embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic",
        num_labels=3, downsample_in_first_stage=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.ResNetForImageClassification(config)
    runtime: Activations = COMET(warmup=2, every=2).attach(model)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=1e-3, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows(24), callbacks=[runtime.callback()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    assert runtime.step == 3
    bounded = [layer for layer in runtime.layers if layer.seen is not None]
    # Convolutions that read a ReLU's output; the first one reads the batch.
    assert len(bounded) >= 3
    assert all(layer.bound > 0 for layer in bounded)
    assert runtime.measured is not None
    assert runtime.measured.values < 0.3
    assert runtime.held_bytes == 0
