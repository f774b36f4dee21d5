"""Q-BaRA: tiles of one number, the right scale, what it keeps, and where it is LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import LoRA, QBaRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.ledger import (
    check_activations,
    check_parameters_and_bytes,
    check_work,
)
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir, tokens
from modicum.proofs.contracts.adapters.trace import check_trace
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

VALUE = QBaRA(rank=2, alpha=3.0)


def linear(n: int = 12, m: int = 8) -> nn.Sequential:
    layer = nn.Linear(n, m)
    with torch.no_grad():
        layer.weight.copy_(numbers(m, n, name="W"))
    return nn.Sequential(layer)


def layer_of(adapter: AttachedAdapter) -> Any:
    [(_, layer)] = adapter.layers()
    return layer


@pytest.mark.parametrize("pooling", [2, 4])
def test_the_change_is_tiles_of_one_number_at_s_over_lambda(pooling: int) -> None:
    model, x = linear(4 * 12, 4 * 8), numbers(3, 4 * 12)
    before = model(x)
    adapter = stir(VALUE.with_fields(pooling=pooling).attach(model))
    layer = layer_of(adapter)
    means = x.unflatten(-1, (-1, pooling)).mean(-1)
    repeated = (means @ layer.A.T @ layer.B.T).repeat_interleave(pooling, -1)
    torch.testing.assert_close(model(x), before + 1.5 * repeated)
    tiles = layer.delta().unflatten(0, (-1, pooling)).unflatten(2, (-1, pooling))
    assert torch.equal(tiles, tiles[:, :1, :, :1].expand_as(tiles))
    torch.testing.assert_close(tiles[:, 0, :, 0], 1.5 / pooling * layer.B @ layer.A)
    torch.testing.assert_close(x @ layer.delta().T, 1.5 * repeated)


@pytest.mark.parametrize("pooling", [1, 2, 4])
def test_its_rank_is_higher_at_loras_numbers(pooling: int) -> None:
    adapter = stir(QBaRA(rank=2, pooling=pooling).attach(linear(48, 40)))
    layer = layer_of(adapter)
    assert sum(p.numel() for p in adapter.parameters()) == 2 * (48 + 40)
    assert torch.linalg.matrix_rank(layer.delta(), rtol=1e-4) == 2 * pooling
    bound = (pooling / 48) ** 0.5
    fresh = layer_of(QBaRA(rank=2, pooling=pooling).attach(linear(48, 40)))
    assert 0.8 * bound < fresh.A.abs().max() <= bound
    assert not fresh.B.any()


def trained(value: Adapter) -> AttachedAdapter:
    adapter = value.attach(llama())
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    for _ in range(3):
        adapter.model(tokens()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapter


def test_without_pooling_it_is_lora_to_the_bit() -> None:
    mine, lora = trained(QBaRA(rank=2, alpha=3.0, pooling=1)), trained(LoRA(rank=2, alpha=3.0))
    assert mine.instead == {}
    for one, other in zip(mine.parameters(), lora.parameters(), strict=True):
        assert torch.equal(one, other)


def test_lora_of_its_rank_gives_the_same() -> None:
    adapter = stir(VALUE.attach(llama()))
    twin = LoRA(rank=4, alpha=3.0).attach(llama())  # s = 3 / 4, which is 3 / 2 over lambda
    with torch.no_grad():
        for (_, layer), (_, plain) in zip(adapter.layers(), twin.layers(), strict=True):
            a, b, scale = layer.as_lora()
            assert scale == 0.75
            plain.A.copy_(a)
            plain.B.copy_(b)
    torch.testing.assert_close(adapter.model(tokens()), twin.model(tokens()), rtol=0, atol=2e-5)


def kept(model: nn.Module, x: Tensor) -> int:
    with saved_bytes(model.parameters()) as saved:
        model(x)
    return saved.total


@pytest.mark.parametrize("pooling", [2, 4])
def test_what_is_kept_of_inputs_is_one_over_lambda(pooling: int) -> None:
    """Also where three layers read one tensor, whose sums are kept once."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(64, 32) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q(x), self.k(x), self.v(x)], -1)

    x = numbers(50, 64)
    for make, layers in ((lambda: linear(64, 32), 1), (Three, 3)):
        found = {}
        for name, value in (("lora", LoRA(rank=1)), ("bara", QBaRA(rank=1, pooling=pooling))):
            model = make()
            value.attach(model)
            thin = 4 * 50 * layers * (pooling if name == "bara" else 1)
            found[name] = kept(model, x.clone().requires_grad_(True)) - thin
        assert found["lora"] == 4 * 50 * 64
        assert found["bara"] * pooling == found["lora"]


@pytest.mark.expensive
def test_the_ledger_counts_an_input_and_its_sums_where_both_are_kept() -> None:
    """Of what q, k and v read q keeps sums, and k and v, which are narrower, the input itself."""
    value = QBaRA(rank=2, pooling=16)
    other = set(value.attach(llama()).instead)
    assert {name.rpartition(".")[2] for name in other} == {
        *("k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")
    }
    for check in (check_parameters_and_bytes, check_work, check_activations, check_trace):
        check(value)


def test_layers_that_lambda_does_not_divide_get_lora_and_are_named() -> None:
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5), nn.Embedding(7, 4))
    adapter = stir(VALUE.with_fields(targets=("0", "1", "2")).attach(model))
    assert adapter.instead == {
        "1": "LoRA, as pooling (2) does not divide 8 x 5",
        "2": "LoRA, as tokens have no neighbours to pool",
    }
    layers = dict(adapter.layers())
    assert [tuple(layers[name].A.shape) for name in "012"] == [(4, 6), (2, 8), (2, 7)]
    lora = layers["1"]
    torch.testing.assert_close(lora.delta(), 1.5 * lora.B @ lora.A)
    x = numbers(3, 8)
    expected = F.linear(x, model[1].weight + lora.delta(), model[1].bias)
    torch.testing.assert_close(model[1](x), expected)
    assert set(VALUE.attach(odd_model()).instead) == {"wide", "narrow"}


@pytest.mark.parametrize("pooling", [2, 3])
def test_one_file_of_plain_lora_holds_all_layers(pooling: int, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    sizes = {"intermediate_size": 27, "hidden_size": 18, "num_attention_heads": 3}
    ours, base = hugging_face_llama(**sizes), hugging_face_llama(**sizes)
    adapter = stir(VALUE.with_fields(pooling=pooling).attach(ours))
    assert len(adapter.instead) == (3 if pooling == 2 else 0)
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2 * pooling, 3.0)
    with torch.no_grad():
        before, expected = base(tokens()).logits, ours(tokens()).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path)
        assert (before - expected).abs().max() > 0.1
        torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=0, atol=2e-5)
        again = load(hugging_face_llama(**sizes), tmp_path)
        torch.testing.assert_close(again.model(tokens()).logits, expected, rtol=0, atol=2e-5)
