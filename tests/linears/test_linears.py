from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.core.contracts.catalog import of_package
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import FORMS, LinearForm, form_of, register
from modicum.linears import NF4Linear, linear_form, make_linear

NAMES = sorted(record.name for record in of_package("modicum.linears"))


def test_dense_is_nn_linear_itself() -> None:
    layer = make_linear("dense", 6, 4, bias=True, device="meta", dtype=torch.bfloat16)
    assert type(layer) is nn.Linear
    assert layer.weight.shape == (4, 6)
    assert layer.weight.is_meta
    assert layer.bias.dtype == torch.bfloat16


@pytest.mark.parametrize("bias", [True, False])
def test_every_form_stands_for_the_weight_it_was_made_from(bias: bool) -> None:
    weight, offset = torch.randn(4, 6), torch.randn(4) if bias else None
    x = torch.randn(3, 6)
    for form in map(linear_form, NAMES):
        layer = form.from_dense(weight, offset)
        if form.why_not_dense() is not None:
            continue
        expected = nn.functional.linear(x, form.to_dense(layer), offset)
        assert torch.allclose(layer(x), expected, atol=1e-6)
        assert torch.equal(form.to_dense(layer), weight) == (form.name == "dense")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(6, 4, True), (129, 33, False), (1, 1, True)])
def test_every_form_says_what_its_layers_take(
    name: str, dtype: torch.dtype, sizes: tuple[int, int, bool]
) -> None:
    form, (columns, rows, bias) = linear_form(name), sizes
    layer = make_linear(name, columns, rows, bias, dtype=dtype)
    taken = sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))
    assert form.weight_bytes(columns, rows, bias, dtype.itemsize) == taken
    trained = [p for n, p in layer.named_parameters() if n != "bias" and p.requires_grad]
    assert bool(trained) == form.trains


def test_a_round_trip_copies_what_a_form_keeps_whole() -> None:
    weight = torch.randn(4, 6)
    assert torch.equal(linear_form("dense").round_trip(weight), weight)
    assert not torch.equal(linear_form("nf4").round_trip(weight), weight)


def test_a_layer_of_a_derived_class_has_the_form_of_its_base() -> None:
    class Derived(NF4Linear):
        pass

    assert form_of(Derived(4, 2)) is linear_form("nf4")
    assert form_of(nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2)) is linear_form("dense")
    assert form_of(nn.Embedding(4, 2)) is None


def test_dense_copies_nothing() -> None:
    weight = torch.randn(4, 6)
    layer = linear_form("dense").from_dense(weight, None)
    assert layer.weight.data_ptr() == weight.data_ptr()


def test_an_unknown_form_is_named_with_its_nearest_match() -> None:
    with pytest.raises(InputError, match=r"linear: .*'dens'.*Did you mean 'dense'") as caught:
        make_linear("dens", 2, 2, bias=False)
    assert caught.value.suggestion == "dense"


def test_a_later_form_needs_no_change_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.core.layers.linear_forms.FORMS", dict(FORMS))
    dense = linear_form("dense")
    register(LinearForm("mine", dense.make, dense.from_dense, dense.to_dense))
    assert type(make_linear("mine", 2, 3, bias=False)) is nn.Linear
    assert "mine" not in FORMS
