"""Block-LoRA: what its structures are as matrices, and what arms that share A amount to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import BlockLoRA, LoRA, load
from modicum.adapters.attached_adapter import AttachedAdapter
from modicum.adapters.base import Adapter
from modicum.adapters.block_lora import summing_to_zero
from modicum.core.errors import InputError
from modicum.proofs import run_battery
from modicum.proofs.contracts.adapters.subjects import llama, numbers, odd_model, stir, tokens
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

PLAIN: dict[str, Any] = {"rank": 4, "blocks": 2, "alpha": 6.0, "dropout": 0.0}
SUM, FOLD = (BlockLoRA(structure=name, **PLAIN) for name in ("sum", "fold"))
both = pytest.mark.parametrize("value", [SUM, FOLD], ids=["sum", "fold"])


def trained(value: Adapter, rates: dict[str, float], steps: int = 5) -> AttachedAdapter:
    """A small decoder after some steps of Adam, A and B each at a rate of its own."""
    adapter = value.attach(llama())
    groups = [
        {"params": [p for name, p in adapter.named_parameters() if name[-1] == factor], "lr": rate}
        for factor, rate in rates.items()
    ]
    optimizer = torch.optim.Adam(groups, eps=1e-12)
    for _ in range(steps):
        adapter.model(tokens()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapter


def outputs(adapter: AttachedAdapter) -> Tensor:
    with torch.no_grad():
        return adapter.model.eval()(tokens())  # type: ignore[no-any-return]


@both
def test_it_trains_five_eighths_of_loras_numbers_with_four_blocks(value: BlockLoRA) -> None:
    model = nn.Sequential(nn.Linear(768, 768))
    adapter = value.with_fields(rank=8, blocks=4).attach(model)
    assert sum(p.numel() for p in adapter.parameters()) == 7680
    assert value.with_fields(rank=8, blocks=1).trained(adapter.sites["0"]) == 12288


@both
def test_one_block_is_lora_to_the_bit(value: BlockLoRA) -> None:
    rates = {"A": 1e-2, "B": 1e-2}
    mine = trained(value.with_fields(blocks=1), rates)
    lora = trained(LoRA(rank=4, alpha=6.0), rates)
    for one, other in zip(mine.parameters(), lora.parameters(), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(outputs(mine), outputs(lora))


def test_arms_are_added_and_share_a() -> None:
    adapter = stir(SUM.attach(llama()))
    for _, layer in adapter.layers():
        b = layer.B.split(2, dim=1)
        expected = 1.5 * (b[0] + b[1]) @ layer.A
        torch.testing.assert_close(layer.delta(), expected)
        assert torch.linalg.matrix_rank(layer.delta(), rtol=1e-4) == 2


def test_folded_column_blocks_are_equal() -> None:
    adapter = stir(FOLD.attach(llama()))
    for _, layer in adapter.layers():
        first, second = layer.delta().chunk(2, dim=1)
        assert torch.equal(first, second)
        torch.testing.assert_close(first, 1.5 * layer.B @ layer.A)
        assert torch.linalg.matrix_rank(first, rtol=1e-4) == min(4, first.shape[1])


def test_equal_arms_stay_equal_and_are_lora_with_another_rate_of_b() -> None:
    adapter = trained(SUM.with_fields(arms="equal"), {"A": 1e-2, "B": 1e-2})
    for _, layer in adapter.layers():
        first, second = layer.B.split(2, dim=1)
        assert torch.equal(first, second)
        assert first.any()
    lora = trained(LoRA(rank=2, alpha=3.0), {"A": 1e-2, "B": 2e-2})
    torch.testing.assert_close(outputs(adapter), outputs(lora), rtol=0, atol=1e-4)
    at_its_rate = trained(LoRA(rank=2, alpha=3.0), {"A": 1e-2, "B": 1e-2})
    assert (outputs(adapter) - outputs(at_its_rate)).abs().max() > 1e-2


def test_arms_that_start_apart_have_one_gradient_and_change_nothing() -> None:
    apart, equal = (
        trained(SUM.with_fields(arms=arms), {"A": 1e-2, "B": 1e-2})
        for arms in ("zero_sum", "equal")
    )
    torch.testing.assert_close(outputs(apart), outputs(equal), rtol=0, atol=1e-4)
    (_, layer), *_ = apart.layers()
    first, second = layer.B.split(2, dim=1)
    assert (first - second).abs().max() > 0.1


def test_own_masks_part_the_arms_and_one_mask_does_not() -> None:
    for arms, parted in (("own_masks", True), ("equal", False)):
        value = SUM.with_fields(arms=arms, dropout=0.5)
        (_, layer), *_ = trained(value, {"A": 1e-2, "B": 1e-2}).layers()
        first, second = layer.B.split(2, dim=1)
        assert torch.equal(first, second) != parted


def test_starting_apart_adds_up_to_zero_exactly_however_rows_are_sharded() -> None:
    for arms in (2, 3, 8):
        drawn = numbers(10, 24)
        made = summing_to_zero(drawn, arms, 1.0)
        assert not made.unflatten(1, (arms, -1)).sum(1).any()
        assert torch.equal(made[3:7], summing_to_zero(drawn[3:7], arms, 1.0))
        assert 0.3 < made.std() < 1.1
    model, before = llama(), llama()(tokens())
    SUM.with_fields(arms="zero_sum").attach(model)
    assert torch.equal(model(tokens()), before)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(tokens()), llama()(tokens()))


@pytest.mark.expensive
@pytest.mark.parametrize("value", [FOLD, SUM.with_fields(arms="zero_sum")], ids=["fold", "apart"])
def test_the_battery_on_other_fields(value: BlockLoRA) -> None:
    """Of the fold what works on widths that N divides; the others are refused by name."""
    results = {each.name: each for each in run_battery(value, cheap_only=True)}
    failed = {name: each.message for name, each in results.items() if not each.passed}
    if value.structure == "fold":
        failed = {name: why for name, why in failed.items() if "does not divide" not in why}
    assert failed == {}
    passed = ("work", "activations", "parameters_and_bytes", "autocast", "bf16_base")
    assert all(results[name].passed and not results[name].skipped for name in passed)


@both
def test_it_travels_as_lora_of_its_rank(value: BlockLoRA, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ours, base = hugging_face_llama(), hugging_face_llama()
    stir(value.attach(ours)).save(tmp_path)
    with torch.no_grad():
        before, expected = base(tokens()).logits, ours(tokens()).logits
        loaded = peft.PeftModel.from_pretrained(base, tmp_path)
        assert (before - expected).abs().max() > 0.1
        torch.testing.assert_close(loaded(tokens()).logits, expected, rtol=0, atol=2e-5)
    assert loaded.peft_config["default"].r == (2 if value is SUM else 4)
    again = load(hugging_face_llama(), tmp_path)
    assert again.method.info.name == "lora"


def test_what_does_not_divide_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"blocks: .*rank \(4\); the nearest that divides all is 2"
    ):
        BlockLoRA(rank=4, blocks=3)
    model = odd_model()
    before = {name: (type(module), module.training) for name, module in model.named_modules()}
    with pytest.raises(InputError, match=r"wide \(7\), narrow \(13\).*nearest.* is 1"):
        FOLD.attach(model)
    assert before == {name: (type(m), m.training) for name, m in model.named_modules()}
    assert all(parameter.requires_grad for parameter in model.parameters())
    with pytest.raises(InputError, match="symbols"):
        SUM.with_fields(targets=("embed_tokens",)).attach(llama())
