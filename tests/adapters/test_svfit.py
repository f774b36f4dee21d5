"""What SVFit promises exactly: its gradient, its rank, its files, and layers' own ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modicum.adapters import LoRA, SVFit, load
from modicum.adapters.svfit import SVFitLayer
from modicum.core.errors import InputError
from modicum.core.random import normal_
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir


def layer_of(weight: Tensor, value: SVFit) -> tuple[nn.Module, SVFitLayer]:
    model = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    [(_, layer)] = value.attach(model).layers()
    assert isinstance(layer, SVFitLayer)
    return model, layer


def with_values(singular: list[float], rows: int = 9, columns: int = 6) -> Tensor:
    """A matrix with these singular values."""
    left = torch.linalg.qr(normal_(torch.empty(rows, len(singular)), seed=0, name="left")).Q
    right = torch.linalg.qr(normal_(torch.empty(columns, len(singular)), seed=0, name="right")).Q
    return left * torch.tensor(singular) @ right.T


@pytest.mark.parametrize("rank", [3, 6])
def test_its_gradient_is_the_diagonal_of_the_weights_in_the_basis(rank: int) -> None:
    weight = numbers(9, 6, dtype=torch.float64)
    model, layer = layer_of(weight, SVFit(rank=rank))
    with torch.no_grad():
        layer.shift.add_(numbers(rank, name="shift").double())
    inputs, targets = numbers(20, 6, dtype=torch.float64), numbers(20, 9, name="t").double()
    (model(inputs) - targets).square().sum().backward()
    dense = (weight + layer.delta()).detach().requires_grad_()
    (inputs @ dense.T - targets).square().sum().backward()
    left, _, right = torch.linalg.svd(weight, full_matrices=False)
    expected = (left[:, :rank].T @ dense.grad @ right[:rank].T).diagonal()
    torch.testing.assert_close(layer.shift.grad, expected, rtol=1e-10, atol=1e-10)
    assert layer.up.grad is None
    assert layer.down.grad is None


def test_the_changes_singular_values_are_the_shifts_and_may_turn_a_direction_around() -> None:
    weight = with_values([5.0, 3.0, 2.0, 1.0])
    _, layer = layer_of(weight, SVFit(rank=4))
    with torch.no_grad():
        layer.shift.copy_(torch.tensor([0.5, -3.0, 0.25, -2.0]))
    found = torch.linalg.svdvals(layer.delta())[:4]
    torch.testing.assert_close(found, torch.tensor([3.0, 2.0, 0.5, 0.25]), rtol=1e-5, atol=1e-5)
    changed = weight + layer.delta()
    # The second is gone, so the rank is one less; the last has become -1.
    expected = torch.tensor([5.5, 2.25, 1.0, 0.0])
    torch.testing.assert_close(torch.linalg.svdvals(changed)[:4], expected, rtol=1e-5, atol=1e-5)
    assert int(torch.linalg.matrix_rank(changed, rtol=1e-5)) == 3
    turned = layer.up[:, 3] @ changed @ layer.down[3]
    assert turned.item() == pytest.approx(-1.0, abs=1e-5)


def test_with_all_directions_it_is_every_diagonal_matrix() -> None:
    weight, other = torch.diag(torch.tensor([3.0, 2.0, 1.0])), torch.tensor([-1.0, 0.5, 7.0])
    _, layer = layer_of(weight, SVFit(rank=3))
    with torch.no_grad():
        layer.shift.copy_(other - weight.diagonal())
    torch.testing.assert_close(weight + layer.delta(), torch.diag(other))


def test_energy_gives_each_layer_the_rank_that_holds_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 9, bias=False), nn.Linear(9, 6, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(with_values([4.0, 2.0, 1.0, 0.5]))
        model[1].weight.copy_(with_values([1.0] * 6, 6, 9))
    inputs, spectrum = numbers(4, 6), 16 + 4 + 1 + 0.25
    for energy, ranks in (
        ((16 + 4 - 0.01) / spectrum, (2, 6)),
        ((16 + 4 + 0.01) / spectrum, (3, 6)),
        (0.5, (1, 3)),
        (1.0, (4, 6)),
    ):
        before = model(inputs)
        adapter = SVFit(rank=None, energy=energy).attach(model)
        assert tuple(layer.shift.numel() for _, layer in adapter.layers()) == ranks
        assert torch.equal(model(inputs), before)
        adapter.detach()
    adapter = stir(SVFit(rank=None, energy=0.9).attach(model))
    adapter.save(tmp_path, form="modicum")
    expected = model(inputs)
    adapter.detach()
    again = load(model, tmp_path)
    assert [site.prepared for site in again.sites.values()] == [{"rank": 2}, {"rank": 6}]
    assert torch.equal(model(inputs), expected)


def test_on_meta_ranks_by_energy_are_bounded_by_widths() -> None:
    adapter = SVFit(rank=None).attach(llama("meta"))
    for site in adapter.sites.values():
        assert adapter.method.trained(site) == min(site.in_features, site.out_features)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (SVFit(rank=6), "above 5, the smaller width of the layer narrow"),
        (SVFit(rank=4), "above 2, the rank"),
    ],
)
def test_a_rank_that_a_layer_does_not_have_is_refused(value: SVFit, said: str) -> None:
    model = odd_model()
    with torch.no_grad():
        model.get_submodule("narrow").weight.copy_(with_values([2.0, 1.0], 5, 13))
    before, inputs = dict(model.named_parameters()), numbers(3, 7)
    outputs = model(inputs)
    with pytest.raises(InputError, match=said):
        value.attach(model)
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(inputs), outputs)


def test_embeddings_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 6))
    with pytest.raises(InputError, match="leave this one out"):
        SVFit(rank=2, targets=("0",)).attach(model)
    assert type(model[0]) is nn.Embedding


def test_a_file_has_two_bytes_a_value_and_says_which_basis(tmp_path: Path) -> None:
    model = odd_model()
    adapter = stir(SVFit(rank=4).attach(model))
    adapter.save(tmp_path, form="modicum", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "adapter.safetensors")
    sizes = {key.rpartition(".")[2]: value.nbytes for key, value in tensors.items()}
    assert sizes == {"shift": 4 * 2, "fingerprint": 4}
    assert "up" not in json.dumps(sorted(tensors))
    for (_, mine), (_, its) in zip(
        adapter.layers(), load(odd_model(), tmp_path).layers(), strict=True
    ):
        assert torch.equal(its.shift, mine.shift.bfloat16().float())
    with pytest.raises(InputError, match='form="modicum"'):
        adapter.save(tmp_path / "peft", form="peft", dtype=torch.bfloat16)


def test_it_is_worth_a_lora_of_its_rank_in_pefts_files(tmp_path: Path) -> None:
    model, inputs = odd_model(), numbers(3, 7)
    stir(SVFit(rank=4).attach(model)).save(tmp_path)
    other = odd_model()
    assert isinstance(load(other, tmp_path).method, LoRA)
    torch.testing.assert_close(other(inputs), model(inputs))
