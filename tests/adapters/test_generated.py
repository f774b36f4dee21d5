"""Tensors of adapters that are drawn from a seed, in what is built around the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

from modicum.adapters import LoRA, LoRAFA, RandLoRA, load
from modicum.adapters.base import Adapter
from modicum.adapters.native_files import taken_as
from modicum.adapters.peft_files import read
from modicum.adapters.starting import fields_of, start_from
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.ranks import Ranks
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import build
from modicum.proofs.contracts.adapters.subjects import llama, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama
from modicum.trainer.rehearsal import untouched

METHODS: list[Adapter] = [LoRAFA(rank=4), RandLoRA(rank=4)]
named = pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)


def drawn_of(model: nn.Module) -> dict[str, Tensor]:
    """The generated buffers of a model's adapters."""
    ends = (".A", ".B", ".correction")
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(ends)}


@named
def test_a_rehearsal_copies_none_of_them(value: Adapter) -> None:
    model = llama()
    value.attach(model)
    before = {name: buffer.data_ptr() for name, buffer in drawn_of(model).items()}
    assert before
    with untouched(model):
        model(tokens()).sum().backward()
    assert {name: buffer.data_ptr() for name, buffer in drawn_of(model).items()} == before


@pytest.mark.expensive
@named
def test_a_decoder_of_transformers_that_was_built_without_memory_draws_the_same(
    value: Adapter,
) -> None:
    plain = hugging_face_llama()
    full = value.attach(plain, seed=3)
    config = TransformersConfig(plain.config.to_dict())
    with on_meta():
        model = build(config)
        adapter = value.attach(model, seed=3)
    materialise(model, "cpu")
    model.initialise(0)
    adapter.initialise()
    assert list(adapter.sites) == list(full.sites)
    expected = drawn_of(plain)
    assert expected.keys() == drawn_of(model).keys()
    for name, buffer in drawn_of(model).items():
        assert torch.equal(buffer, expected[name]), name


def sent(ranks: Ranks, value: Adapter) -> tuple[list[str], list[str]]:
    """What DistributedDataParallel makes alike of buffers that are others on every rank."""
    model = llama()
    adapter = value.attach(model, seed=3)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(1 + ranks.rank)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.nn.parallel.DistributedDataParallel(model)(tokens())
    changed = [n for n, buffer in model.named_buffers() if not torch.equal(buffer, before[n])]
    adapter.detach()
    return changed, list(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


@pytest.mark.ranks
@named
def test_distributed_data_parallel_sends_the_seed_alone(pool: Pool, value: Adapter) -> None:
    (first, left), (second, _) = pool.run(sent, value)
    assert (first, left) == ([], [])
    model = llama()
    value.attach(model)
    assert second == [name for name, _ in model.named_buffers() if name not in drawn_of(model)]


@named
def test_training_starts_from_a_lora_of_peft_as_the_asked_method(
    value: Adapter, tmp_path: Path
) -> None:
    source = stir(LoRA(rank=3, alpha=6.0).attach(llama()))
    source.save(tmp_path)
    stored = read(tmp_path, llama())
    if not isinstance(value, LoRAFA):
        with pytest.raises(InputError, match="randlora cannot continue it"):
            taken_as(stored, type(value))
        return
    fields = fields_of(stored, llama("meta"), LoRAFA(), {})
    assert (fields["init"], fields["rank"], fields["alpha"]) == ("stored", 3, 6.0)
    with pytest.raises(InputError, match="has another; leave it out"):
        fields_of(stored, llama("meta"), LoRAFA(rank=5), {"rank": 5})
    model = llama("meta")
    adapter = LoRAFA(**fields).attach(model)
    model.to_empty(device="cpu").initialise(0)
    start_from(adapter, stored)
    torch.testing.assert_close(model(tokens()), source.model(tokens()), rtol=1e-5, atol=1e-6)
    model(tokens()).square().sum().backward()
    assert all(parameter.grad.any() for parameter in adapter.parameters())


@named
def test_next_to_the_weights_of_a_full_model_the_seed_is_enough(
    value: Adapter, tmp_path: Path
) -> None:
    model, ids = hugging_face_llama(), tokens()
    stir(value.attach(model, seed=5), 0.05)
    model.save_pretrained(tmp_path)
    other = hugging_face_llama()
    load(other, tmp_path)
    assert torch.equal(other(ids).logits, model(ids).logits)
    for name, buffer in drawn_of(other).items():
        assert torch.equal(buffer, drawn_of(model)[name]), name
