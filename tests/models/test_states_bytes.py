"""What keys and values are said to take, next to what a generated text holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from decoders import decoder_folder

from modicum.core.machine.memory import TensorMeter
from modicum.models import ModelConfig, create, huggingface
from modicum.models.decoders import Decoder, config_of
from modicum.models.generate import generate
from modicum.models.states_bytes import states_bytes

OWN = ModelConfig(vocabulary_size=64, width=64, layers=8, heads=8, kv_heads=2, context=600)


def held(model: Decoder, tokens: int) -> int:
    """The peak of tensor bytes while a text of so many tokens is written."""
    model.eval()
    with TensorMeter("cpu") as meter:
        for _ in generate(model, torch.tensor([[1, 2]]), max_tokens=tokens - 2):
            pass
    assert meter.peak is not None
    return meter.peak


def test_the_built_in_decoder_holds_what_is_said() -> None:
    total, layer = states_bytes(OWN, 500, 4)
    assert (total, layer) == (8 * 2 * 500 * 2 * 8 * 4, 2 * 500 * 2 * 8 * 4)
    assert states_bytes(OWN, 500, 2) == (total // 2, layer // 2)
    peak = held(create(OWN, seed=0), 500)
    # Keys of few heads are repeated for all, and each token has logits.
    assert total < peak < total + 5 * layer + 50_000


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral"])
def test_a_cache_of_transformers_grows_to_what_is_said(name: str, tmp_path: Path) -> None:
    model = huggingface.load(decoder_folder(tmp_path / name, name))
    config = config_of(model)
    total, layer = states_bytes(config, 60, 4)
    assert 0 < layer < total
    assert total <= held(model, 60) < total + 4 * layer + 60_000
    grows = name != "mistral"  # which holds a window alone
    assert (states_bytes(config, 30, 4)[0] < total) == grows


def test_a_model_that_does_not_run_without_numbers_is_counted_by_its_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(huggingface.load(decoder_folder(tmp_path / "mixtral", "mixtral")))

    def unknown(*_: object) -> list[int]:
        raise TypeError("no numbers")

    monkeypatch.setattr("modicum.models.states_bytes._sizes", unknown)
    width, blocks = 32, 2  # its routers have four rows
    each = 2 * width * 10 * 4
    assert states_bytes(config, 10, 4) == (blocks * each, each)


def test_the_built_in_decoder_is_asked_without_torch_s_symbols() -> None:
    """They are 40 MB, which a plan would leave in the process that trains."""
    asked = "states_bytes(ModelConfig(vocabulary_size=16, width=8, layers=1, heads=2), 9, 4)"
    lines = [
        "import sys",
        "from modicum.models import ModelConfig",
        "from modicum.models.states_bytes import states_bytes",
        asked,
        "print('sympy' in sys.modules)",
    ]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "False"
