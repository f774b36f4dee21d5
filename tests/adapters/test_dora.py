"""DoRA: norms without a matrix, dropped inputs, zero rows, gradients, and PEFT's files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import DoRA, LoRA, PiSSA, load
from modicum.adapters.dora import DoRALayer
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import full_weight, linear_form

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

FORMS = ["dense", "nf4", "int8", "fp16", "tiles"]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stirred(model: nn.Module, value: DoRA) -> DoRALayer:
    adapter = value.attach(model)
    with torch.no_grad():
        for place, parameter in enumerate(adapter.parameters()):
            parameter.add_(0.3 * numbers(*parameter.shape, seed=place))
    layer = next(layer for _, layer in adapter.layers())
    assert isinstance(layer, DoRALayer)
    return layer


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_those_of_the_dense_matrix(form: str) -> None:
    base = linear_form(form).from_dense(numbers(24, 64), numbers(24))
    model = nn.Sequential(base).requires_grad_(False)
    weight = full_weight(base)
    layer = stirred(model, DoRA(rank=3, alpha=5.0, targets=("0",)))
    changed = weight.double() + layer.delta().double()
    torch.testing.assert_close(layer.norms().double(), changed.norm(dim=1), rtol=1e-6, atol=0)
    inputs, bias = numbers(5, 64), base.bias.double()
    factor = layer.magnitude.double() / changed.norm(dim=1)
    expected = F.linear(inputs.double(), factor[:, None] * changed, bias)
    torch.testing.assert_close(model(inputs).double(), expected, rtol=2e-6, atol=2e-5)


def test_norms_of_a_base_in_bf16_are_near_the_dense_ones() -> None:
    model = nn.Sequential(nn.Linear(64, 24)).to(torch.bfloat16)
    weight = model[0].weight.detach().double()
    layer = stirred(model, DoRA(rank=3))
    expected = (weight + layer.delta().double()).norm(dim=1)
    torch.testing.assert_close(layer.norms().double(), expected, rtol=4e-3, atol=0)


def test_a_row_of_zeros_stays_zero_and_finite() -> None:
    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    with torch.no_grad():
        model[0].weight[1] = 0
    adapter = DoRA(rank=2).attach(model)
    outputs = model(numbers(4, 6))
    outputs.square().sum().backward()
    assert torch.equal(outputs[:, 1], torch.zeros(4))
    assert all(parameter.grad.isfinite().all() for parameter in adapter.parameters())
    adapter.merge()
    assert torch.equal(model[0].weight[1], torch.zeros(6))


def test_dropout_drops_what_the_grown_rows_read_too() -> None:
    model = nn.Sequential(nn.Linear(6, 4))
    weight, bias = model[0].weight.detach(), model[0].bias.detach()
    layer = stirred(model, DoRA(rank=2, dropout=0.4)).train()
    inputs = numbers(5, 6)
    torch.manual_seed(3)
    outputs = model(inputs)
    torch.manual_seed(3)
    dropped, _ = torch.native_dropout(inputs, 0.4, True)
    k = layer.magnitude / (weight + layer.delta()).norm(dim=1)
    expected = F.linear(inputs, weight, bias) + (k - 1) * (dropped @ weight.T)
    expected = expected + k * (dropped @ layer.delta().T)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_go_through_the_norm_only_where_asked(bias: bool) -> None:
    def made(through: bool) -> tuple[nn.Module, DoRALayer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4, bias=bias)).double()
        return model, stirred(model, DoRA(rank=2, through_norm=through))

    inputs = numbers(5, 6).double()
    for through in (True, False):
        model, layer = made(through)
        weight = model[0].weight
        model(inputs).square().sum().backward()
        a, b, magnitude = (p.detach().clone().requires_grad_() for p in layer.parameters())
        changed = weight + layer.scale * (b @ a)
        norm = changed.norm(dim=1)
        k = magnitude / (norm if through else norm.detach())
        F.linear(inputs, k[:, None] * changed, model[0].bias).square().sum().backward()
        for own, reference in zip(layer.parameters(), (a, b, magnitude), strict=True):
            torch.testing.assert_close(own.grad, reference.grad)


def test_another_base_weight_gives_other_norms() -> None:
    model, other = nn.Sequential(nn.Linear(6, 4)), nn.Sequential(nn.Linear(6, 4))
    stirred(model, DoRA(rank=2))
    twin = DoRA(rank=2).attach(other)
    other.load_state_dict(model.state_dict())
    inputs = numbers(3, 6)
    torch.testing.assert_close(other(inputs), model(inputs), rtol=0, atol=1e-6)
    first = next(layer for _, layer in twin.layers())
    assert torch.equal(first.magnitude_0, model[0].weight.norm(dim=1))


def test_a_state_of_the_base_alone_moves_no_trained_magnitude() -> None:
    model, fresh, inputs = *(nn.Sequential(nn.Linear(6, 4)) for _ in range(2)), numbers(3, 6)
    stirred(model, DoRA(rank=2))
    expected, state = model(inputs), model.state_dict()
    base = {name: value for name, value in state.items() if "layers_by_adapter" not in name}
    model.load_state_dict(base, strict=False)
    assert torch.equal(model(inputs), expected)
    [(_, layer)] = DoRA(rank=2).attach(fresh).layers()
    fresh.load_state_dict(base, strict=False)  # it has not moved, so it starts at these norms
    assert torch.equal(layer.magnitude, base["0.weight"].norm(dim=1))
    plain = F.linear(inputs, base["0.weight"], base["0.bias"])
    torch.testing.assert_close(fresh(inputs), plain, rtol=0, atol=1e-6)


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)
    return transformers.LlamaForCausalLM(config).eval()


IDS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("rooted", [False, True])
def test_peft_reads_what_is_saved_and_the_reverse(tmp_path: Path, rooted: bool) -> None:
    ours = llama()
    value = DoRA(rank=4, alpha=6.0, rank_stabilized=rooted, targets=("q_proj", "down_proj"))
    adapter = value.attach(ours)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1 * numbers(*parameter.shape))
    adapter.save(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, ours(IDS).logits, rtol=0, atol=2e-6)
    theirs.save_pretrained(tmp_path / "theirs")
    again = llama()
    back = load(again, tmp_path / "theirs")
    assert isinstance(back.method, DoRA)
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, ours(IDS).logits, rtol=0, atol=2e-6)


def test_lora_of_a_stabilized_rank_is_scaled_by_its_root() -> None:
    assert LoRA(rank=16, alpha=8.0, rank_stabilized=True).scale == 2.0
    assert LoRA(rank=16, rank_stabilized=True).scale == LoRA(rank=16).scale == 1.0


def with_two(first: DoRA | LoRA, second: DoRA | LoRA) -> tuple[nn.Module, Any, Any]:
    """A layer with two trained adapters, of which the second is active."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8))
    made = [value.attach(model, name=name) for value, name in ((first, "a"), (second, "b"))]
    with torch.no_grad():
        for adapter in made:
            for place, parameter in enumerate(adapter.parameters()):
                parameter.add_(0.3 * numbers(*parameter.shape, seed=place))
    made[1].activate()
    return model, *made


def test_two_are_not_both_the_first() -> None:
    model, before, dora = with_two(DoRA(rank=2), DoRA(rank=2))
    inputs = numbers(3, 12)
    alone = model(inputs)
    before.activate()
    with pytest.raises(InputError, match="merge or deactivate that one"):
        dora.activate(alone=False)
    assert before.active
    assert not dora.active
    dora.activate()
    assert torch.equal(model(inputs), alone)


def test_a_weight_of_which_another_has_a_part_is_refused() -> None:
    model = nn.Sequential(nn.Linear(12, 8))
    pissa = PiSSA(rank=2).attach(model, name="pissa")
    inputs = numbers(3, 12)
    before = model(inputs)
    with pytest.raises(InputError, match="of which pissa has taken a part"):
        DoRA(rank=2).attach(model)
    assert pissa.active
    assert torch.equal(model(inputs), before)


def test_it_is_applied_before_others_and_merged_before_them() -> None:
    model, lora, dora = with_two(LoRA(rank=2), DoRA(rank=2))
    inputs = numbers(3, 12)
    dora.activate()
    lora.activate(alone=False)
    both = model(inputs)
    lora.activate()
    dora.activate(alone=False)
    assert torch.equal(model(inputs), both)
    dora.merge()
    torch.testing.assert_close(model(inputs), both, rtol=0, atol=1e-5)
    lora.merge()
    torch.testing.assert_close(model(inputs), both, rtol=0, atol=1e-5)


def test_norms_are_of_the_weight_that_another_was_merged_into() -> None:
    model, lora, dora = with_two(LoRA(rank=2), DoRA(rank=2))
    layer = next(layer for _, layer in dora.layers())
    inputs, norms = numbers(3, 12), layer.norms()
    alone = model(inputs)
    with pytest.raises(InputError, match="merge that one first"):
        lora.merge()
    dora.deactivate()
    lora.merge()
    dora.activate(alone=False)
    changed = model[0].weight + layer.delta()
    torch.testing.assert_close(layer.norms(), changed.norm(dim=1))
    adapted = model(inputs)
    dora.merge()
    torch.testing.assert_close(model(inputs), adapted, rtol=0, atol=1e-5)
    dora.unmerge()
    lora.unmerge()
    dora.activate()
    torch.testing.assert_close(layer.norms(), norms)
    torch.testing.assert_close(model(inputs), alone, rtol=0, atol=1e-5)
