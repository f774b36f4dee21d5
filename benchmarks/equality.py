"""How far modicum's logits are from transformers' and peft's on the same weights, in fp32."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from common import say, write_result
from peft import PeftModel
from torch import Tensor

from modicum.adapters import LoRA
from modicum.models import saving
from modicum.models.config import ModelConfig
from modicum.models.llama import create

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"layers": 4, "width": 256, "heads": 8},
    "grouped": {"layers": 2, "width": 192, "heads": 6, "kv_heads": 2},
    "untied": {"layers": 2, "width": 128, "heads": 2, "tied_embeddings": False},
}
VOCABULARY, LENGTH, ROWS = 2048, 256, 4


@torch.no_grad()
def distances(shape: dict[str, Any], folder: Path, seed: int) -> dict[str, float]:
    """Largest absolute differences of logits, and how large logits are."""
    config = ModelConfig(vocabulary_size=VOCABULARY, context=LENGTH, **shape)
    model = create(config, seed=seed)
    saving.save(model, folder / "model")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    theirs: Any = transformers.LlamaForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).eval()
    plain = model(ids)
    figures = {
        "llama": _apart(plain, theirs(ids).logits),
        "largest_logit": float(plain.abs().max()),
    }
    adapter = LoRA(rank=8, alpha=16.0).attach(model, seed=seed)
    for parameter in adapter.parameters():
        # As after training: B starts as zeros, with which any adapter would be equal to any other.
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    adapter.save(folder / "adapter", base_model=str(folder / "model"))
    adapted = model(ids)
    peft_model = PeftModel.from_pretrained(theirs, folder / "adapter").eval()
    figures["adapter"] = _apart(adapted, peft_model(ids).logits)
    figures["adapter_does"] = _apart(adapted, plain)
    adapter.merge()
    figures["merged"] = _apart(model(ids), adapted)
    return figures


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def main() -> None:
    """Compare every shape, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, about itself
    transformers.logging.disable_progress_bar()
    by_shape = {}
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            by_shape[name] = distances(shape, Path(folder), seed)
        say(f"{name}: {by_shape[name]}")
    worst = {
        key: max(figures[key] for figures in by_shape.values())
        for key in ("llama", "adapter", "merged")
    }
    settings = {"vocabulary_size": VOCABULARY, "rows": ROWS, "length": LENGTH, "seed": seed}
    write_result("equality", {"largest_difference": worst, "by_shape": by_shape}, settings)


if __name__ == "__main__":
    main()
