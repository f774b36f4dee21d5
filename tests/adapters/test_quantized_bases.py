"""Every adapter on a base of four bits: it learns there, and it makes dense layers when merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, MoS, PiSSA, load
from modicum.adapters.base import Adapter
from modicum.core.errors import InputError
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import distance, numbers, odd_model, stir

METHODS: list[Adapter] = [
    LoRA(rank=2),
    PiSSA(rank=2),
    MoS(rank=2, equivalent_rank=2, private_rank=2, shards=1),
]
each_method = pytest.mark.parametrize("value", METHODS, ids=lambda value: value.info.name)
INPUTS = numbers(16, 7)


def quantized() -> tuple[nn.Sequential, Callable[[str], Tensor]]:
    """`odd_model` in four bits, and the reader of its full-precision weights."""
    model, dense = odd_model(), odd_model()
    for name in ("wide", "narrow"):
        layer = dense.get_submodule(name)
        bias = None if layer.bias is None else layer.bias.detach()
        model.set_submodule(name, NF4Linear.from_dense(layer.weight.detach(), bias))
    return model, lambda name: dense.get_submodule(name).weight.detach()


@each_method
def test_factors_learn_in_fp32_and_codes_stay(value: Adapter) -> None:
    model, weights = quantized()
    adapter = value.attach(model, weights=weights)
    codes = model.get_submodule("wide").codes.clone()
    targets = numbers(16, 5, name="targets")
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=3e-2)
    losses = []
    for _ in range(30):
        loss = (model(INPUTS) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    assert torch.equal(model.get_submodule("wide").codes, codes)


@each_method
def test_merging_is_refused_or_makes_dense_layers_and_is_undone_to_the_bit(value: Adapter) -> None:
    model, weights = quantized()
    codes = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapter = stir(value.attach(model, weights=weights))
    unmerged = model(INPUTS)
    with pytest.raises(InputError, match=r"cannot be kept as nf4.*merge\(dense=torch.bfloat16\)"):
        adapter.merge()
    assert not adapter.merged
    assert torch.equal(model(INPUTS), unmerged)
    adapter.merge(dense=torch.float32)
    assert distance(model(INPUTS), unmerged) < 1e-5
    adapter.unmerge()
    assert torch.equal(model(INPUTS), unmerged)
    adapter.detach()
    assert all(torch.equal(tensor, codes[name]) for name, tensor in model.state_dict().items())
    again = stir(value.attach(model, weights=weights))
    again.merge(dense=torch.float32)
    again.detach()
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert distance(model(INPUTS), unmerged) < 1e-5


@each_method
def test_in_its_own_format_it_is_kept_to_the_bit(value: Adapter, tmp_path: Path) -> None:
    (model, weights), (other, _) = quantized(), quantized()
    stir(value.attach(model, weights=weights)).save(tmp_path, form="modicum")
    load(other, tmp_path)
    assert torch.equal(other(INPUTS), model(INPUTS))
