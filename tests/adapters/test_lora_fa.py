"""LoRA-FA's gradients, what it keeps for the backward pass, and PEFT's files and optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, LoRAFA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import AdapterQuery
from modicum.core.contracts.ledger import ModelQuery
from modicum.core.errors import InputError
from modicum.proofs.adapters.peft_lora_fa import differences
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir, tokens


def model() -> nn.Sequential:
    """Two layers, [..., 12] to [..., 10]."""
    made = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 10))
    for name, parameter in made.named_parameters():
        parameter.data.copy_(numbers(*parameter.shape, name=name))
    return made


def gradients(adapter: AttachedAdapter) -> dict[str, Tensor]:
    """Those of the factors for one batch; none are left behind."""
    made = adapter.model
    made.zero_grad()
    made(numbers(6, 12)).square().sum().backward()
    return {name: p.grad.clone() for name, p in adapter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_uncorrected_it_is_lora_with_the_gradient_of_b_alone(alpha: float | None) -> None:
    ours = stir(LoRAFA(rank=3, alpha=alpha, correct=False).attach(model()))
    lora = LoRA(rank=3, alpha=alpha).attach(model())
    with torch.no_grad():
        for (_, one), (_, other) in zip(ours.layers(), lora.layers(), strict=True):
            other.A.copy_(one.A)
            other.B.copy_(one.B)
    found, expected = gradients(ours), gradients(lora)
    assert found.keys() == {name for name in expected if name.endswith(".B")}
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("init", ["kaiming", "gaussian", "orthogonal"])
def test_the_change_follows_the_full_gradient_projected_onto_the_rows_of_a(init: str) -> None:
    adapter = LoRAFA(rank=4, alpha=6.0, init=init).attach(model())
    full = model()
    full(numbers(6, 12)).square().sum().backward()
    for (name, layer), value in zip(adapter.layers(), gradients(adapter).values(), strict=True):
        weight = full.get_submodule(name).weight.grad
        projector = layer.A.T @ torch.linalg.pinv(layer.A @ layer.A.T) @ layer.A
        moved = 1.5 * value @ layer.A
        torch.testing.assert_close(moved, weight @ projector, rtol=1e-5, atol=1e-5 * weight.norm())


def test_rows_are_orthonormal_and_distributions_are_as_said() -> None:
    for init, spread in (("kaiming", 1 / (3 * 400) ** 0.5), ("gaussian", 1 / 8)):
        adapter = LoRAFA(rank=8, init=init).attach(nn.Sequential(nn.Linear(400, 8)))
        [(_, layer)] = adapter.layers()
        assert layer.A.std().item() == pytest.approx(spread, rel=0.05)
        assert layer.A.mean().abs() < spread / 10
    [(_, layer)] = (
        LoRAFA(rank=8, init="orthogonal").attach(nn.Sequential(nn.Linear(40, 8))).layers()
    )
    torch.testing.assert_close(layer.A @ layer.A.T, torch.eye(8), rtol=0, atol=1e-6)
    assert dict(layer.named_buffers()).keys() == {"A", "seed"}


def test_the_correction_commutes_with_micro_batches_and_recomputation() -> None:
    made, ids = llama(), tokens(4)
    adapter = stir(LoRAFA(rank=4).attach(made))
    made(ids).square().sum().backward()
    full = [p.grad.clone() for p in adapter.parameters()]
    made.zero_grad()
    made.recompute = True
    for part in ids.split(1):
        made(part).square().sum().backward()
    for value, parameter in zip(full, adapter.parameters(), strict=True):
        # The correction turns what sums round in another order, by as much as A A^T is uneven.
        off = 1e-4 * value.abs().max().item()
        torch.testing.assert_close(parameter.grad, value, rtol=1e-4, atol=off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thin_values_are_all_that_is_kept(dtype: torch.dtype) -> None:
    rows, rank = 64, 4
    layer = nn.Sequential(nn.Linear(48, 40, dtype=dtype))
    adapter = LoRAFA(rank=rank, dropout=0.25).attach(layer)
    apart = [*layer.parameters(), *layer.buffers()]
    inputs = numbers(rows, 48, dtype=dtype).requires_grad_()
    for training in (False, True):
        layer.train(training)
        with saved_bytes(apart) as saved:
            layer(inputs)
        site = adapter.sites["0"]
        at = AdapterQuery(site, ModelQuery(1, rows, compute_bytes=dtype.itemsize))
        thin = rows * rank * 4 + training * rows * rank // 8
        assert saved.total == thin  # in the factors' precision, which is more than bf16
        assert adapter.method.dropout_bytes(at) == rows * rank // 8


def test_dropout_is_of_the_thin_product_and_gradients_are_those_of_what_was_dropped() -> None:
    adapter = stir(LoRAFA(rank=4, dropout=0.5, correct=False).attach(model().double()))
    adapter.model.double()

    def output(inputs: Tensor, b: Tensor) -> Tensor:
        torch.manual_seed(0)
        given = {"0.layers_by_adapter.default.B": b}
        result = torch.func.functional_call(adapter.model, given, (inputs,))
        assert isinstance(result, Tensor)
        return result

    b = adapter.model[0].layers_by_adapter["default"].B
    inputs = numbers(3, 12, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(output, (inputs, b))
    dropped = output(inputs, b)
    adapter.model.eval()
    assert not torch.equal(output(inputs, b), dropped)


def test_a_peft_file_has_a_and_can_be_continued(tmp_path: Path) -> None:
    adapter = stir(LoRAFA(rank=4, alpha=6.0).attach(llama(), seed=3))
    adapter.save(tmp_path, form="peft")
    again = llama()
    plain = load(llama(), tmp_path)
    assert type(plain.method) is LoRA
    twin = load(again, tmp_path, method="lora_fa", train=True)
    assert twin.method.init == "stored"
    assert [name for name, _ in twin.named_parameters()] == [
        n for n, _ in adapter.named_parameters()
    ]
    for one, other in zip(adapter.layers(), twin.layers(), strict=True):
        assert torch.equal(one[1].A, other[1].A)
        torch.testing.assert_close(one[1].correction, other[1].correction)
    again.bfloat16()
    assert next(twin.layers())[1].correction.dtype == torch.float32
    twin.save(tmp_path / "own", form="modicum")
    kept = load(llama(), tmp_path / "own")
    assert kept.method.init == "stored"
    assert torch.equal(next(kept.layers())[1].A, next(twin.layers())[1].A.float())


def test_what_cannot_be_is_refused_and_leaves_the_model(tmp_path: Path) -> None:
    made = odd_model()
    before = [type(module) for module in made.modules()]
    with pytest.raises(InputError, match="above 5, the smaller width of the layer narrow"):
        LoRAFA(rank=6).attach(made)
    with pytest.raises(InputError, match="takes frozen tensors from a file"):
        LoRAFA(rank=2, init="stored").attach(made)
    assert [type(module) for module in made.modules()] == before
    decoder = llama()
    with pytest.raises(InputError, match="this is an embedding"):
        LoRAFA(rank=2, targets=("embed_tokens",)).attach(decoder)
    LoRA(rank=2).attach(decoder).save(tmp_path, form="modicum")
    with pytest.raises(InputError, match="mos cannot continue it"):
        load(llama(), tmp_path, method="mos")


@pytest.mark.expensive
@pytest.mark.filterwarnings("ignore")
def test_twenty_updates_are_those_of_peft() -> None:
    pytest.importorskip("peft")
    found = differences(correct=True)
    assert found.loss < 1e-4
    assert found.factor < 1e-4
    assert differences(correct=False).factor > 1e-2
