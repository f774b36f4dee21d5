"""RandLoRA's sum of bases, its two products, its gradients and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import RandLoRA, load
from modicum.adapters.adapter_layer import AdapterLayer
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.randlora import GAMMA, LAMBDA
from modicum.core.errors import InputError
from modicum.proofs.bench.meters import saved_bytes
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

SHAPES = [(7, 12), (12, 7), (8, 8)]  # widths that a rank of 3 does not divide


def attached(
    ins: int, outs: int, dtype: torch.dtype = torch.float32, **fields: Any
) -> AttachedAdapter:
    model = nn.Sequential(nn.Linear(ins, outs, dtype=dtype))
    return stir(RandLoRA(**({"rank": 3} | fields)).attach(model))


def the_layer(adapter: AttachedAdapter) -> AdapterLayer:
    [(_, layer)] = adapter.layers()
    return layer


def explicit(adapter: AttachedAdapter) -> Tensor:
    """The paper's sum, basis by basis, transposed where the output is the smaller side."""
    layer, rank = the_layer(adapter), adapter.method.rank
    scales, gains = layer.get_parameter(LAMBDA), layer.get_parameter(GAMMA)
    a, b = adapter.shared.get_buffer("A"), adapter.shared.get_buffer("B")
    count = math.ceil(min(layer.site.in_features, layer.site.out_features) / rank)
    assert scales.shape[0] == gains.shape[0] == count
    total = torch.zeros(b.shape[1], a.shape[1])
    for i in range(count):
        basis = b[i * rank : (i + 1) * rank].T
        total = total + basis @ torch.diag(scales[i]) @ a @ torch.diag(gains[i])
    total = total * 2 * rank / (rank * math.sqrt(count))
    return total if layer.site.in_features <= layer.site.out_features else total.T


@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_the_change_is_the_explicit_sum(ins: int, outs: int) -> None:
    adapter = attached(ins, outs)
    layer = the_layer(adapter)
    torch.testing.assert_close(layer.delta(), explicit(adapter), rtol=1e-5, atol=1e-5)
    count, width = math.ceil(min(ins, outs) / 3), min(ins, outs)
    assert adapter.method.trained(layer.site) == count * (3 + width)
    assert sum(p.numel() for p in adapter.parameters()) == count * (3 + width)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("product", ["built", "factored", "auto"])
@pytest.mark.parametrize("pairing", ["basis", "rank"])
@pytest.mark.parametrize(("ins", "outs"), SHAPES)
def test_outputs_and_gradients_are_those_of_the_naive_expression(
    ins: int, outs: int, pairing: str, product: str, dropout: float
) -> None:
    adapter = attached(ins, outs, pairing=pairing, product=product, dropout=dropout)
    layer, inputs = the_layer(adapter), numbers(5, ins).requires_grad_()
    up = numbers(5, outs, name="up")
    torch.manual_seed(1)
    output = adapter.model(inputs)
    (output * up).sum().backward()
    found = [inputs.grad, *(p.grad for p in layer.parameters())]
    inputs.grad = None
    adapter.model.zero_grad()
    torch.manual_seed(1)
    seen = torch.native_dropout(inputs, dropout, True)[0] if dropout else inputs
    base = adapter.model[0]
    naive = nn.functional.linear(inputs, base.weight, base.bias) + seen @ layer.delta().T
    (naive * up).sum().backward()
    torch.testing.assert_close(output, naive, rtol=1e-5, atol=1e-5)
    for one, other in zip(found, [inputs.grad, *(p.grad for p in layer.parameters())], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_the_rank_grows_by_training_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    adapter = RandLoRA(rank=8).attach(model)
    layer, target = the_layer(adapter), torch.linalg.qr(torch.randn(64, 64))[0]
    optimizer = torch.optim.Adam(adapter.parameters(), lr=1e-2)
    ranks = []
    for step in range(3):
        (layer.delta() - target).square().sum().backward()
        assert bool(layer.get_parameter(GAMMA).grad.any()) == (step > 0)
        optimizer.step()
        optimizer.zero_grad()
        ranks.append(int(torch.linalg.matrix_rank(layer.delta(), rtol=1e-4)))
    assert 0 < ranks[0] <= 8 < ranks[1] <= ranks[2]


def test_bases_are_shared_drawn_and_of_unit_variance() -> None:
    for bases, values in (("uniform", None), ("sparse", [-(3**0.5), 0.0, 3**0.5])):
        adapter = RandLoRA(rank=2, bases=bases).attach(llama(), seed=4)
        for name, shape in (("A", (2, 16)), ("B", (16, 24))):
            drawn = adapter.shared.get_buffer(name)
            assert drawn.shape == shape
            if name == "B":
                assert drawn.square().mean().item() == pytest.approx(1.0, rel=0.15)
            if values is not None:
                assert set(drawn.unique().tolist()) == set(torch.tensor(values).tolist())
    held = [name for name, _ in adapter.model.named_buffers() if name.endswith((".A", ".B"))]
    assert held == ["shared_by_default.A", "shared_by_default.B"]
    assert not [name for name in adapter.state_dict() if name.endswith((".A", ".B"))]


@pytest.mark.parametrize("product", ["built", "factored"])
def test_nothing_of_the_size_of_a_matrix_is_kept(product: str) -> None:
    rows = 6
    for ins, outs in SHAPES:
        adapter = attached(ins, outs, product=product)
        apart = [*adapter.model.parameters(), *adapter.model.buffers()]
        inputs = numbers(rows, ins).requires_grad_()
        with saved_bytes(apart) as saved:
            adapter.model(inputs)
        site = adapter.sites["0"]
        thin = adapter.method.saved_elements(site) or ins
        assert saved.total == 4 * rows * thin
        assert (thin == ins) == adapter.method.saves_input(site)


@pytest.mark.parametrize(("ins", "outs"), [(32, 48), (48, 32)])
def test_below_fp32_a_large_weight_does_not_swallow_what_is_built(ins: int, outs: int) -> None:
    adapter = attached(ins, outs, rank=4, product="built")
    model, delta = adapter.model, the_layer(adapter).delta().detach()
    with torch.no_grad():
        model[0].weight.fill_(100.0)
        model[0].bias.zero_()
    # Rows that sum to zero, of numbers that bf16 has, see nothing of the 100.
    given, towards = (
        torch.cat([half, -half], 1)
        for half in (numbers(6, width // 2).mul(8).round() / 8 for width in (ins, outs))
    )
    inputs = given.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(inputs)
    (outputs.float() * towards).sum().backward()
    for found, wanted in ((outputs, given @ delta.T), (inputs.grad, towards @ delta)):
        assert (found.float() - wanted).norm() < 0.03 * wanted.norm()


def test_few_positions_are_factored_and_many_built() -> None:
    method = RandLoRA(rank=4)
    site = attached(64, 64, rank=4).sites["0"]
    chosen = [method.builds(site, positions, dropout=0.0) for positions in (8, 40, 56, 400)]
    assert chosen == [False, False, True, True]  # the bound is 3/4 of the width
    for positions in (40, 56):
        works = {built: sum(method._work(site, positions, built, 0.0)) for built in (True, False)}
        assert method.builds(site, positions, dropout=0.0) == (works[True] < works[False])


def test_each_departure_of_peft_is_a_field() -> None:
    ours = the_layer(RandLoRA(rank=3).attach(nn.Sequential(nn.Linear(7, 12))))
    torch.testing.assert_close(ours.get_parameter(GAMMA), torch.full((3, 7), 1 / 12))
    assert ours.method.rule(ours.site).scale == pytest.approx(2 / 3**0.5)
    value = RandLoRA(rank=3, alpha=60.0, scaling="rank", gamma_start="short", pairing="rank")
    theirs = the_layer(value.attach(nn.Sequential(nn.Linear(7, 12))))
    torch.testing.assert_close(theirs.get_parameter(GAMMA), torch.full((3, 7), 1 / 7))
    assert theirs.method.rule(theirs.site).scale == 20.0


def test_what_cannot_be_is_refused_and_leaves_the_model() -> None:
    made = odd_model()
    before = [type(module) for module in made.modules()]
    with pytest.raises(InputError, match="above 5, the smaller width of narrow; lower it, which"):
        RandLoRA(rank=6).attach(made)
    with pytest.raises(InputError, match="takes frozen tensors from a file"):
        RandLoRA(rank=2, bases="stored").attach(made)
    assert [type(module) for module in made.modules()] == before
    with pytest.raises(InputError, match="this is an embedding"):
        RandLoRA(rank=2, targets=("embed_tokens",)).attach(llama())


def test_built_and_factored_train_alike() -> None:
    losses = {}
    for product in ("built", "factored"):
        model, ids = llama(), tokens(4)
        adapter = RandLoRA(rank=4, product=product).attach(model)
        optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
        losses[product] = []
        for _ in range(6):
            loss = model(ids).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[product].append(loss.item())
    assert losses["built"] == pytest.approx(losses["factored"], rel=1e-3)
    assert losses["built"][-1] < 0.9 * losses["built"][0]


def both_of_peft(folder: Path, rank: int = 3) -> tuple[nn.Module, nn.Module, Any]:
    """A model with PEFT's RandLoRA on it, saved to a folder, and the plain one."""
    peft = pytest.importorskip("peft")
    plain, theirs = hugging_face_llama(), hugging_face_llama()
    config = peft.RandLoraConfig(r=rank, randlora_alpha=4 * rank, target_modules="all-linear")
    adapted = peft.get_peft_model(theirs, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * numbers(*parameter.shape, name=name))
    adapted.save_pretrained(folder)
    return plain, adapted, peft


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_peft_computes_what_it_does_there_and_goes_back(tmp_path: Path) -> None:
    plain, theirs, peft = both_of_peft(tmp_path / "theirs")
    ids = tokens()
    expected = theirs(ids).logits
    ours = load(plain, tmp_path / "theirs", train=True)
    assert (ours.method.bases, ours.method.pairing) == ("stored", "rank")
    torch.testing.assert_close(plain(ids).logits, expected, rtol=1e-5, atol=1e-5)
    for model in (plain, theirs):
        model(ids).logits.square().mean().backward()
    for name, layer in ours.layers():
        twin = theirs.get_submodule(f"base_model.model.{name}")
        for own, other in ((LAMBDA, twin.randlora_lambda), (GAMMA, twin.randlora_gamma)):
            gradient = layer.get_parameter(own).grad
            assert gradient is not None
            wanted = other["default"].grad
            wanted = wanted.T if own == LAMBDA else wanted
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    ours.save(tmp_path / "ours")
    again = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path / "ours")
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-5, atol=1e-5)
    ours.save(tmp_path / "own", form="modicum")
    kept = hugging_face_llama()
    load(kept, tmp_path / "own")
    assert torch.equal(kept(ids).logits, plain(ids).logits)


@pytest.mark.filterwarnings("ignore")
def test_drawn_here_it_is_read_by_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = hugging_face_llama(), tokens()
    adapter = stir(RandLoRA(rank=3, pairing="rank").attach(model), 0.05)
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(hugging_face_llama(), tmp_path)
    torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-5, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
def test_files_that_peft_would_read_otherwise_are_refused(tmp_path: Path) -> None:
    adapter = RandLoRA(rank=3).attach(hugging_face_llama())
    with pytest.raises(
        InputError, match='pairs the columns of RandLoRA\'s bases as pairing="rank"'
    ):
        adapter.save(tmp_path / "paper", form="peft")
    adapter.save(tmp_path / "paper")
    assert (tmp_path / "paper" / "modicum_adapter.json").exists()
    folder = tmp_path / "theirs"
    both_of_peft(folder)
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    whole, said = load_file(weights), json.loads(config.read_text())
    lacking = {key: value for key, value in whole.items() if not key.startswith("base_model.rand")}
    narrow = whole | {"base_model.randlora_A": whole["base_model.randlora_A"][..., :4].clone()}
    flat = whole | {"base_model.randlora_A": torch.zeros(3)}
    for tensors, changes, problem in [
        (lacking, {}, "save the adapter again with save_projection=True"),
        (narrow, {}, "has bases of shape"),
        (flat, {}, "three dimensions"),
        (whole, {"r": 0}, "must be an integer above zero"),
        (whole, {"randlora_alpha": "x"}, "must be a number above zero"),
        (whole, {"bias": "all"}, "trains more than RandLoRA does"),
        (whole, {"r": 5}, "the layers need"),
        (whole, {"target_modules": ["q_proj"]}, "leaves out the layer"),
    ]:
        save_file(tensors, weights)
        config.write_text(json.dumps(said | changes))
        model = hugging_face_llama()
        before = [type(module) for module in model.modules()]
        with pytest.raises(InputError, match=problem):
            load(model, folder)
        assert [type(module) for module in model.modules()] == before
