"""The base weight under PiSSA is the residual: runs and files keep it, and it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, PiSSA, load
from modicum.adapters.rewriting import rewriting
from modicum.core.errors import InputError
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import (
    distance,
    llama,
    numbers,
    odd_model,
    stir,
    tokens,
)


def test_a_rank_above_a_width_is_refused_before_anything_changes() -> None:
    model = odd_model()
    with pytest.raises(InputError, match="above 5, the smaller width of the layer narrow") as error:
        PiSSA(rank=6).attach(model)
    assert error.value.field == "rank"
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_checkpoint_rewrites_the_base_to_the_bit_without_another_svd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = llama()
    PiSSA(rank=2, niter=2).attach(first, seed=1)
    state = {k: v.clone() for k, v in first.state_dict().items() if "layers_by_adapter" in k}
    monkeypatch.setattr("modicum.adapters.pissa.kept_svd", None)
    model = llama("meta")
    adapter = PiSSA(rank=2, niter=2).attach(model, seed=2)
    model.to_empty(device="cpu").initialise(0)
    adapter.initialise(kept=state)
    for (name, one), other in zip(model.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(one, other), name
    with pytest.raises(InputError, match="first values are not there"):
        adapter.initialise(kept={})


def test_a_state_with_another_start_rewrites_the_base_again() -> None:
    one, other, ids = llama(), llama(), tokens()
    mine = stir(PiSSA(rank=2, niter=1).attach(one, seed=1))
    twin = PiSSA(rank=2, niter=1).attach(other, seed=2)
    assert not torch.equal(*(rewriting(a)["model.layers.0.mlp.up_proj"].A_0 for a in (mine, twin)))
    twin.load_state_dict(mine.state_dict())
    assert distance(other(ids), one(ids)) < 1e-6


def test_starting_anew_splits_the_original_weight_again() -> None:
    model, ids = llama(), tokens()
    base = model(ids)
    adapter = PiSSA(rank=2).attach(model)
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    stir(adapter).initialise()
    assert distance(model(ids), base) < 1e-5
    for name, value in adapter.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-4)


def test_a_lora_is_not_merged_into_a_base_of_which_a_part_is_taken() -> None:
    model = odd_model()
    pissa = PiSSA(rank=2).attach(model, name="pissa")
    lora = LoRA(rank=2).attach(model, name="lora")
    with pytest.raises(InputError, match="has taken a part out of the base weight"):
        lora.merge()
    assert not lora.merged
    pissa.merge()
    lora.merge()


def quantized() -> tuple[nn.Sequential, Callable[[str], Tensor]]:
    """`odd_model` without its bias in four bits, and the reader of its full-precision weights."""
    dense = odd_model()
    layers = [
        NF4Linear.from_dense(dense.get_submodule(n).weight.detach()) for n in ("wide", "narrow")
    ]
    return nn.Sequential(*layers), lambda name: dense[2 * int(name)].weight.detach()


def test_a_quantized_base_needs_the_full_precision_weight() -> None:
    model, _ = quantized()
    with pytest.raises(InputError, match="starts from the full-precision weight; give `weights`"):
        PiSSA(rank=2).attach(model)
    assert [type(module) for module in model] == [NF4Linear, NF4Linear]


def test_a_quantized_residual_is_kept_with_the_adapter_or_has_a_lora_next_to_it(
    tmp_path: Path,
) -> None:
    (model, weights), inputs = quantized(), numbers(5, 7)
    adapter = stir(PiSSA(rank=4, rounds=3).attach(model, weights=weights))
    expected = model(inputs)
    with pytest.raises(InputError, match="no LoRA for the original model is exact"):
        adapter.save(tmp_path / "refused", form="peft")
    adapter.save(tmp_path / "own")
    plain = nn.Sequential(nn.Linear(7, 13, bias=False), nn.Linear(13, 5, bias=False))
    with pytest.raises(InputError, match="kept otherwise"):
        load(plain, tmp_path / "own")
    assert [type(module) for module in plain] == [nn.Linear, nn.Linear]
    # The plain LoRA of rank r, on a base that is the residual.
    adapter.save(tmp_path / "next", form="peft-rest")
    for layer, module in zip(plain, model, strict=True):
        layer.weight.data.copy_(module.to_dense())
    assert load(plain, tmp_path / "next").method == LoRA(rank=4, alpha=4.0, targets=("0", "1"))
    assert distance(plain(inputs), expected) < 1e-5


def test_what_a_quantized_base_cannot_take_is_refused_before_it_is_restored(tmp_path: Path) -> None:
    (model, weights), (other, _), inputs = quantized(), quantized(), numbers(5, 7)
    stir(PiSSA(rank=4, rounds=3).attach(model, weights=weights)).save(tmp_path / "own")
    adapter = load(other, tmp_path / "own")
    expected, own = other(inputs), adapter.state_dict()
    state = {name: 1.1 * value if name.endswith("_0") else value for name, value in own.items()}
    with pytest.raises(InputError, match="starts from the full-precision weight"):
        adapter.load_state_dict(state)
    assert torch.equal(other(inputs), expected)
    with pytest.raises(InputError, match="starts from the full-precision weight"):
        adapter.initialise()
    assert torch.equal(other(inputs), expected)
