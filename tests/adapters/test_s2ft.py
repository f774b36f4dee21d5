"""What S2FT promises exactly: which units, its columns, the map's order, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import S2FT, LoRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.column_patches import ColumnsLayer, to_front, units_in_front
from modicum.adapters.maps import units_read
from modicum.adapters.native_files import CONFIG
from modicum.adapters.s2ft import best
from modicum.core.errors import InputError
from modicum.core.layers.linear_forms import linear_form
from modicum.core.random import normal_
from modicum.models import create
from modicum.models.config import ModelConfig
from modicum.proofs import run_battery
from modicum.proofs.contracts.adapters.subjects import numbers, stir
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

TOKENS = torch.tensor([[1, 5, 2, 7, 3], [4, 4, 0, 9, 10]])
# Heads that share nothing, with biases, and heads in groups.
KINDS = [
    {"heads": 4},
    {"heads": 4, "attention_bias": True, "mlp_bias": True},
    {"heads": 4, "kv_heads": 2},
    {"heads": 6, "kv_heads": 3, "head_width": 4, "attention_bias": True, "mlp_bias": True},
]
BOTH = S2FT(neurons=0.25, groups=0.5)


def decoder(dtype: torch.dtype = torch.float32, **sizes: Any) -> nn.Module:
    """A decoder with weights, norms and biases that are neither zero nor one."""
    width = 24 if sizes.get("heads") == 6 else 16
    config = ModelConfig(
        vocabulary_size=11, width=width, layers=3, mlp_width=22, **({"heads": 4} | sizes)
    )
    model = create(config, seed=0, dtype=dtype)
    for name, parameter in model.named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    return model.eval()


def columns(adapter: AttachedAdapter) -> dict[str, list[int]]:
    return {name: layer.get_buffer("indices").tolist() for name, layer in adapter.layers()}


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_parameters()}


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    total: Tensor = model(batch).square().sum()
    return total


def test_units_are_drawn_over_the_model_under_one_budget() -> None:
    model = decoder()
    adapter = BOTH.attach(model, seed=3)
    found = columns(adapter)
    downs = {name: own for name, own in found.items() if "down" in name}
    outputs = {name: own for name, own in found.items() if "o_proj" in name}
    assert sum(map(len, downs.values())) == int(0.25 * 3 * 22)
    assert sum(map(len, outputs.values())) == int(0.5 * 3 * 4) * 4
    assert len({len(own) for own in downs.values()}) > 1
    for own in outputs.values():
        heads = torch.tensor(own).view(-1, 4)
        assert torch.equal(heads, heads[:, :1] // 4 * 4 + torch.arange(4))
    trained = sum(parameter.numel() for parameter in adapter.parameters())
    assert trained == sum(16 * len(own) for own in found.values())


def test_what_is_drawn_is_of_the_seed_and_not_of_the_targets() -> None:
    one, same, other = (columns(BOTH.attach(decoder(), seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    some = BOTH.with_fields(targets=("*.layers.1.mlp.down_proj", "*.layers.2.self_attn.o_proj"))
    part = columns(some.attach(decoder(), seed=1))
    assert part
    assert all(one[name] == own for name, own in part.items())


def test_a_layer_without_units_stays_frozen_and_plain(tmp_path: Path) -> None:
    few = S2FT(neurons=0.05)
    model = decoder()
    adapter = few.attach(model, seed=0)
    assert 0 < len(adapter.sites) < 3
    assert {name for name, count in adapter.prepared.values.items() if not count["channels"]}
    left = set(range(3)) - {int(name.split(".")[2]) for name in adapter.sites}
    for block in left:
        layer = model.get_submodule(f"model.layers.{block}.mlp.down_proj")
        assert type(layer) is nn.Linear
    stir(adapter)
    adapter.save(tmp_path / "own", form="modicum")
    other = decoder()
    assert columns(load(other, tmp_path / "own")) == columns(adapter)
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_permuted_the_model_is_the_original_and_comes_back_to_the_bit(sizes: Any) -> None:
    model, plain = decoder(**sizes), decoder(**sizes)
    outputs, before = plain(TOKENS), bits(plain)
    adapter = BOTH.attach(model, seed=1)
    order = to_front(adapter)
    order.apply(plain)
    scale = outputs.abs().max().item()
    torch.testing.assert_close(plain(TOKENS), outputs, rtol=0, atol=1e-6 * scale)
    for name, own in columns(adapter).items():
        weight = f"{name}.weight"
        assert torch.equal(plain.get_parameter(weight)[:, : len(own)], before[weight][:, own])
    order.inverse().apply(plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(plain).items())


@pytest.mark.parametrize("sizes", KINDS, ids=str)
def test_trained_in_front_it_is_what_is_trained_where_it_was(sizes: Any, tmp_path: Path) -> None:
    """Outputs, gradients, files and merged weights are those of columns that lie apart."""
    model, other = decoder(**sizes).double(), decoder(**sizes).double()
    before = bits(model)
    adapter, twin = (stir(BOTH.attach(each, seed=1)) for each in (model, other))
    expected = loss(other, TOKENS)
    expected.backward()
    with units_in_front(adapter):
        found = loss(model, TOKENS)
        found.backward()
        assert all(layer.places().first == 0 for layer in patches(adapter))
        adapter.save(tmp_path / "in front", form="modicum")
        adapter.merge()
        torch.testing.assert_close(loss(model, TOKENS), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = dict(twin.named_parameters())
    for name, value in adapter.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name].grad, rtol=1e-9, atol=1e-9)
    twin.merge()
    merged = dict(other.named_parameters())
    base = [name for name in before if "layers_by_adapter" not in name]
    assert all(torch.equal(model.get_parameter(name), merged[name]) for name in base)
    adapter.unmerge()
    assert all(torch.equal(model.get_parameter(name), before[name]) for name in base)
    third = decoder(**sizes).double()
    load(third, tmp_path / "in front")
    torch.testing.assert_close(loss(third, TOKENS), expected, rtol=1e-6, atol=0)


def patches(adapter: AttachedAdapter) -> list[ColumnsLayer]:
    return [layer for _, layer in adapter.layers() if isinstance(layer, ColumnsLayer)]


def test_in_front_there_is_one_adapter() -> None:
    model = decoder()
    adapter = BOTH.attach(model)
    LoRA(rank=1).attach(model, name="second")
    before = bits(model)
    with pytest.raises(InputError, match="second"), units_in_front(adapter):
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())


def test_the_sum_of_disjoint_adapters_is_both_applied() -> None:
    model = decoder()
    one, two = (stir(BOTH.attach(model, name=name, seed=1)) for name in ("one", "two"))
    pairs = list(zip(one.named_parameters(), two.named_parameters(), strict=True))
    with torch.no_grad():  # one has the first of each layer's columns, the other the others
        for (name, values), (other, others) in pairs:
            assert name == other
            values[:, 1:] = 0
            others[:, :1] = 0
    two.activate(alone=False)
    one.activate(alone=False)
    both = model(TOKENS)
    one.merge()
    two.merge()
    torch.testing.assert_close(model(TOKENS), both, rtol=0, atol=0)
    two.unmerge()
    one.unmerge()
    alone = decoder()
    stirred = stir(BOTH.attach(alone, name="one", seed=1))
    with torch.no_grad():
        for (_, total), ((_, values), (_, others)) in zip(
            stirred.named_parameters(), pairs, strict=True
        ):
            total.copy_(values + others)
    torch.testing.assert_close(alone(TOKENS), both, rtol=0, atol=0)


def test_its_lora_is_rows_of_ones_and_loads_with_ranks_by_layer(tmp_path: Path) -> None:
    model = hugging_face_llama().eval()
    adapter = stir(BOTH.attach(model))
    for name, layer in adapter.layers():
        lora = layer.as_lora()
        assert lora is not None
        assert torch.equal(lora[0].sum(1), torch.ones(len(lora[0])))
        assert lora[0].argmax(1).tolist() == columns(adapter)[name]
    adapter.save(tmp_path / "lora", form="peft")
    ids = torch.arange(12).view(2, 6)
    other = hugging_face_llama().eval()
    assert isinstance(load(other, tmp_path / "lora").method, LoRA)
    found, expected = other(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("smallest", [False, True])
@pytest.mark.parametrize("selection", ["weight", "activation", "gradient"])
def test_units_are_chosen_by_what_belongs_to_them(selection: str, smallest: bool) -> None:
    model, batches = decoder(kv_heads=2), [TOKENS, TOKENS.flip(0)[:1]]
    value = BOTH.with_fields(selection=selection, smallest=smallest)
    found = columns(value.attach(decoder(kv_heads=2), batches=batches, loss=loss))
    seen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
            squares = inputs[0].detach().double().square().flatten(0, 1).sum(0)
            seen[name] = seen.get(name, torch.zeros(())) + squares

        return hook

    sites = value.sites(model)
    for site in sites:
        model.get_submodule(site.name).register_forward_hook(note(site.name))
    total = torch.stack([loss(model, batch) for batch in batches]).sum()
    weights = [model.get_parameter(f"{site.name}.weight") for site in sites]
    of_weights = torch.autograd.grad(total, weights)
    scores = {
        "weight": {s.name: w.detach() for s, w in zip(sites, weights, strict=True)},
        "gradient": {s.name: g for s, g in zip(sites, of_weights, strict=True)},
        "activation": {name: squares.sqrt()[None] for name, squares in seen.items()},
    }[selection]
    for last, width, count in (("down_proj", 1, int(0.25 * 66)), ("o_proj", 8, 3)):
        each = {
            name: score.double().square().sum(0).view(-1, width).sum(1)
            for name, score in scores.items()
            if name.endswith(last)
        }
        ranked = sorted(
            ((float(score), name, unit) for name in each for unit, score in enumerate(each[name])),
            reverse=not smallest,
        )
        expected: dict[str, list[int]] = {}
        for _, name, unit in ranked[:count]:
            expected.setdefault(name, []).extend(range(unit * width, (unit + 1) * width))
        assert {n: o for n, o in found.items() if n.endswith(last)} == {
            name: sorted(own) for name, own in expected.items()
        }


def test_units_that_cost_more_than_is_left_are_passed_over() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 10))
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
    read = {"wide": units_read(model, "neurons")["2"], "thin": units_read(other, "neurons")["2"]}
    scores = {"wide": torch.tensor([9.0, 8, 7, 6]), "thin": torch.tensor([5.0, 4, 3, 2])}
    found = best(scores, read, 0.5)  # 26 of 52 numbers: two of ten, then two of three
    assert {name: units.tolist() for name, units in found.items()} == {
        "wide": [0, 1],
        "thin": [0, 1],
    }


def test_what_the_map_does_not_know_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(InputError, match="map knows no neurons"):
        S2FT().attach(model)
    assert type(model[0]) is nn.Linear
    mlp = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 4))
    with pytest.raises(InputError, match="no groups"):
        S2FT(neurons=0.0, groups=0.5).attach(mlp)
    with pytest.raises(InputError, match="its inputs are no neurons") as error:
        S2FT(targets=("q_proj",)).attach(decoder())
    assert "down_proj" in str(error.value)
    with pytest.raises(InputError, match="neither neurons nor groups"):
        S2FT(neurons=0.0).attach(decoder())
    with pytest.raises(InputError, match="nothing is chosen"):
        S2FT(neurons=0.01).attach(decoder())
    with pytest.raises(InputError, match="is excluded"):
        S2FT(neurons=0.5, exclude=("down_proj",)).attach(decoder())
    with pytest.raises(InputError, match="give `batches`"):
        S2FT(neurons=0.5, selection="gradient").attach(decoder())


def test_a_quantized_layer_is_refused() -> None:
    model = hugging_face_llama()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = linear_form("int8").from_dense(mlp.down_proj.weight.detach(), None)
    with pytest.raises(InputError, match="no entries of its own"):
        S2FT(neurons=0.5).attach(model)
    assert "Adapted" not in type(mlp.down_proj).__name__


def test_layers_that_store_the_transpose_have_their_columns() -> None:
    """GPT-2 has the weights of o and down, and the three of attention in one, as [in, out]."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=29, n_positions=8)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    before, ids = bits(model), torch.arange(12).view(2, 6)
    adapter = stir(S2FT(neurons=0.1, groups=0.25).attach(model))
    assert {name.split(".", 3)[3] for name in adapter.sites} == {"attn.c_proj", "mlp.c_proj"}
    output = model(input_ids=ids).logits
    with units_in_front(adapter):
        torch.testing.assert_close(model(input_ids=ids).logits, output, rtol=0, atol=1e-5)
    adapter.merge()
    torch.testing.assert_close(model(input_ids=ids).logits, output, rtol=0, atol=1e-5)
    adapter.unmerge()
    adapter.detach()
    assert all(torch.equal(tensor, before[name]) for name, tensor in bits(model).items())


@pytest.mark.parametrize("count", [0, -1, 23, "4", 1.5])
def test_a_file_that_says_other_counts_is_refused(count: object, tmp_path: Path) -> None:
    adapter = S2FT(neurons=0.25).attach(decoder())
    adapter.save(tmp_path / "own", form="modicum")
    file = tmp_path / "own" / CONFIG
    said = json.loads(file.read_text())
    said["prepared"] = {name: {"channels": count} for name in said["prepared"]}
    file.write_text(json.dumps(said))
    model = decoder()
    with pytest.raises(InputError):
        load(model, tmp_path / "own")
    assert type(model.get_submodule("model.layers.0.mlp.down_proj")) is nn.Linear


def test_a_second_adapter_finds_the_map_of_a_model_that_has_one() -> None:
    """A layer with a LoRA, active or not, is of its own class where the map is looked for."""
    model = nn.Sequential(nn.Linear(4, 40), nn.ReLU(), nn.Linear(40, 4))
    first = stir(LoRA(rank=2).attach(model, name="first"))
    output = model(numbers(3, 4))
    adapter = stir(S2FT(neurons=0.25).attach(model, name="second"))
    assert list(adapter.sites) == ["2"]
    adapter.detach()
    first.activate()
    assert torch.equal(model(numbers(3, 4)), output)


def test_units_that_data_choose_pass_the_battery() -> None:
    results = run_battery(BOTH.with_fields(selection="gradient"), cheap_only=True)
    assert [(result.name, result.message) for result in results if not result.passed] == []
