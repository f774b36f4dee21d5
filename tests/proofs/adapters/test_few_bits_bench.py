from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA, QAHiRA
from modicum.core.contracts.catalog import find
from modicum.core.layers.linear_forms import form_of, full_weight, linear_form
from modicum.linears import NF4, TileLinear, Tiles
from modicum.proofs.adapters.few_bits_bench import FewBitsBench, OnBase, merge_into
from modicum.proofs.adapters.permutation_bench import QUICK
from modicum.proofs.adapters.qa_lora import QALoRA
from modicum.proofs.base import ProofRun
from modicum.proofs.contracts.adapters.subjects import distance, numbers, stir

TINY = replace(
    QUICK, symbols=8, tokens=8, blocks=1, width=32, mlp_width=32, pretraining_steps=40, steps=20
)
BASE = Tiles(bits=2, zero_points="fp32")


@pytest.fixture
def tiny() -> FewBitsBench:
    return FewBitsBench(ProofRun(find("lora"), null=False, full=False), TINY, seeds=3)


def test_the_run_has_as_many_seeds_as_asked(tiny: FewBitsBench) -> None:
    assert tiny.sweep.run.seeds == tiny.plain.seeds == (0, 1, 2)


def test_merging_costs_what_is_rounded_again_and_nothing_else(tiny: FewBitsBench) -> None:
    base = BASE
    ours = tiny.tune(OnBase(QAHiRA(), base), 6e-2)
    lora = tiny.tune(OnBase(LoRA(rank=2), base), 6e-2)
    assert ours.untrained == lora.untrained
    assert abs(ours.lost) < 1e-5
    assert lora.lost > 1e-2
    for tuned in (ours, lora):
        assert tuned.excess < tuned.untrained
        assert tuned.lost == tuned.merged - tuned.excess
    assert ours.trained == 7 * 32 * 32 // 32
    assert tiny.tune(OnBase(QAHiRA(), base), 6e-2) == ours


@pytest.mark.parametrize("base", [BASE, NF4()])
def test_what_became_dense_is_coded_again(base: Tiles | NF4) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    name = base.info.name
    type(base)(**(base.model_dump() | {"targets": ("0",)})).convert(model)
    adapter = stir(LoRA(rank=2, targets=("0",)).attach(model), std=0.5)
    wanted = full_weight(model[0]) + next(adapter.layers())[1].delta()
    merge_into(adapter, base)
    assert [form_of(layer) for layer in model] == [linear_form(name), linear_form("dense")]
    arguments = form_of(model[0]).arguments(model[0])
    assert torch.equal(full_weight(model[0]), linear_form(name).round_trip(wanted, **arguments))


def test_the_rival_s_change_is_one_number_a_group_and_merges_into_its_rows() -> None:
    rows = Tiles(bits=2, tile_rows=1, tile_columns=8, zero_points="fp32", targets=("0",))
    model, x = nn.Sequential(nn.Linear(24, 6)), numbers(5, 24)
    rows.convert(model)
    adapter = stir(QALoRA(rank=2, group=8).attach(model), std=0.5)
    unmerged = model(x)
    [(_, layer)] = adapter.layers()
    change = layer.delta().unflatten(1, (3, 8))
    assert torch.equal(change, change[..., :1].expand_as(change))
    assert change.abs().min() > 0
    adapter.merge()
    assert isinstance(model[0], TileLinear)
    assert distance(model(x), unmerged) < 1e-5
