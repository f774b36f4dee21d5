"""PiSSA starts from the principal part of the weight: the paper's formulas, and PEFT's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.adapters import PiSSA
from modicum.core.errors import InputError
from modicum.proofs.adapters.pissa import plain, reconstructed
from modicum.proofs.contracts.adapters.subjects import numbers, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama


def linear(outputs: int, inputs: int) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(inputs, outputs))
    with torch.no_grad():
        model[0].weight.copy_(numbers(outputs, inputs, name="W"))
    return model


def residual(model: nn.Sequential) -> Tensor:
    return model[0].weight.detach()


@given(
    outputs=st.integers(1, 24),
    inputs=st.integers(1, 24),
    rank=st.integers(1, 24),
    alpha=st.one_of(st.none(), st.floats(0.1, 40)),
)
@example(outputs=7, inputs=5, rank=5, alpha=None)  # all of the rank leaves nothing
def test_factors_are_the_leading_triplets_and_the_base_keeps_the_residual(
    outputs: int, inputs: int, rank: int, alpha: float | None
) -> None:
    rank = min(rank, outputs, inputs)
    model = linear(outputs, inputs)
    weight = residual(model).clone()
    singular = torch.linalg.svdvals(weight)
    adapter = PiSSA(rank=rank, alpha=alpha).attach(model)
    _, layer = next(adapter.layers())
    a, b, scale = layer.lora_on_residual()
    assert (a.shape, b.shape) == ((rank, inputs), (outputs, rank))
    assert scale == pytest.approx(1.0 if alpha is None else alpha / rank)
    taken = scale * (b @ a)
    expected = singular[:rank].square().sum()
    torch.testing.assert_close(taken.square().sum(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(residual(model) + taken, weight, rtol=0, atol=1e-5)
    left = torch.linalg.svdvals(residual(model))
    torch.testing.assert_close(left[: len(singular) - rank], singular[rank:], rtol=0, atol=3e-5)
    assert left[len(singular) - rank :].abs().max() < 3e-5


def test_it_is_pefts_pissa() -> None:
    peft = pytest.importorskip("peft")
    model = linear(24, 16)
    theirs = peft.get_peft_model(
        linear(24, 16),
        peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights="pissa", target_modules=["0"]),
    ).base_model.model[0]
    adapter = PiSSA(rank=3, alpha=6.0).attach(model)
    _, layer = next(adapter.layers())
    torch.testing.assert_close(residual(model), theirs.base_layer.weight, rtol=0, atol=1e-6)
    a, b = theirs.lora_A["default"].weight, theirs.lora_B["default"].weight
    torch.testing.assert_close(layer.taken(), 2.0 * (b @ a).detach(), rtol=0, atol=1e-6)
    # Up to the signs of the pairs, the factors are theirs too.
    torch.testing.assert_close(layer.A.abs(), a.abs(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", ["peft", "peft-rest"])
def test_peft_loads_the_lora_for_the_weight_and_that_for_the_residual(
    form: str, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    ours, theirs, ids = hugging_face_llama(), hugging_face_llama(), tokens()
    adapter = stir(PiSSA(rank=3, alpha=4.0).attach(ours))
    adapter.save(tmp_path, form=form)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == ((6, 8.0) if form == "peft" else (3, 4.0))
    if form == "peft-rest":  # the base must be handed on too
        for name in adapter.sites:
            theirs.get_submodule(name).weight.data.copy_(ours.get_submodule(name).weight)
    loaded = peft.PeftModel.from_pretrained(theirs, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, ours(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_reader_s_full_precision_weight_is_split_and_put_back(transposed: bool) -> None:
    model, exact = linear(12, 9), numbers(12, 9, name="W")
    if transposed:
        conv1d = pytest.importorskip("transformers").pytorch_utils.Conv1D(12, 9)
        model, exact = nn.Sequential(conv1d), exact.T
    model.bfloat16()
    with pytest.raises(InputError, match=r"to split has shape \(9, 12\), the layer's is \(12, 9\)"):
        PiSSA(rank=2).attach(model, weights=lambda name: exact.T)
    adapter = PiSSA(rank=2).attach(model, weights=lambda name: exact)
    _, layer = next(adapter.layers())
    taken = layer.taken().T if transposed else layer.taken()
    assert torch.equal(residual(model), (exact - taken).bfloat16())
    # The subtraction was in fp32: of bf16 numbers it would have drifted.
    assert not torch.equal(residual(model), exact.bfloat16() - taken.bfloat16())
    stir(adapter).detach()
    assert torch.equal(residual(model), exact.bfloat16())


def test_quantizing_the_residual_loses_less_and_rounds_help() -> None:
    weight = numbers(70, 96, name="W")
    once, often = (reconstructed(PiSSA(rank=8, rounds=rounds), weight) for rounds in (1, 5))
    gaps = [kept - weight for kept in (plain(weight, 8), once, often)]
    for norm in ("nuc", "fro"):
        lost = [torch.linalg.matrix_norm(gap, ord=norm).item() for gap in gaps]
        assert lost[1] < 0.95 * lost[0]
        assert lost[2] < 0.97 * lost[1]
