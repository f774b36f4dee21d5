"""A run that adapts the classifier of images: convolutions, and norms in full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from modicum.adapters import load
from modicum.models import convnet
from modicum.models.convnet import ConvNetConfig
from modicum.planner import plan
from modicum.recipe import Recipe
from modicum.trainer import train


@pytest.mark.expensive
def test_convolutions_and_copies_of_norms_are_planned_trained_and_saved(tmp_path: Path) -> None:
    config = ConvNetConfig(widths=(8, 8), norm="group")
    convnet.save(convnet.create(config, 0), tmp_path / "model")
    recipe = Recipe(
        task={"method": "images", "images": 32, "held_out": 8, "path": str(tmp_path / "model")},
        adapter={"method": "lora", "rank": 2, "targets": ["conv", "head"], "also": ["norm"]},
        training={"steps": 3, "batch_size": 8},
        samples={"count": 0},
    )
    made = plan(recipe)
    factors = 2 * ((8 + 3 * 9) + (8 + 8 * 9) + (8 + 10))
    assert made.prediction.traced
    assert made.prediction.trainable == factors + 4 * 8
    run = train(made, tmp_path / "run")
    peak = run["peak_bytes"]
    assert peak["predicted"] == pytest.approx(peak["measured"], rel=0.02)
    model, base = convnet.load(tmp_path / "model"), convnet.load(tmp_path / "model")
    adapter = load(model, tmp_path / "run" / "adapter")
    assert list(adapter.sites) == ["blocks.0.conv", "blocks.1.conv", "head"]
    assert list(adapter.copied) == ["blocks.0.norm", "blocks.1.norm"]
    images = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(model(images), base(images))
