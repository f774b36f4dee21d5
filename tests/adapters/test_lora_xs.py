"""LoRA-XS trains a small matrix between the weight's leading singular vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor, nn

from modicum import adapters
from modicum.adapters import LoRAXS
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.lora_xs import LoRAXSLayer
from modicum.core.errors import InputError
from modicum.core.layers.basis_cache import bases_kept_in
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.truncated_svd import with_fixed_signs
from modicum.proofs.contracts.adapters.subjects import numbers, stir


def linear(outputs: int = 7, inputs: int = 9) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, outputs))
    for name, parameter in model.named_parameters():
        parameter.data = numbers(*parameter.shape, name=name)
    return model


def attached(model: nn.Module, **fields: Any) -> tuple[AttachedAdapter, LoRAXSLayer]:
    adapter = LoRAXS(**({"rank": 3, "niter": None} | fields)).attach(model)
    [(_, layer)] = adapter.layers()
    assert isinstance(layer, LoRAXSLayer)
    return adapter, layer


@given(outputs=st.integers(1, 16), inputs=st.integers(1, 16), rank=st.integers(1, 16))
def test_its_factors_are_the_leading_ones(outputs: int, inputs: int, rank: int) -> None:
    rank = min(rank, outputs, inputs)
    weight = linear(outputs, inputs)[0].weight.detach()
    left, singular, right = torch.linalg.svd(weight, full_matrices=False)
    _, layer = attached(linear(outputs, inputs), rank=rank)
    torch.testing.assert_close(layer.B.T @ layer.B, torch.eye(rank), rtol=0, atol=1e-5)
    squares = torch.diag(singular[:rank].square())
    torch.testing.assert_close(layer.A @ layer.A.T, squares, rtol=1e-4, atol=1e-4)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank]
    torch.testing.assert_close(layer.B @ layer.A, best, rtol=0, atol=1e-4)


def test_it_begins_as_the_base_and_its_gradient_is_the_one_between() -> None:
    model, base, x = linear(), linear(), numbers(5, 9, name="x")
    adapter, layer = attached(model, alpha=12.0)
    torch.testing.assert_close(model(x), base(x), rtol=0, atol=1e-3)
    assert layer.R.abs().max() < 1e-4
    still, _ = attached(linear(), std=0.0)
    assert torch.equal(still.model(x), base(x))
    base[0].weight.requires_grad_(True)
    base[0].weight.data += layer.delta().detach()
    for each in (model, base):
        each(x).square().sum().backward()
    full = base[0].weight.grad
    assert full is not None
    assert layer.R.grad is not None
    expected = 4.0 * layer.B.T @ full @ layer.A.T
    torch.testing.assert_close(layer.R.grad, expected, rtol=1e-4, atol=1e-3)
    assert sum(parameter.numel() for parameter in adapter.parameters()) == 9


def test_a_file_has_the_small_matrix_alone_and_the_factors_come_back(tmp_path: Path) -> None:
    adapter, layer = attached(linear(), niter=10)
    stir(adapter)
    adapter.save(tmp_path / "own", form="modicum")
    with safe_open(tmp_path / "own" / "adapter.safetensors", "pt") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert shapes == {"0.R": [3, 3], "0.fingerprint": [2]}
    again = adapters.load(linear(), tmp_path / "own", name="other")
    [(_, loaded)] = again.layers()
    assert torch.equal(loaded.delta(), layer.delta())
    other = linear()
    other[0].weight.data *= 1.5
    with pytest.raises(InputError, match="derives from this layer's weight is not what"):
        adapters.load(other, tmp_path / "own")
    assert type(other[0]) is nn.Linear


def test_a_pair_whose_signs_turned_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, layer = attached(linear())
    kept = {name: value.clone() for name, value in adapter.state_dict().items()}

    def turned(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        signs = torch.tensor([1.0, -1.0, 1.0])
        left, right = with_fixed_signs(left, right)
        return left * signs, right * signs[:, None]

    monkeypatch.setattr("modicum.adapters.lora_xs.with_fixed_signs", turned)
    other, own = attached(linear())
    assert not torch.allclose(own.A, layer.A)
    with pytest.raises(InputError, match="is not what its state was trained"):
        other.load_state_dict(kept)


def test_a_large_weights_numbers_may_be_a_step_of_fp16_apart() -> None:
    model = linear()
    model[0].weight.data *= 1e4
    adapter, layer = attached(model)
    assert layer.fingerprint.min() > 4
    kept = {name: value.clone() for name, value in adapter.state_dict().items()}
    near = (layer.fingerprint.view(torch.int16) + 1).view(torch.float16)
    adapter.load_state_dict(kept | {"0.fingerprint": near})
    with pytest.raises(InputError, match="is not what its state was trained"):
        adapter.load_state_dict(kept | {"0.fingerprint": near + 0.1})


def test_a_basis_that_is_kept_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bases_kept_in(tmp_path):
        _, first = attached(linear(), niter=4)
        monkeypatch.setattr(torch.linalg, "svd", None)
        _, again = attached(linear(), niter=4)
    assert len(list(tmp_path.glob("svd-*.safetensors"))) == 1
    assert torch.equal(first.A, again.A)
    assert torch.equal(first.B, again.B)


def test_a_quantized_base_asks_for_the_full_weight() -> None:
    weight = numbers(64, 64, name="W")
    model = nn.Sequential(linear_form("nf4").from_dense(weight, None))
    with pytest.raises(InputError, match="give `weights`"):
        LoRAXS(rank=4).attach(model)
    adapter = LoRAXS(rank=4).attach(model, weights=lambda name: weight)
    [(_, layer)] = adapter.layers()
    expected = torch.linalg.svdvals(weight)[:4]
    torch.testing.assert_close(layer.get_buffer("A").norm(dim=1), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("fields", "scale", "problem"),
    [
        ({"rank": 8}, 1.0, "above 7, the smaller width of the layer 0"),
        ({}, 0.0, "above 0, the rank of the weight of 0"),
        ({}, float("inf"), "not finite"),
    ],
)
def test_what_cannot_be_leaves_the_model_as_it_was(
    fields: dict[str, Any], scale: float, problem: str
) -> None:
    model = linear()
    model[0].weight.data *= scale
    with pytest.raises(InputError, match=problem):
        attached(model, **fields)
    assert type(model[0]) is nn.Linear
    assert all(parameter.requires_grad for parameter in model.parameters())
    low = linear()
    low[0].weight.data = numbers(7, 1, name="u") @ numbers(1, 9, name="v")
    with pytest.raises(InputError, match="above 1, the rank"):
        attached(low)
