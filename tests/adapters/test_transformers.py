"""Adapters that rewrite the base or share tensors, in the trainer of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRAFA, MoS, PiSSA, RandLoRA
from modicum.adapters.base import Adapter
from modicum.proofs.contracts.adapters.subjects import tokens

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
METHODS: list[Adapter] = [
    PiSSA(rank=2),
    MoS(rank=4, equivalent_rank=3, private_rank=1, shards=4),
    LoRAFA(rank=4),
    RandLoRA(rank=4),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=29,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(value: Adapter, folder: Path, *, resume: bool, bf16: bool) -> dict[str, Tensor]:
    """Four updates, a checkpoint after two of them; or the last two, from that checkpoint."""
    made = model()
    value.attach(made, seed=3)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, learning_rate=1e-2, per_device_train_batch_size=4,
        save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True,
        bf16=bf16, seed=0,
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(16)]
    trainer = transformers.Trainer(made, arguments, train_dataset=rows)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    return {name: value.detach().clone() for name, value in made.state_dict().items()}


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)
def test_a_checkpoint_of_transformers_goes_on_to_the_bit(
    value: Adapter, bf16: bool, tmp_path: Path
) -> None:
    straight = train(value, tmp_path, resume=False, bf16=bf16)
    resumed = train(value, tmp_path, resume=True, bf16=bf16)
    start = model()
    value.attach(start, seed=3)
    moved = [n for n, v in start.state_dict().items() if not torch.equal(v, straight[n])]
    trained = [name for name, parameter in start.named_parameters() if parameter.requires_grad]
    assert moved == [name for name in start.state_dict() if name in trained]
    assert straight.keys() == resumed.keys()
    for name, weight in straight.items():
        assert torch.equal(weight, resumed[name]), name
