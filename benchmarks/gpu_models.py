"""The large models of `gpu.py`, of random weights in bf16, and what is planned and trained on them.

Sizes are those of published models; their weights cannot be had everywhere, and what a step takes
does not depend on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from plan_truth_models import tokenizer_of

STEPS = 8
MODELS: dict[str, dict[str, Any]] = {
    "1.1B": {  # TinyLlama
        "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
    },
    "6.7B": {  # Llama 2 7B
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Forecast:
    """A recipe on a large model.

    Args:
        sections: of the recipe, next to model and data.
        budget: bytes of tensors, as people write them.
    """

    name: str
    model: str
    sections: dict[str, Any] = field(default_factory=dict)
    length: int = 512
    rows: int = 1
    budget: str | None = None

    def recipe(self, folder: Path) -> dict[str, Any]:
        """The recipe, in bf16."""
        return {
            "model": {"path": str(folder)},
            "data": {"sequence_length": self.length, "boundaries": False},
            "checkpoint": {"every": STEPS},
            "evaluation": {"every": STEPS, "rows": 2},
            "samples": {"count": 0},
            **({"budget": {"tensors": self.budget}} if self.budget else {}),
            **self.sections,
            "training": {
                "steps": STEPS, "batch_size": self.rows, "learning_rate": 1e-5, "precision": "bf16",
                **self.sections.get("training", {}),
            },
        }  # fmt: skip


_LORA = {"method": "lora", "rank": 16}
FORECASTS = (
    Forecast(
        "6.7B, LoRA on 4 bits, rows of 512",
        "6.7B",
        {"adapter": _LORA, "linear": {"method": "nf4"}},
        budget="8GB",
    ),
    Forecast("1.1B, all weights", "1.1B", length=2048, rows=8, budget="60GB"),
    Forecast("1.1B, LoRA", "1.1B", {"adapter": _LORA}, length=2048, rows=8),
    Forecast("1.1B, Muon", "1.1B", {"optimizer": {"method": "muon"}}, length=2048, rows=8),
    Forecast(
        "6.7B, LoRA on 4 bits, rows of 2048",
        "6.7B",
        {"adapter": _LORA, "linear": {"method": "nf4"}},
        length=2048,
        budget="8GB",
    ),
    Forecast("6.7B, LoRA on bf16", "6.7B", {"adapter": _LORA}, length=2048, rows=4),
    Forecast(
        "1.1B, all weights, 8-bit AdamW, a tight budget",
        "1.1B",
        {"optimizer": {"method": "adamw8bit"}},
        length=2048,
        rows=8,
        budget="16GB",
    ),
)


def model_folder(work: Path, name: str) -> Path:
    """A folder with the model and a tokenizer, made once."""
    import transformers

    folder = work / name
    if (folder / "tokenizer.json").exists():
        return folder
    config = transformers.LlamaConfig(
        max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=0, **MODELS[name],
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder, max_shard_size="2GB")
    tokenizer_of(work).save(folder)
    return folder
