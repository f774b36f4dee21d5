"""Merging into weights of low precision says what is lost by it."""

from __future__ import annotations

import pytest
import torch

from modicum.adapters import LoRA
from modicum.adapters.merging import RoundingWarning
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.proofs.contracts.adapters.subjects import numbers, odd_model, stir


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_says_how_much_was_rounded(dtype: torch.dtype) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(dtype)
    before = [layer.weight.detach().float() for layer in layers]
    adapter = LoRA(rank=2).attach(layers)
    for name, factor in adapter.named_parameters():
        normal_(factor.data, std=0.05, seed=0, name=name)
    deltas = [layer.delta().detach() for _, layer in adapter.layers()]
    if dtype == torch.float32:
        adapter.merge()  # any warning would fail the test
        with pytest.raises(InputError, match="the adapter is merged already"):
            adapter.merge()
        adapter.detach()
        with pytest.raises(InputError, match="the adapter was merged and detached"):
            adapter.merge()
        return
    with pytest.warns(RoundingWarning) as caught:
        adapter.merge()
    adapter.detach()
    errors = [
        float((layer.weight.detach().float() - old - delta).norm() / delta.norm())
        for layer, old, delta in zip(layers, before, deltas, strict=True)
    ]
    assert max(errors) > 0.01
    assert len(caught) == 1
    assert f"up to {max(errors):.2g} of the adapter's own change" in str(caught[0].message)
    assert f"(in {errors.index(max(errors))})" in str(caught[0].message)
    assert caught[0].filename == __file__


def test_a_merged_adapter_takes_no_state_until_it_is_unmerged() -> None:
    model, inputs = odd_model(), numbers(4, 7)
    adapter = stir(LoRA(rank=2).attach(model))
    before = model(inputs)
    state = {name: 2 * value for name, value in adapter.state_dict().items()}
    adapter.merge()
    with pytest.raises(InputError, match="the adapter is merged; unmerge it first"):
        adapter.load_state_dict(state)
    with pytest.raises(InputError, match="the adapter is merged; unmerge it first"):
        adapter.initialise()
    adapter.unmerge()
    torch.testing.assert_close(model(inputs), before, rtol=1e-5, atol=1e-5)
    adapter.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in adapter.state_dict().items())
