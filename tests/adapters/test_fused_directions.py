"""An update along fixed directions next to a frozen product: what it computes and keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from modicum.adapters import RandLoRA
from modicum.adapters.base import Adapter, AdapterQuery
from modicum.adapters.fused_directions import plus_directions
from modicum.adapters.loldu import LoLDU
from modicum.adapters.salt import SALT, SALTLayer
from modicum.adapters.svfit import SVFit
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.layers.linear_forms import linear_form
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import numbers, stir

ROWS, IN, OUT = 10, 64, 48


def adapted(value: Adapter, form: str = "dense") -> nn.Module:
    weight, bias = numbers(OUT, IN, name="weight") * 0.2, numbers(OUT, name="bias")
    model = nn.Sequential(nn.Linear(IN, OUT))
    if form == "dense":
        with torch.no_grad():
            model[0].weight.copy_(weight)
            model[0].bias.copy_(bias)
    else:
        model[0] = linear_form(form).from_dense(weight, bias)
    stir(value.attach(model, weights=lambda name: weight))
    return model


@pytest.mark.parametrize("form", ["dense", "nf4", "int8"])
@pytest.mark.parametrize("rank", [5, OUT])
def test_it_is_what_plain_operations_compute(rank: int, form: str) -> None:
    model = adapted(SVFit(rank=rank), form)
    [layer] = model[0].layers_by_adapter.values()
    inputs, towards = numbers(2, 5, IN).requires_grad_(), numbers(2, 5, OUT, name="towards")
    outputs = model(inputs)
    (outputs * towards).sum().backward()
    shift = layer.shift.detach().clone().requires_grad_()
    again = inputs.detach().clone().requires_grad_()
    thin = F.linear(again, layer.down) * shift
    expected = model[0].plain(again) + F.linear(thin, layer.up)
    (expected * towards).sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.grad, again.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.shift.grad, shift.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [5, OUT])
@pytest.mark.parametrize("form", ["dense", "nf4"])
def test_dropout_is_torchs_own(form: str, rank: int) -> None:
    model = adapted(SVFit(rank=rank, dropout=0.4), form).train()
    [layer] = model[0].layers_by_adapter.values()
    inputs = numbers(ROWS, IN).requires_grad_()
    torch.manual_seed(3)
    outputs = model(inputs)
    outputs.square().sum().backward()
    again, shift = inputs.detach().clone().requires_grad_(), layer.shift.detach().clone()
    shift.requires_grad_()
    torch.manual_seed(3)
    thin = F.linear(F.dropout(again, 0.4), layer.down) * shift
    expected = model[0].plain(again) + F.linear(thin, layer.up)
    expected.square().sum().backward()
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.grad, again.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.shift.grad, shift.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (SVFit(rank=5), 4 * 5 * ROWS),
        (SVFit(rank=5, dropout=0.3), 4 * 5 * ROWS + ROWS * IN // 8),
        (LoLDU(), 4 * IN * ROWS),
        (LoLDU(dropout=0.3), 4 * IN * ROWS + ROWS * IN // 8),
    ],
    ids=["thin", "thin dropped", "built", "built dropped"],
)
def test_what_is_kept_for_the_backward_pass(value: SVFit | LoLDU, expected: int) -> None:
    model = adapted(value).train()
    with saved_bytes([*model.parameters(), *model.buffers()]) as saved:
        model(numbers(ROWS, IN).requires_grad_()).sum()
    assert saved.total == expected


@pytest.mark.parametrize(
    ("value", "std"),
    [(SVFit(rank=OUT), 2.0), (SALT(rank=3, product="built"), 0.3)],
    ids=["alone", "with a pair"],
)
def test_below_fp32_a_large_weight_does_not_swallow_what_is_built(
    value: Adapter, std: float
) -> None:
    model = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(100 + 0.2 * numbers(OUT, IN, name="weight"))
    adapter = stir(value.attach(model), std)
    [(_, layer)] = adapter.layers()
    if isinstance(layer, SALTLayer):
        layer.gain.data.zero_()  # it is times singular values, of which one is large
    # Rows that sum to zero, of numbers that bf16 has, see nothing of the 100.
    given, towards = (
        torch.cat([half, -half], 1)
        for half in (numbers(ROWS, width // 2).mul(8).round() / 8 for width in (IN, OUT))
    )

    def run() -> tuple[Tensor, Tensor]:
        inputs = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        (outputs.float() * towards).sum().backward()
        assert inputs.grad is not None
        return outputs.detach().float(), inputs.grad

    with adapter.disabled():
        before = run()
    delta = layer.delta().detach()
    expected = given @ delta.T, towards @ delta
    for found, one, wanted in zip(run(), before, expected, strict=True):
        assert (found - one - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize(
    "value",
    [SVFit(rank=OUT), SALT(rank=3, product="built"), RandLoRA(rank=4, product="built")],
    ids=lambda value: value.info.name,
)
def test_below_fp32_what_is_built_spends_what_its_ledger_says(value: Adapter) -> None:
    model = adapted(value)
    [layer] = model[0].layers_by_adapter.values()
    # The counter knows `addmm` and not its in-place form, which does the same work.
    in_place = {
        torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1],
    }
    forward, backward = (FlopCounterMode(display=False, custom_mapping=in_place) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16), forward:
        outputs = model(numbers(ROWS, IN).requires_grad_())
    with backward:
        outputs.float().sum().backward()
    frozen = 2 * ROWS * IN * OUT
    counted = tuple(each.get_total_flops() - frozen for each in (forward, backward))
    full, half = (
        value.operations(AdapterQuery(layer.site, ModelQuery(1, ROWS, compute_bytes=count)))
        for count in (4, 2)
    )
    assert counted == half
    assert half == tuple(each + frozen for each in full)


def test_layers_that_read_one_tensor_keep_it_once_with_dropout_too() -> None:
    one, other = (adapted(LoLDU(dropout=0.3)).train() for _ in range(2))
    apart = [tensor for model in (one, other) for tensor in (*model.parameters(), *model.buffers())]
    inputs = numbers(ROWS, IN).requires_grad_()
    with saved_bytes(apart) as saved:
        (one(inputs) + other(inputs)).sum()
    assert saved.total == 4 * IN * ROWS + 2 * (ROWS * IN // 8)


@pytest.mark.parametrize("value", [SVFit(rank=5), LoLDU()], ids=["thin", "built"])
def test_transforms_and_second_derivatives(value: SVFit | LoLDU) -> None:
    model = adapted(value)
    inputs = numbers(ROWS, IN)
    each = torch.func.vmap(lambda row: model(row))(inputs)
    torch.testing.assert_close(each, model(inputs), rtol=1e-5, atol=1e-5)
    [shift] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(model(inputs).square().sum(), shift, create_graph=True)


@pytest.mark.parametrize("built", [False, True])
def test_next_to_a_layer_that_is_no_frozen_product(built: bool) -> None:
    up, down, d = numbers(4, 3, name="up"), numbers(3, 6, name="down"), numbers(3, name="d")
    d.requires_grad_()

    def base(x: Tensor) -> Tensor:
        return x[..., :4].tanh()

    inputs: Tensor = numbers(2, 6)
    run: Callable[[Tensor], Tensor] = base
    outputs = plus_directions(inputs, run, d, down, up, built=built)
    expected = base(inputs) + inputs @ (up * d @ down).T
    torch.testing.assert_close(outputs, expected)
    [found] = torch.autograd.grad(outputs.square().sum(), d)
    [known] = torch.autograd.grad(expected.square().sum(), d)
    torch.testing.assert_close(found, known)
