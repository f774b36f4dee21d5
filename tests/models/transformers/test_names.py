from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoders import config_json, theirs
from torch import Tensor

from modicum.core.machine.memory import TensorMeter
from modicum.models import huggingface, load, read_header, tensor_pieces
from modicum.models.safetensors_file import TensorEntry, TensorReader
from modicum.models.transformers import followed
from modicum.models.transformers.loading import empty_decoder
from modicum.models.transformers.names import ConvertedTensor

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def mixture(folder: Path, name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Write a tiny mixture of experts as transformers does, expert by expert."""
    raw = dict(_QWEN3) if name == "qwen3_moe" else config_json(name)
    made = transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(made).to(dtype)
        model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With one tensor a file."""
    return mixture(
        tmp_path_factory.mktemp("mixtures") / request.param, request.param, max_shard_size=1
    )


def converted(folder: Path) -> dict[str, ConvertedTensor]:
    tensors = read_header(folder).tensors
    return {name: each for name, each in tensors.items() if isinstance(each, ConvertedTensor)}


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of what files are asked for."""
    found: list[str] = []
    own = TensorReader.read

    def read(self: TensorReader, entry: TensorEntry, *rows: Any) -> Tensor:
        found.append(entry.name)
        return own(self, entry, *rows)

    with monkeypatch.context() as patch:
        patch.setattr(TensorReader, "read", read)
        yield found


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("stored", STORED)
def test_experts_are_those_of_transformers_to_the_bit(
    name: str, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mixture(tmp_path / name, name, STORED[stored])
    expected = theirs(folder).state_dict()
    for most in (100, 1 << 20):
        monkeypatch.setattr(tensor_pieces, "_AT_ONCE", most)
        for dtype in (None, torch.float32, torch.bfloat16):
            model = load(folder, dtype)
            for path, parameter in model.named_parameters():
                assert torch.equal(parameter, expected[path].to(parameter.dtype)), path
            experts = model.get_parameter("model.layers.0.mlp.experts.down_proj")
            assert experts.dtype == (dtype or STORED[stored])


def test_rows_are_read_from_the_files_of_their_own_experts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, tensors = theirs(folder).state_dict(), converted(folder)
    assert len(tensors) == 4  # gate and up, and down, of two blocks
    for name, entry in tensors.items():
        experts, each = entry.shape[0], len(entry.parts) // entry.shape[0]
        for before, rows in [(0, 1), (1, 2), (experts - 1, 1), (experts, 0), (0, experts)]:
            target = torch.full((rows, *entry.shape[1:]), -1.0, dtype=torch.bfloat16)
            with reads(monkeypatch) as found:
                entry.read_into(target, before)
            own = expected[name][before : before + rows]
            assert torch.equal(target, own.to(torch.bfloat16))
            assert torch.equal(entry.read(before, rows), own)
            assert len(found) == rows * each
            assert {int(file.split("experts.")[1].split(".")[0]) for file in found} == {
                *range(before, before + rows)
            }
        assert torch.equal(entry.read(1), expected[name][1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_than_one_tensor_of_the_files_is_next_to_the_model(
    folder: Path, dtype: torch.dtype
) -> None:
    header = read_header(folder)
    model = empty_decoder(header.config, "F32", dtype, "cpu", "dense")  # type: ignore[arg-type]
    files = [file.stat().st_size for file in folder.glob("*.safetensors")]
    stacked = max(entry.bytes for entry in converted(folder).values())
    with TensorMeter("cpu") as meter:
        huggingface.fill_from(model, header)
    assert meter.peak is not None
    assert meter.peak < max(files) + 500 < stacked


def test_what_is_no_known_way_of_putting_tensors_together_is_left_to_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = theirs(folder).state_dict()
    monkeypatch.setattr(followed, "_FOLLOWED", {})
    for name, entry in converted(folder).items():
        assert entry.pieces is None
        assert torch.equal(entry.read(), expected[name])
        target = torch.zeros(2, *entry.shape[1:], dtype=torch.bfloat16)
        entry.read_into(target, 1)
        assert torch.equal(target, expected[name][1:3].to(torch.bfloat16))
    for name, parameter in load(folder).named_parameters():
        assert torch.equal(parameter, expected[name])


def test_experts_of_several_dtypes_are_read_in_one_that_holds_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = mixture(tmp_path / "mixtral", "mixtral") / "model.safetensors"
    tensors = load_file(file)
    first = next(name for name in tensors if ".experts.0.w2" in name)
    tensors[first] = tensors[first].half()
    save_file(tensors, file, metadata={"format": "pt"})
    [entry] = [each for each in converted(file.parent).values() if each.parts[0][1].name == first]
    assert entry.dtype == "F32"
    assert entry.bytes == 4 * torch.Size(entry.shape).numel()
    assert torch.equal(entry.read()[0], tensors[first].float())
    assert torch.equal(entry.read(1, 1)[0], tensors[first.replace("experts.0", "experts.1")])
