"""PiSSA starts from the principal part of the weight, and what it changed can always be undone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.adapters import LoRA, PiSSA, load
from modicum.adapters.rewriting import rewriting
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise
from modicum.core.layers.truncated_svd import truncated_svd, with_fixed_signs
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import (
    distance,
    llama,
    numbers,
    odd_model,
    stir,
    tokens,
)


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, outputs, dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(numbers(outputs, inputs, name="W"))
    return model


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_submodule(name).weight.detach()


def rest(model: nn.Sequential) -> Tensor:
    return model[0].weight.detach()


@given(
    outputs=st.integers(1, 24),
    inputs=st.integers(1, 24),
    alpha=st.one_of(st.none(), st.floats(0.1, 40)),
    data=st.data(),
)
def test_factors_are_the_leading_triplets_and_the_rest_is_the_rest(
    outputs: int, inputs: int, alpha: float | None, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, min(outputs, inputs)))
    model = linear(outputs, inputs)
    weight = model[0].weight.detach().clone()
    singular = torch.linalg.svdvals(weight)
    adapter = PiSSA(rank=rank, alpha=alpha).attach(model)
    _, layer = next(adapter.layers())
    a, b, scale = layer.beside_the_rest()
    assert a.shape == (rank, inputs)
    assert b.shape == (outputs, rank)
    assert scale == pytest.approx(1.0 if alpha is None else alpha / rank)
    taken = scale * (b @ a)
    expected = singular[:rank].square().sum()
    torch.testing.assert_close(taken.square().sum(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rest(model) + taken, weight, rtol=0, atol=1e-5)
    left = torch.linalg.svdvals(rest(model))
    torch.testing.assert_close(left[: len(singular) - rank], singular[rank:], rtol=0, atol=3e-5)
    assert left[len(singular) - rank :].abs().max() < 3e-5


def test_all_of_the_rank_leaves_nothing() -> None:
    model = linear(7, 5)
    PiSSA(rank=5).attach(model)
    assert rest(model).abs().max() < 1e-5


def test_a_rank_above_a_width_is_refused_before_anything_changes() -> None:
    model = odd_model()
    with pytest.raises(InputError, match="above 5, the smaller width of narrow") as error:
        PiSSA(rank=6).attach(model)
    assert error.value.field == "rank"
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_it_is_pefts_pissa() -> None:
    peft = pytest.importorskip("peft")
    model = linear(24, 16)
    theirs = peft.get_peft_model(
        linear(24, 16),
        peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights="pissa", target_modules=["0"]),
    ).base_model.model[0]
    adapter = PiSSA(rank=3, alpha=6.0).attach(model)
    _, layer = next(adapter.layers())
    torch.testing.assert_close(rest(model), theirs.base_layer.weight.detach(), rtol=0, atol=1e-6)
    a, b = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    torch.testing.assert_close(layer.taken(), 2.0 * (b @ a).detach(), rtol=0, atol=1e-6)
    # Up to the signs of the pairs, the factors are theirs too.
    torch.testing.assert_close(layer.A.abs(), a.abs(), rtol=0, atol=1e-5)


def signed(matrix: Tensor, iterations: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    left, singular, right = truncated_svd(matrix, 3, iterations, name="a")
    left, right = with_fixed_signs(left, right)
    return left, singular, right


@pytest.mark.parametrize("shape", [(40, 30), (30, 40), (9, 8)])
def test_a_randomized_svd_comes_near_and_is_a_function_of_seed_and_name(
    shape: tuple[int, int],
) -> None:
    left = torch.linalg.qr(numbers(shape[0], 8, name="left")).Q
    right = torch.linalg.qr(numbers(shape[1], 8, name="right")).Q
    matrix = left @ torch.diag(0.5 ** torch.arange(8)) @ right.T + 1e-3 * numbers(*shape)
    exact = signed(matrix)
    near = signed(matrix, 4)
    for one, other in zip(exact, near, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    again = signed(matrix, 4)
    assert all(torch.equal(one, other) for one, other in zip(near, again, strict=True))
    # Its draw is used: one iteration on a flat spectrum depends on it.
    flat = numbers(60, 50)
    draws = [truncated_svd(flat, 3, 1, seed=seed, name="a")[1] for seed in (0, 1)]
    assert not torch.equal(*draws)
    largest = exact[0].gather(0, exact[0].abs().argmax(0, keepdim=True))
    assert (largest > 0).all()


def test_the_change_is_a_lora_of_twice_the_rank_on_the_original_base(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    adapter = stir(PiSSA(rank=2, alpha=3.0).attach(model))
    adapter.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 6.0)
    other = llama()
    loaded = load(other, tmp_path / "adapter")
    assert isinstance(loaded.method, LoRA)
    assert distance(other(ids), model(ids)) < 1e-5
    fresh = llama()
    PiSSA(rank=2, alpha=3.0).attach(fresh).save(tmp_path / "fresh")
    untouched = llama()
    nothing = load(untouched, tmp_path / "fresh")
    assert all(layer.delta().abs().max() < 1e-6 for _, layer in nothing.layers())


@pytest.mark.parametrize("form", ["peft", "peft-rest"])
def test_peft_loads_both_of_its_loras(form: str, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=29,
    )  # fmt: skip
    ids = tokens()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    ours, theirs = model(), model()
    adapter = stir(PiSSA(rank=3).attach(ours), std=0.1)
    adapter.save(tmp_path / "adapter", form=form)
    if form == "peft-rest":  # the base must be handed on too
        for name in adapter.sites:
            base = ours.get_submodule(name).weight
            theirs.get_submodule(name).weight.data.copy_(base)
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours(ids).logits, rtol=0, atol=2e-5)
        merged = loaded.merge_and_unload()
        adapter.merge()
        torch.testing.assert_close(merged(ids).logits, ours(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.filterwarnings("ignore:merged weights were rounded")
def test_the_original_weights_come_back() -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.02)):
        model = odd_model(dtype)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        adapter = stir(PiSSA(rank=2).attach(model))
        adapter.merge()
        adapter.unmerge()
        adapter.detach()
        for name, value in model.named_parameters():
            torch.testing.assert_close(value, before[name], rtol=tolerance, atol=tolerance)
            assert value.requires_grad
        # With a reader of the file's weights, to the bit.
        model = odd_model(dtype)
        adapter = PiSSA(rank=2).attach(model, weights=partial(weight_of, odd_model(dtype)))
        stir(adapter).detach()
        for name, value in model.named_parameters():
            assert torch.equal(value, before[name])


def test_the_full_precision_weight_is_split_not_the_rounded_one() -> None:
    model, exact = linear(12, 9, torch.bfloat16), numbers(12, 9, name="W")
    adapter = PiSSA(rank=2).attach(model, weights=lambda name: exact)
    _, layer = next(adapter.layers())
    expected = (exact - layer.taken()).bfloat16()
    assert torch.equal(rest(model), expected)
    # The subtraction was in fp32: of bf16 numbers it would have drifted.
    drifted = exact.bfloat16() - layer.taken().bfloat16()
    assert not torch.equal(rest(model), drifted)
    with pytest.raises(InputError, match=r"shape \(9, 12\), the layer's is \(12, 9\)"):
        PiSSA(rank=2).attach(refused := linear(12, 9), weights=lambda name: exact.T)
    assert type(refused[0]) is nn.Linear


def test_wrapped_on_meta_nothing_is_computed_until_it_is_told() -> None:
    asked = []

    def reader(name: str) -> Tensor:
        asked.append(name)
        return whole[f"{name}.weight"]

    there = llama()
    whole = {name: value.detach().clone() for name, value in there.named_parameters()}
    expected = PiSSA(rank=2).attach(there).state_dict()
    model = llama("meta")
    adapter = PiSSA(rank=2).attach(model)
    assert all(value.is_meta for value in adapter.state_dict().values())
    materialise(model, "cpu")
    model.initialise(0)
    adapter.initialise(reader)
    assert set(asked) == adapter.sites.keys()
    assert all(torch.equal(value, expected[k]) for k, value in adapter.state_dict().items())
    for (name, one), other in zip(model.named_parameters(), there.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_checkpoint_rewrites_the_base_to_the_bit_without_another_svd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = llama()
    began = PiSSA(rank=2, niter=2).attach(first, seed=1)
    state = {k: v.clone() for k, v in first.state_dict().items() if "layers_by_adapter" in k}
    monkeypatch.setattr("modicum.adapters.pissa.truncated_svd", None)
    model = llama("meta")
    adapter = PiSSA(rank=2, niter=2).attach(model, seed=2)
    model.to_empty(device="cpu").initialise(0)
    adapter.initialise(kept=state)
    for (name, one), other in zip(model.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert began.state_dict().keys() == adapter.state_dict().keys()
    with pytest.raises(InputError, match="first values are not there"):
        adapter.initialise(kept={})


def test_a_state_with_another_start_rewrites_the_base_again() -> None:
    one, ids = llama(), tokens()
    mine = stir(PiSSA(rank=2, niter=1).attach(one, seed=1))
    other = llama()
    twin = PiSSA(rank=2, niter=1).attach(other, seed=2)
    assert not torch.equal(*(rewriting(a)["model.layers.0.mlp.up_proj"].A_0 for a in (mine, twin)))
    twin.load_state_dict(mine.state_dict())
    assert distance(other(ids), one(ids)) < 1e-6


def test_starting_anew_splits_the_original_weight_again() -> None:
    model, ids = llama(), tokens()
    base = model(ids)
    adapter = PiSSA(rank=2).attach(model)
    before = {name: value.clone() for name, value in adapter.state_dict().items()}
    stir(adapter)
    adapter.initialise()
    assert distance(model(ids), base) < 1e-5
    for name, value in adapter.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-4)


def test_a_lora_is_not_merged_into_a_base_of_which_a_part_is_taken() -> None:
    model = odd_model()
    pissa = PiSSA(rank=2).attach(model, name="pissa")
    lora = LoRA(rank=2).attach(model, name="lora")
    with pytest.raises(InputError, match="pissa has taken a part out of the base weight"):
        lora.merge()
    assert not lora.merged
    pissa.merge()
    lora.merge()


# On a quantized base


def quantized(dense: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*(NF4Linear.from_dense(layer.weight.detach().clone()) for layer in dense))


def wide() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(96, 70, bias=False), nn.Linear(70, 40, bias=False))
    with torch.no_grad():
        for index, layer in enumerate(model):
            layer.weight.copy_(numbers(*layer.weight.shape, name=f"{index}") / 8)
    return model


def reader(model: nn.Sequential) -> Callable[[str], Tensor]:
    return partial(weight_of, model)


def test_quantizing_the_rest_loses_less_and_rounds_help() -> None:
    dense = wide()
    lost: dict[object, float] = {}
    for rounds in (None, 1, 5):
        model = quantized(dense)
        if rounds is not None:
            PiSSA(rank=8, rounds=rounds).attach(model, weights=reader(dense)).merge(torch.float32)
        weights = [m.to_dense() if isinstance(m, NF4Linear) else m.weight for m in model]
        for norm in ("nuc", "fro"):
            lost[rounds, norm] = sum(
                torch.linalg.matrix_norm(w - d.weight, ord=norm).item()
                for w, d in zip(weights, dense, strict=True)
            )
    for norm in ("nuc", "fro"):
        assert lost[1, norm] < 0.95 * lost[None, norm]
        assert lost[5, norm] < 0.97 * lost[1, norm]


def test_a_quantized_base_needs_the_full_precision_weight() -> None:
    model = quantized(wide())
    with pytest.raises(InputError, match="starts from the full-precision weight; give `weights`"):
        PiSSA(rank=2).attach(model)
    assert [type(module) for module in model] == [NF4Linear, NF4Linear]


def test_merging_into_a_quantized_base_is_refused_or_makes_it_dense() -> None:
    dense, inputs = wide(), numbers(5, 96)
    model = quantized(dense)
    codes = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = stir(PiSSA(rank=4).attach(model, weights=reader(dense)))
    beside = model(inputs)
    with pytest.raises(InputError, match=r"cannot be kept as nf4.*merge\(dense=torch.bfloat16\)"):
        adapter.merge()
    assert not adapter.merged
    assert torch.equal(model(inputs), beside)
    adapter.merge(dense=torch.float32)
    assert distance(model(inputs), beside) < 1e-5
    adapter.unmerge()
    assert torch.equal(model(inputs), beside)
    adapter.merge(dense=torch.float32)
    adapter.detach()
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
    assert distance(model(inputs), beside) < 1e-5
    # Taken off unmerged, the base is what it was, to the bit.
    again = quantized(dense)
    stir(PiSSA(rank=4).attach(again, weights=reader(dense))).detach()
    assert all(torch.equal(value, codes[name]) for name, value in again.state_dict().items())


def test_a_quantized_rest_and_the_lora_beside_it_are_kept(tmp_path: Path) -> None:
    dense, inputs = wide(), numbers(5, 96)
    model = quantized(dense)
    adapter = stir(PiSSA(rank=4, rounds=3).attach(model, weights=reader(dense)))
    expected = model(inputs)
    with pytest.raises(InputError, match="no LoRA for the original model is exact"):
        adapter.save(tmp_path / "refused", form="peft")
    adapter.save(tmp_path / "own")
    other = quantized(dense)
    loaded = load(other, tmp_path / "own")
    assert isinstance(loaded.method, PiSSA)
    assert torch.equal(other(inputs), expected)
    plain = wide()
    with pytest.raises(InputError, match="kept otherwise"):
        load(plain, tmp_path / "own")
    assert [type(module) for module in plain] == [nn.Linear, nn.Linear]
    # The plain LoRA of rank r, on a base that is the rest.
    adapter.save(tmp_path / "beside", form="peft-rest")
    for layer, module in zip(plain, model, strict=True):
        layer.weight.data.copy_(module.to_dense())
    assert load(plain, tmp_path / "beside").method == LoRA(rank=4, alpha=4.0, targets=("0", "1"))
    assert distance(plain(inputs), expected) < 1e-5


def test_a_lora_on_a_quantized_base_trains_and_merges_dense() -> None:
    model, inputs = quantized(wide()), numbers(16, 96)
    adapter = LoRA(rank=4).attach(model)
    targets = numbers(16, 40, name="targets")
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    beside = model(inputs)
    adapter.merge(dense=torch.float32)
    assert distance(model(inputs), beside) < 1e-5
