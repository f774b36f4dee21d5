from __future__ import annotations

import pytest
import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.linears import FORMS, LinearForm, linear_form, make_linear, register


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
    for form in FORMS.values():
        layer = form.from_dense(weight, offset)
        expected = nn.functional.linear(x, form.to_dense(layer), offset)
        assert torch.allclose(layer(x), expected, atol=1e-6)
        assert torch.equal(form.to_dense(layer), weight) == (form.name == "dense")


def test_dense_copies_nothing() -> None:
    weight = torch.randn(4, 6)
    layer = linear_form("dense").from_dense(weight, None)
    assert layer.weight.data_ptr() == weight.data_ptr()


def test_an_unknown_form_is_named_with_its_nearest_match() -> None:
    with pytest.raises(InputError, match=r"linear: .*'dens'.*Did you mean 'dense'") as caught:
        make_linear("dens", 2, 2, bias=False)
    assert caught.value.suggestion == "dense"


def test_a_later_form_needs_no_change_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.core.linear_forms.FORMS", dict(FORMS))
    dense = linear_form("dense")
    register(LinearForm("mine", dense.make, dense.from_dense, dense.to_dense))
    assert type(make_linear("mine", 2, 3, bias=False)) is nn.Linear
    assert "mine" not in FORMS
