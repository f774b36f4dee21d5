"""Adapters folded into a LoRA of a rank: the nearest one, its error, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import DoRA, Hydra, LoRA, PiSSA, RandLoRA, folding, load
from modicum.adapters.base import Adapter
from modicum.adapters.folding import folded
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import stir


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.LayerNorm(20), nn.Linear(20, 7))
    return made.to(dtype)


INPUTS = torch.randn(9, 12, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "adapter",
    [
        DoRA(rank=2),
        RandLoRA(rank=4),
        PiSSA(rank=3),
        DoRA(rank=2, dropout=0.5, also=["2"]),
        RandLoRA(rank=3, targets=["0"], also=["0.bias", "2.weight"]),
    ],
    ids=lambda each: f"{each.info.name}{len(each.also)}",
)
@torch.no_grad()
def test_the_errors_are_those_of_the_folder(adapter: Adapter, tmp_path: Path) -> None:
    """By weights the truncated SVD's, by logits those of the file loaded into another model."""
    base = model()
    attached = stir(adapter.attach(base.train()))
    flags = {name: module.training for name, module in base.named_modules()}
    folds = [folded(attached, rank, [INPUTS]) for rank in (1, 3, 12)]
    assert {name: module.training for name, module in base.named_modules()} == flags
    assert folds[0].weights > folds[1].weights > folds[2].weights
    assert folds[2].weights < 1e-5
    base.eval()
    ours = base(INPUTS)
    merged = model()
    stir(adapter.attach(merged)).merge()
    changes = [
        (merged.get_submodule(name).weight - model().get_submodule(name).weight).double()
        for name in attached.sites
    ]
    lost = sum(float(torch.linalg.svdvals(each)[3:].square().sum()) for each in changes)
    size = sum(float(each.square().sum()) for each in changes)
    assert folds[1].weights == pytest.approx((lost / size) ** 0.5, rel=1e-3)
    if "0.bias" in adapter.also:
        return  # PEFT has no place for copies of single parameters
    said = attached.save(tmp_path / "three", rank=3, tolerance=2.0, batches=[{"input": INPUTS}])
    assert said is not None
    assert said.logits == pytest.approx(folds[1].logits, rel=1e-6)
    other = model()
    load(other, tmp_path / "three")
    other.eval()
    plain = model()
    error = (other(INPUTS) - ours).norm() / (ours - plain(INPUTS)).norm()
    assert said.logits == pytest.approx(float(error), rel=1e-3)
    torch.testing.assert_close(base(INPUTS), ours, rtol=0, atol=0)


def test_peft_loads_what_was_folded(tmp_path: Path) -> None:
    """A narrow layer has its own width as rank, and all have one scale."""
    peft = pytest.importorskip("peft")
    base = model()
    attached = stir(DoRA(rank=2).attach(base))
    said = attached.save(tmp_path, rank=9, tolerance=1.0)
    assert said is not None
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["peft_type"], config["use_dora"]) == ("LORA", False)
    assert sorted({config["r"], *config["rank_pattern"].values()}) == [7, 9]
    loaded = peft.PeftModel.from_pretrained(model(), str(tmp_path))
    ours = model()
    load(ours, tmp_path)
    torch.testing.assert_close(loaded(INPUTS), ours(INPUTS), rtol=0, atol=1e-5)
    assert (loaded(INPUTS) - base(INPUTS)).abs().max() < (ours(INPUTS) - model()(INPUTS)).norm()


def test_more_than_the_tolerance_is_refused(tmp_path: Path) -> None:
    attached = stir(DoRA(rank=2).attach(model()))
    exact = folded(attached, 2)
    with pytest.raises(InputError, match=r"a LoRA of rank 2 loses .* and 0\.01 is allowed; give a"):
        attached.save(tmp_path / "a", form="peft", rank=2)
    assert not (tmp_path / "a").exists()
    attached.save(tmp_path / "a", rank=2, tolerance=exact.weights * 1.001)
    for tolerance in (exact.weights * 0.999, float("nan")):
        with pytest.raises(InputError, match="is allowed"):
            attached.save(tmp_path / "b", rank=2, tolerance=tolerance)


def test_wide_layers_take_a_randomized_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = stir(LoRA(rank=3).attach(model()))
    monkeypatch.setattr(folding, "_DIRECT", 4)
    one, other = folded(attached, 3), folded(attached, 3)
    assert one.weights < 1e-5
    pairs = zip(one.factors.values(), other.factors.values(), strict=True)
    assert all(torch.equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize(
    ("adapter", "rank", "match"),
    [
        (LoRA(rank=2), 0, "must be a positive integer"),
        (Hydra(), 2, "it changes the bias of this layer too"),
    ],
)
def test_what_cannot_be_folded_is_refused(
    adapter: Adapter, rank: int, match: str, tmp_path: Path
) -> None:
    attached = stir(adapter.attach(model()))
    with pytest.raises(InputError, match=match):
        attached.save(tmp_path / "a", rank=rank, tolerance=1.0)
    assert not (tmp_path / "a").exists()


def test_merged_broken_and_mistaken_ones_are_refused(tmp_path: Path) -> None:
    attached = stir(LoRA(rank=2).attach(model()))
    for more in ({"form": "modicum"}, {"dtype": torch.bfloat16}):
        with pytest.raises(InputError, match="folds the adapter into a LoRA of PEFT's"):
            attached.save(tmp_path / "a", rank=2, **more)
    with pytest.raises(InputError, match="there is no batch"):
        folded(attached, 2, [])
    says = attached.model.register_forward_hook(lambda *_: "text")
    with pytest.raises(InputError, match="no tensor and no `logits`"):
        folded(attached, 2, [INPUTS])
    says.remove()
    attached.merge()
    with pytest.raises(InputError, match="unmerge it first"):
        folded(attached, 2)
    attached.unmerge()
    with torch.no_grad():
        next(attached.parameters()).fill_(float("inf"))
    with pytest.raises(InputError, match="is not finite"):
        folded(attached, 2)


def test_an_adapter_that_changes_nothing_loses_nothing() -> None:
    found = folded(LoRA(rank=2).attach(model()), 1, [(INPUTS,)])
    assert (found.weights, found.logits) == (0.0, 0.0)


def test_low_precision_and_switched_off_adapters(tmp_path: Path) -> None:
    """The error is of the adapter, whether it is in use or not; its base stays as it is."""
    base = model(dtype=torch.bfloat16)
    attached = stir(DoRA(rank=2).attach(base))
    inputs: Tensor = INPUTS.bfloat16()
    on = folded(attached, 4, [inputs])
    attached.deactivate()
    plain = base(inputs)
    off = folded(attached, 4, [inputs])
    assert on.logits == pytest.approx(off.logits)
    assert not attached.active
    assert torch.equal(base(inputs), plain)
