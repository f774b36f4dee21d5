"""MoS builds every layer's LoRA from pools that the model owns once."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA, MoS
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.kinds import pool_names
from modicum.core.contracts.parameters import optimizer_groups
from modicum.proofs.contracts.adapters.subjects import llama, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

VALUE = MoS(rank=4, equivalent_rank=3, private_rank=1, shards=4)


def pools_and_indices(adapter: AttachedAdapter, name: str) -> list[tuple[str, torch.Tensor]]:
    """The names of the pools that a layer takes A and B from, each with the rows that it takes."""
    layer = adapter.model.get_submodule(f"{name}.layers_by_adapter.default")
    return list(zip(pool_names(adapter.sites[name]), (layer.index_A, layer.index_B), strict=True))


@pytest.mark.parametrize("e", [1, 2, 3])
def test_it_trains_as_many_numbers_as_lora_of_rank_e(e: int) -> None:
    model = llama(layers=5)
    value = MoS(rank=4, equivalent_rank=e, private_rank=0, shards=2)
    pools = {name: tuple(p.shape) for name, p in value.attach(model).named_parameters()}
    trained = sum(rows * width for rows, width in pools.values())
    lora = LoRA(rank=e).attach(llama(layers=5))
    assert trained == sum(parameter.numel() for parameter in lora.parameters())
    # Pools of a kind, that is of a name and a shape: grouped keys are narrower than queries.
    assert pools["shared.q_proj_16x16_B"] == (e * 5 * 2, 16 // 2)
    assert pools["shared.k_proj_8x16_B"] == (e * 5 * 2, 8 // 2)
    groups = optimizer_groups(model, learning_rate=1.0, weight_decay=0.1)
    assert [len(group["params"]) for group in groups] == [2 * 7]  # each once, however many use it


def test_the_bound_of_the_start_is_that_of_a_full_row() -> None:
    pools = dict(VALUE.attach(llama(layers=20)).named_parameters())
    a, b = pools["shared.up_proj_24x16_A"], pools["shared.up_proj_24x16_B"]
    assert 0.95 / math.sqrt(16) < a.abs().max() <= 1 / math.sqrt(16)
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 16), rel=0.05)
    assert not b.any()


def test_rows_join_shards_in_their_order() -> None:
    adapter = stir(VALUE.attach(llama(layers=5)))
    for name, layer in adapter.layers():
        a, b, _ = layer.as_lora()
        for factor, (pool, index) in zip((a, b.T), pools_and_indices(adapter, name), strict=True):
            rows = adapter.shared.get_parameter(pool)
            strided = torch.cat([rows[index[i::4]] for i in range(4)], dim=1)
            assert torch.equal(factor, strided)


def with_dense_twin(value: MoS) -> tuple[AttachedAdapter, AttachedAdapter]:
    """MoS on a small decoder in fp64, and LoRA on another, with factors of the same numbers."""
    mine = stir(value.attach(llama(layers=5).double()))
    twin = LoRA(rank=value.rank, alpha=value.alpha).attach(llama(layers=5).double())
    with torch.no_grad():
        for (_, layer), (_, plain) in zip(mine.layers(), twin.layers(), strict=True):
            plain.A.copy_(layer.as_lora()[0])
            plain.B.copy_(layer.as_lora()[1])
    return mine, twin


def test_without_sharing_it_is_lora() -> None:
    value = MoS(rank=2, equivalent_rank=2, private_rank=2, shards=1, alpha=3.0)
    outputs = []
    for adapter in with_dense_twin(value):
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            adapter.model(tokens()).square().mean().backward()
            optimizer.step()
        outputs.append(adapter.model(tokens()))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-8)


def test_the_gradient_of_a_pool_is_the_sum_over_its_uses() -> None:
    adapter, twin = with_dense_twin(VALUE)
    for each in (adapter, twin):
        each.model(tokens()).square().mean().backward()
    expected = {name: torch.zeros_like(pool) for name, pool in adapter.named_parameters()}
    for name, plain in twin.layers():
        dense = (plain.A.grad, plain.B.grad.T)
        for (pool, index), full in zip(pools_and_indices(adapter, name), dense, strict=True):
            for row, shard in zip(index.tolist(), full.reshape(len(index), -1), strict=True):
                expected[f"shared.{pool}"][row] += shard
    for name, pool in adapter.named_parameters():
        torch.testing.assert_close(pool.grad, expected[name], rtol=1e-9, atol=1e-12)


def test_peft_gives_the_same_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ours, base = hugging_face_llama(num_hidden_layers=3), hugging_face_llama(num_hidden_layers=3)
    stir(VALUE.attach(ours)).save(tmp_path)
    with torch.no_grad():
        before, expected = base(tokens()).logits, ours(tokens()).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path)
        assert (before - expected).abs().max() > 0.1
        torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=0, atol=2e-5)


def test_a_copy_of_the_model_has_pools_of_its_own() -> None:
    model = stir(VALUE.attach(llama())).model
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens()), model(tokens()))
    for parameter in twin.parameters():
        nn.init.ones_(parameter)
    assert not torch.equal(twin(tokens()), model(tokens()))
