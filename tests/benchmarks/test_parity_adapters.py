"""The comparison with the `adapters` library, as far as it needs no other environment."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters.serial import SerialLayer
from modicum.proofs.contracts.adapters.subjects import numbers


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("parity_adapters")


def drawn(owner: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors as the library names them; two underscores stand for a point."""
    names = {name: f"{owner}.adapters.parity.{name.replace('__', '.')}" for name in shapes}
    return {names[name]: numbers(*shape, name=name) for name, shape in shapes.items()}


def layer_of(value: Any, state: dict[str, Tensor]) -> SerialLayer:
    block = nn.ModuleDict({"norm": nn.LayerNorm(12), "mlp": nn.Linear(12, 12)})
    adapter = value.with_fields(targets=("all-blocks",)).attach(nn.ModuleList([block]))
    adapter.load_state_dict(state)
    [(_, layer)] = adapter.layers()
    assert isinstance(layer, SerialLayer)
    return layer


def test_sums_of_kronecker_products_have_the_matrix_that_they_have_there(parity: Any) -> None:
    n, r, width, narrow = 2, 3, 12, 4
    rule = numbers(n, n, n, name="rule")
    theirs = {"model.shared_parameters.parity.phm_rule": rule} | drawn(
        "0",
        adapter_down__0__W_left=(n, width // n, r),
        adapter_down__0__W_right=(n, r, narrow // n),
        adapter_down__0__b=(narrow,),
        adapter_up__W_left=(n, narrow // n, r),
        adapter_up__W_right=(n, r, width // n),
        adapter_up__b=(width,),
    )
    value = parity.compacter(phm_dim=n, phm_rank=r, reduction_factor=width // narrow)
    layer = layer_of(value, parity.converted(theirs, {"0": "0"}))
    for which, inputs, applied in (("down.0", width, layer.down), ("up", narrow, layer.up)):
        own = {
            name: theirs[f"0.adapters.parity.adapter_{which}.{name}"] for name in ("W_left", "b")
        }
        products = own["W_left"] @ theirs[f"0.adapters.parity.adapter_{which}.W_right"]
        built = sum(torch.kron(rule[i], products[i]) for i in range(n))
        x = numbers(5, inputs)
        torch.testing.assert_close(applied(x), x @ built + own["b"], rtol=1e-5, atol=1e-5)


def test_plain_matrices_keep_their_layout(parity: Any) -> None:
    theirs = drawn(
        "0",
        adapter_down__0__weight=(4, 12),
        adapter_down__0__bias=(4,),
        adapter_up__weight=(12, 4),
        adapter_up__bias=(12,),
    )
    layer = layer_of(parity.bottleneck(bottleneck=4), parity.converted(theirs, {"0": "0"}))
    x, (weight, bias, *_) = numbers(5, 12), theirs.values()
    torch.testing.assert_close(layer.down(x), nn.functional.linear(x, weight, bias))


def test_names_that_are_not_known_are_no_comparison(parity: Any) -> None:
    known = drawn("layers.0.mlp", adapter_up__bias=(3,))
    places = {".mlp": ".ours"}
    assert list(parity.converted(known, places)) == ["layers.0.ours.up_bias"]
    for other in (drawn("layers.0.other", adapter_up__bias=(3,)), drawn("0.mlp", gate__bias=(3,))):
        with pytest.raises(ValueError, match="no tensor that is known here"):
            parity.converted(other, places)


def test_a_departure_must_be_seen_and_all_else_keep_the_bars(parity: Any) -> None:
    def found(outputs: float, gradients: float = 0.0, more: int = 0) -> dict[str, Any]:
        counts = {"trained_here": 3, "trained_there": 3 + more}
        return {"outputs": outputs, "gradients": gradients, "outputs_fp64": 0.0, **counts}

    def passed(**cases: dict[str, Any]) -> bool:
        summed = parity.summed(cases, {"other": "does otherwise"})
        assert summed["departures"]["other"]["what"] == "does otherwise"
        return bool(summed["passed"])

    assert passed(same=found(1e-7), other=found(1.0))
    assert passed(same=found(1e-7), other=found(0.0, gradients=1.0))
    assert not passed(same=found(1e-7), other=found(1e-7))
    assert not passed(same=found(1e-5), other=found(1.0))
    assert not passed(same=found(1e-7, gradients=1e-4), other=found(1.0))
    assert not passed(same=found(1e-7, more=1), other=found(1.0))


def test_every_case_is_of_one_width_in_both(parity: Any) -> None:
    for name, case in parity.cases().items():
        asked = case.asked()
        narrow = parity.WIDTH // asked["fields"]["reduction_factor"]
        assert narrow == parity.NARROW, name
        assert parity.WIDTH in asked["sizes"].values(), name
