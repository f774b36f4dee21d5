"""LoRAM: trained on what pruning left, written for the model that has all units."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum import adapters
from modicum.adapters import LoRA, LoRAM
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.loram import KEPT, LoRAMLayer
from modicum.compress import StructuredPruning
from modicum.compress import load as load_pruned
from modicum.compress.pruned_model import PrunedModel
from modicum.core.contracts.method import Context
from modicum.core.errors import InputError
from modicum.core.layers.full_model import FullModel, note_full_model
from modicum.core.layers.linear_forms import linear_form
from modicum.core.layers.map import silence
from modicum.core.random import normal_
from modicum.models import create, saving
from modicum.models.config import ModelConfig
from modicum.models.gguf import write_adapter

TOKENS = torch.tensor([[1, 5, 2, 7, 3], [4, 4, 9, 0, 10]])


def decoder(kv_heads: int = 2, **fields: Any) -> nn.Module:
    sizes = {"width": 16, "mlp_width": 22, "attention_bias": True, "mlp_bias": True}
    more = {"vocabulary_size": 11, "layers": 2, "heads": 4, "kv_heads": kv_heads}
    config = ModelConfig(**(sizes | more | fields))
    model = create(config, seed=0)
    for name, parameter in model.named_parameters():
        normal_(parameter.data, seed=0, name=name, std=0.3)
    return model.eval()


def pruned(model: nn.Module, seed: int = 0, **fields: Any) -> tuple[nn.Module, PrunedModel]:
    """A copy that has lost half of its neurons and of its groups."""
    value = StructuredPruning(**({"score": "random", "neurons": 0.5, "groups": 0.5} | fields))
    small = copy.deepcopy(model)
    handle = value.bind(Context(small, seed))
    handle.fit(value.calibrate(small, [], lambda model, batch: torch.zeros(1)))
    return small, handle


def stirred(model: nn.Module, value: Any = None, seed: int = 0) -> AttachedAdapter:
    adapter = (LoRAM(rank=3) if value is None else value).attach(model, seed=seed)
    for name, factor in adapter.named_parameters():
        normal_(factor.data, seed=1, name=name, std=0.3)
    assert isinstance(adapter, AttachedAdapter)
    return adapter


def layers(adapter: AttachedAdapter) -> dict[str, LoRAMLayer]:
    found = dict(adapter.layers())
    assert all(isinstance(layer, LoRAMLayer) for layer in found.values())
    return found  # type: ignore[return-value]


def step(model: nn.Module, adapter: AttachedAdapter, count: int = 3) -> Tensor:
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    for _ in range(count):
        loss = nn.functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("fill", ["zero", "normal"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_where_nothing_was_pruned_it_is_lora_to_the_bit(
    tmp_path: Path, fill: Any, dropout: float
) -> None:
    ended = []
    for value in (LoRA(rank=3, dropout=dropout), LoRAM(rank=3, dropout=dropout, fill=fill)):
        model = decoder().train()
        adapter = value.attach(model, seed=3)
        torch.manual_seed(0)
        step(model, adapter)
        adapter.save(tmp_path / value.info.name)
        assert adapter.for_full_model() is None
        state = {key: t for key, t in adapter.state_dict().items() if not key.endswith(KEPT)}
        adapter.merge()
        ended.append((state, model.state_dict()["model.layers.1.mlp.up_proj.weight"]))
    (ours, merged), (theirs, other) = ended
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert torch.equal(merged, other)
    one, two = ((tmp_path / name / "adapter_model.safetensors").read_bytes()
                for name in ("lora", "loram"))  # fmt: skip
    assert one == two


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_the_change_is_that_of_what_was_kept_and_zero_elsewhere(kv_heads: int, bias: bool) -> None:
    full = decoder(kv_heads, attention_bias=bias, mlp_bias=bias)
    small, handle = pruned(full, first_blocks=1)
    kept = handle.reduction
    assert kept is not None
    for name, layer in layers(stirred(small)).items():
        a, b, scale = layer.as_lora()
        change, weight = scale * b @ a, full.get_parameter(f"{name}.weight")
        assert change.shape == weight.shape
        there = kept.reduced(f"{name}.weight", change)
        torch.testing.assert_close(there, layer.delta(), rtol=1e-6, atol=1e-6)
        elsewhere = kept.restored(f"{name}.weight", torch.ones_like(there)) == 0
        assert change[elsewhere].count_nonzero() == 0
        assert bool(elsewhere.any()) == name.startswith("model.layers.1.")


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_with_dropped_units_silenced_the_full_model_is_the_small_one(
    kv_heads: int, tmp_path: Path
) -> None:
    full = decoder(kv_heads)
    small, handle = pruned(full)
    adapter = stirred(small)
    step(small, adapter)
    adapter.save(tmp_path / "adapter")
    assert handle.reduction is not None
    for part in handle.reduction.parts:
        silence(full, part.units, part.removed)
    recovered = adapters.load(full, tmp_path / "adapter")
    torch.testing.assert_close(full(TOKENS), small(TOKENS), rtol=1e-5, atol=1e-5)
    recovered.merge()
    torch.testing.assert_close(full(TOKENS), small(TOKENS), rtol=1e-5, atol=1e-5)


def test_its_file_loads_in_peft_on_the_original_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    full = decoder()
    saving.save(full, tmp_path / "full")  # type: ignore[arg-type]
    small, _ = pruned(full)
    adapter = stirred(small)
    adapter.save(tmp_path / "adapter", base_model=str(tmp_path / "full"))
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == str(tmp_path / "full")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "full").eval()
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    before = full(TOKENS)
    adapters.load(full, tmp_path / "adapter")
    assert not torch.equal(full(TOKENS), before)
    torch.testing.assert_close(theirs(TOKENS).logits, full(TOKENS), rtol=1e-5, atol=1e-5)


def test_folded_into_another_rank_it_is_for_the_full_model_too(tmp_path: Path) -> None:
    full = decoder()
    small, _ = pruned(full)
    adapter = stirred(small)
    folding = adapter.save(tmp_path / "folded", rank=4)
    assert folding is not None
    assert folding.weights < 1e-5
    adapter.save(tmp_path / "exact")
    other = copy.deepcopy(full)
    adapters.load(full, tmp_path / "folded")
    adapters.load(other, tmp_path / "exact")
    torch.testing.assert_close(full(TOKENS), other(TOKENS), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="for the full model"):
        write_adapter(small, adapter, tmp_path / "adapter.gguf")  # type: ignore[arg-type]


def test_on_the_small_model_it_merges_and_is_kept_as_what_it_is(tmp_path: Path) -> None:
    full = decoder()
    small, handle = pruned(full)
    again = copy.deepcopy(small)
    adapter = stirred(small)
    outputs = small(TOKENS)
    for form in ("modicum", "peft-rest"):
        adapter.save(tmp_path / form, form=form)  # type: ignore[arg-type]
        model = copy.deepcopy(again)
        loaded = adapters.load(model, tmp_path / form, train=True)
        assert torch.equal(model(TOKENS), outputs), form
        assert (loaded.method.info.name == "loram") == (form == "modicum")
    continued = adapters.load(again, tmp_path / "modicum", train=True)
    step(again, continued)
    adapter.merge()
    torch.testing.assert_close(small(TOKENS), outputs, rtol=1e-5, atol=1e-5)
    adapter.unmerge()
    adapter.detach()
    reduction = handle.reduction
    assert reduction is not None
    for name, tensor in full.state_dict().items():
        there = reduction.reduced(name, tensor)
        torch.testing.assert_close(small.state_dict()[name], there, rtol=0, atol=1e-6)


def test_a_state_comes_to_the_units_that_it_is_for_alone(tmp_path: Path) -> None:
    full = decoder()
    small, handle = pruned(full)
    other, _ = pruned(full, seed=7)
    handle.save(tmp_path / "small")
    stirred(small).save(tmp_path / "adapter", form="modicum")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(InputError, match="lost other units"):
        adapters.load(other, tmp_path / "adapter")
    assert other.state_dict().keys() == before.keys()
    assert torch.equal(other(TOKENS), other(TOKENS))
    with pytest.raises(InputError, match="has shape"):
        adapters.load(copy.deepcopy(full), tmp_path / "adapter")
    loaded = copy.deepcopy(full)
    load_pruned(loaded, tmp_path / "small")
    adapters.load(loaded, tmp_path / "adapter")
    assert torch.equal(loaded(TOKENS), small(TOKENS))


def test_a_state_of_other_units_is_refused_before_anything_is_copied() -> None:
    full = decoder()
    small, _ = pruned(full)
    other, _ = pruned(full, seed=7)
    mine, theirs = stirred(small), stirred(other)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    state = {name: value if name.endswith(KEPT) else 2 * value
             for name, value in mine.state_dict().items()}  # fmt: skip
    with pytest.raises(InputError, match="lost other units"):
        theirs.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())
    with pytest.raises(RuntimeError, match="lost other units"):
        other.load_state_dict(small.state_dict(), strict=False)
    mine.load_state_dict(state)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_normal_fill_is_drawn_for_inputs_alone(rank: int) -> None:
    full = decoder(mlp_width=400)
    small, handle = pruned(full)
    zero = layers(stirred(copy.deepcopy(small), LoRAM(rank=rank), seed=4))
    first, second = (layers(stirred(copy.deepcopy(small), LoRAM(rank=rank, fill="normal"), seed=4))
                     for _ in range(2))  # fmt: skip
    assert handle.reduction is not None
    for name, layer in first.items():
        (a, b, _), (again, _, _), (plain, own, _) = (
            found[name].as_lora() for found in (first, second, zero)
        )
        assert torch.equal(a, again)
        assert torch.equal(b, own)
        gone = handle.reduction.removed_places(f"{name}.weight", 1)
        assert torch.equal(plain[:, gone], torch.zeros(rank, len(gone)))
        kept = [place for place in range(a.shape[1]) if place not in set(gone.tolist())]
        assert torch.equal(a[:, kept], plain[:, kept])
        assert bool(len(gone)) == name.endswith(("down_proj", "o_proj"))
        if name.endswith("down_proj"):
            assert float(a[:, gone].detach().std()) == pytest.approx(1 / rank, rel=0.2)
        assert torch.equal(layer.delta(), zero[name].delta())


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_quantized_small_base_has_the_same_file(form: str, tmp_path: Path) -> None:
    full = decoder(width=32, mlp_width=128, attention_bias=False, mlp_bias=False)
    small, _ = pruned(full)
    plain = stirred(copy.deepcopy(small))
    kind = linear_form(form)
    for name, layer in list(small.named_modules()):
        if isinstance(layer, nn.Linear) and name.endswith("_proj"):
            small.set_submodule(name, kind.from_dense(layer.weight.detach(), None))
    adapter = stirred(small)
    step(small, adapter, 1)
    for name, factor in adapter.named_parameters():
        normal_(factor.data, seed=1, name=name, std=0.3)
    for one, folder in ((plain, "plain"), (adapter, form)):
        one.save(tmp_path / folder)
    files = [(tmp_path / folder / "adapter_model.safetensors").read_bytes()
             for folder in ("plain", form)]  # fmt: skip
    assert files[0] == files[1]


def test_bytes_of_the_small_base_and_of_the_adapter_are_by_formula() -> None:
    width, inner, heads, kv, rank, layers_, words = 32, 128, 4, 2, 3, 2, 11
    full = decoder(width=width, mlp_width=inner, attention_bias=False, mlp_bias=False)
    head = width // heads

    def matrices(groups: int, neurons: int) -> int:
        each = heads // kv
        attention = width * head * groups * (2 * each + 2)
        return layers_ * (attention + 3 * width * neurons)

    rest = (2 * layers_ + 1) * width + words * width  # norms, and embeddings that are tied
    untied = rest + words * width
    small, _ = pruned(full)
    counted = {id(p): p.nbytes for p in small.parameters()}
    assert sum(counted.values()) in (4 * (matrices(1, 64) + n) for n in (rest, untied))
    of_full = sum({id(p): p.nbytes for p in full.parameters()}.values())
    assert of_full - sum(counted.values()) == 4 * (matrices(2, 128) - matrices(1, 64))
    adapter = LoRAM(rank=rank).attach(small)
    trained = sum(factor.nbytes for factor in adapter.parameters())
    q, k, mlp = 2 * head + width, head + width, 64 + width
    assert trained == 4 * rank * layers_ * (2 * q + 2 * k + 3 * mlp)
    state = sum(tensor.nbytes for tensor in adapter.state_dict().values())
    assert state - trained == 8 * len(adapter.sites)


def test_under_bf16_its_factors_and_file_stay_fp32(tmp_path: Path) -> None:
    full = decoder()
    small, _ = pruned(full)
    adapter = stirred(small.to(torch.bfloat16))
    step(small, adapter, 1)
    adapter.save(tmp_path)
    loaded = adapters.load(full, tmp_path)
    kinds = {(factor.dtype, factor.shape[0] > 3) for factor in loaded.parameters()}
    assert kinds == {(torch.float32, False), (torch.float32, True)}


def test_what_has_no_place_in_the_full_model_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=16, n_layer=2, n_head=4, n_positions=16, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    full = transformers.GPT2LMHeadModel(config).eval()
    small, handle = pruned(full, score="magnitude")
    assert handle.reduction is not None
    with pytest.raises(InputError, match=r"also: .*lost units"):
        LoRAM(rank=2, targets=("c_fc",), also=("*.c_fc.bias",)).attach(small)
    targets = ("c_attn", "c_proj", "c_fc")
    adapter = LoRAM(rank=2, targets=targets, also=("*.ln_1",)).attach(small)
    for name, layer in layers(adapter).items():
        a, b, _ = layer.as_lora()
        assert (a.shape[1], b.shape[0]) == tuple(full.get_parameter(f"{name}.weight").shape)
    note_full_model(full, FullModel(handle.reduction))  # slices are known of full shapes alone
    with pytest.raises(InputError, match=r"targets: .*lost units"):
        LoRAM(rank=2, targets=("q_proj",)).attach(full)
