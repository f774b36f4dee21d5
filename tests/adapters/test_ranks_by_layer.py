"""Adapters whose layers have ranks of their own: in files of PEFT, both ways, and in plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, load
from modicum.adapters.base import Adapter
from modicum.adapters.files import read_stored
from modicum.adapters.loldu import LoLDU
from modicum.adapters.starting import fields_of
from modicum.adapters.svfit import SVFit
from modicum.core.errors import InputError
from modicum.planner.sharing import Structure
from modicum.proofs.contracts.adapters.subjects import stir
from modicum.proofs.contracts.transformers_loop import hugging_face_llama

peft = pytest.importorskip("peft")


def model() -> nn.Module:
    return hugging_face_llama().eval()


@torch.no_grad()
def logits(of: nn.Module) -> Tensor:
    outputs: Tensor = of(input_ids=torch.arange(12).view(2, 6)).logits
    return outputs


def theirs(**patterns: dict[str, float]) -> nn.Module:
    names = ["q_proj", "k_proj", "up_proj"]
    config = peft.LoraConfig(
        r=2, lora_alpha=3, target_modules=names, init_lora_weights=False, **patterns
    )
    return peft.get_peft_model(model(), config).eval()


@pytest.mark.parametrize(
    "patterns",
    [
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 5.0}},
        {"rank_pattern": {r"^model.layers.0.*k_proj": 1}},
        {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"layers.0.mlp.up_proj": 1}},
        {"rank_pattern": {"q_proj": 4}, "use_rslora": True},
    ],
    ids=str,
)
def test_we_load_and_write_what_peft_has(
    patterns: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    wrapped = theirs(**patterns)
    wrapped.save_pretrained(tmp_path / "theirs")
    ours = model()
    adapter = load(ours, tmp_path / "theirs")
    torch.testing.assert_close(logits(ours), logits(wrapped), rtol=0, atol=1e-5)
    adapter.save(tmp_path / "ours", form="peft")
    again = peft.PeftModel.from_pretrained(model(), tmp_path / "ours").eval()
    torch.testing.assert_close(logits(again), logits(wrapped), rtol=0, atol=1e-5)
    adapter.save(tmp_path / "own", form="modicum")
    other = model()
    load(other, tmp_path / "own")
    assert torch.equal(logits(other), logits(ours))
    adapter.merge()
    torch.testing.assert_close(logits(ours), logits(wrapped), rtol=0, atol=1e-5)


def test_a_method_with_ranks_of_its_layers_is_written_as_a_lora(tmp_path: Path) -> None:
    ours = model()
    adapter = stir(SVFit(rank=None, energy=0.8).attach(ours))
    adapter.save(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    ranks = {name: layer.shift.numel() for name, layer in adapter.layers()}
    assert len(set(ranks.values())) > 1
    assert {config["r"], *config["rank_pattern"].values()} == set(ranks.values())
    assert len(config["rank_pattern"]) < len(ranks)
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path).eval()
    torch.testing.assert_close(logits(loaded), logits(ours), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "patterns",
    [
        {"rank_pattern": ["q_proj"]},
        {"rank_pattern": {"q_proj": 0}},
        {"alpha_pattern": {"q_proj": "much"}},
        {"rank_pattern": {"(": 2}},
    ],
    ids=str,
)
def test_patterns_that_say_nothing_are_refused(patterns: dict[str, object], tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | patterns))
    ours = model()
    before = logits(ours)
    with pytest.raises(InputError, match=next(iter(patterns))):
        load(ours, tmp_path)
    assert torch.equal(logits(ours), before)


def test_training_does_not_start_from_ranks_by_layer(tmp_path: Path) -> None:
    theirs(rank_pattern={"q_proj": 4}).save_pretrained(tmp_path)
    base = model()
    with pytest.raises(InputError, match="ranks of their own"):
        fields_of(read_stored(tmp_path, base), base, LoRA(), {})
    before = logits(base)
    with pytest.raises(InputError, match="ranks of their own, and lora_fa has one"):
        load(base, tmp_path, method="lora_fa")
    assert torch.equal(logits(base), before)


@pytest.mark.parametrize("value", [LoRA(rank=2), LoLDU()], ids=lambda value: value.info.name)
def test_plans_count_each_layer_by_its_own_tensors(value: Adapter) -> None:
    sites = tuple(value.sites(model()))
    structure = Structure((), value, sites)
    assert sum(structure.kinds.values()) == len(sites)
    assert len(structure.kinds) < len(sites)
    for site in sites:
        like = structure.kind_of[site]
        assert value.factors(like) == value.factors(site)
        assert value.derived(like) == value.derived(site)


def test_layers_of_one_shape_and_two_ranks_are_two_kinds() -> None:
    value = LoRA(rank=2)
    base = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7))
    sites = value.sites(base)
    object.__setattr__(sites[1], "prepared", {"rank": 5})
    structure = Structure((), value, tuple(sites))
    assert structure.kinds == {sites[0]: 2, sites[1]: 1}
    assert value.trained(sites[1]) == 5 * 14
