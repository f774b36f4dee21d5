"""Where adapters can be used outside: by their LoRA's rank, PEFT's formats and vLLM's rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from modicum.adapters import DoRA, Hydra, LoRA, PiSSA, QAHiRA, RandLoRA, SHiRA
from modicum.adapters.base import Adapter
from modicum.adapters.travel import Travel, travel_of
from modicum.core.contracts.catalog import catalog
from modicum.core.contracts.travel import travel_form


def found(adapter: Adapter, device: str = "meta", **sizes: Any) -> Travel:
    inputs = sizes.get("inputs", 8)
    with torch.device(device):
        first = nn.Linear(inputs, inputs + 4, bias=sizes.get("bias", True))
        model = nn.Sequential(first, nn.LayerNorm(inputs + 4), nn.Embedding(5, inputs + 4))
    return travel_of(adapter.attach(model))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize(
    ("adapter", "form", "ranks", "said"),
    [
        (LoRA(rank=4), "lora", (4, 4), "--max-lora-rank 8, not run here"),
        (PiSSA(rank=3), "lora", (6, 6), "a LoRA of rank 6, exact"),
        (LoRA(rank=9), "lora", (9, 9), "--max-lora-rank 16, not run here"),
        (LoRA(rank=513), "lora", (513, 513), "not in vLLM: its largest rank is 512"),
        (LoRA(rank=2, also=["1"]), "lora", (2, 2), "it takes no `modules_to_save`"),
        (LoRA(rank=2, targets=["2"]), "lora", (2, 2), "linear ones, and here is an embedding"),
        (DoRA(rank=2), "peft", None, "it takes no `use_dora`"),
        (RandLoRA(rank=2, pairing="rank"), "peft", None, "it takes no `RANDLORA`"),
        (SHiRA(rank=2), "peft", None, "it takes no `SHIRA`"),
        (RandLoRA(rank=2), "merged", None, "PEFT pairs the columns"),
        (QAHiRA(tile_rows=4, tile_columns=4), "merged", None, "qa_hira is no plain LoRA here"),
        (LoRA(rank=2, also=["1.bias"]), "merged", None, "copies of single parameters"),
    ],
)
def test_what_an_adapter_is_outside(
    adapter: Adapter, form: str, ranks: tuple[int, int] | None, said: str, device: str
) -> None:
    travel = found(adapter, device, inputs=max(8, getattr(adapter, "rank", 8)))
    assert (travel.form, travel.ranks) == (form, ranks)
    assert said in travel.reason
    keeps_rules = form == "lora" and "not in vLLM" not in travel.reason
    assert travel.row()["in_vllm"] == keeps_rules == ("vLLM" in travel.loads_in)


def test_a_branch_behind_a_bias_is_a_lora_with_one() -> None:
    adapter = Hydra(learn_scale=True)
    assert found(adapter, bias=False).form == "lora"
    assert found(adapter).form == "peft"
    assert "it takes no `lora_bias`" in found(adapter).reason


def test_scales_that_differ_are_outside_of_vllm(tmp_path: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    attached = LoRA(rank=2, alpha=2.0).attach(model())
    assert travel_of(attached).loads_in == "peft, vLLM"
    for _, layer in attached.layers():
        vars(layer)["scale"] = 1.0 + float(layer.site.name)
    travel = travel_of(attached)
    assert travel.loads_in == "peft"
    assert "one `lora_alpha` / `r` for all layers" in travel.reason


def test_the_catalog_says_it_without_a_model() -> None:
    known = {name: record.as_json()["loads_in"] for name, record in catalog().items()}
    expected = {"lora": "peft, vLLM", "dora": "peft", "randlora": "merged only", "galore": None}
    assert {name: known[name] for name in expected} == expected
    assert travel_form(RandLoRA(pairing="rank").traits) == "peft"
    assert travel_form({"adapts_base", "after_block"}) == "here"
