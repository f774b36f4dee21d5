"""The decoder's ledger where blocks differ: other heads, and streams that branches leave out."""

from __future__ import annotations

from typing import Any

import pytest
from tests.models.test_ledger import LORAS, config, flops, model, peaks, predicted, saved_bytes
from tests.models.test_ledger import shape as shape_of
from tests.models.test_ledger import told as kept
from tests.models.test_traced_ledger import both

from modicum.core.contracts.ledger import PHASES
from modicum.core.layers.block_kinds import block_lists
from modicum.core.layers.form_plan import FormPlan
from modicum.models.ledger import ledger


def block(number: int) -> str:
    return f"model.layers.{number}"


def ladder(blocks: int) -> FormPlan:
    plan = FormPlan().with_block(block(0), mlp_skips=[1])
    for n in range(1, blocks):
        plan = plan.with_block(block(n), mixer_skips=[1], mlp_skips=[1])
    return plan


def shallow(blocks: int) -> FormPlan:
    plan = FormPlan()
    for n in range(1, blocks):
        own = {"mixer_skips": [(1, 2 * n)], "mlp_skips": [(2, 2 * n + 1)]}
        plan = plan.with_block(block(n), **own)
    return plan


def parallel(blocks: int) -> FormPlan:
    plan = FormPlan()
    for n in range(blocks):
        plan = plan.with_block(block(n), mlp_skips=[1])
    return plan


NARROW = FormPlan().with_block(block(1), heads=2, kv_heads=1, mlp_width=20)
WIDE = FormPlan().with_block(block(1), heads=8, kv_heads=8, mlp_width=200)
FORMS = {
    "narrow": NARROW,
    "wide": WIDE,
    "ladder": ladder(3),
    "shallow": shallow(3),
    "parallel": parallel(3),
    "narrow ladder": ladder(3).with_blocks(
        {block(1): ladder(3).with_block(block(1), heads=2).block(block(1))}
    ),
}


def made(name: str, **fields: Any) -> Any:
    return config(**{"width": 32, "heads": 4, "kv_heads": 2, "forms": FORMS[name], **fields})


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapter", ["full", "lora", "q and v", "late"])
@pytest.mark.parametrize("name", FORMS)
def test_saved_activations_are_those_that_autograd_keeps(
    name: str, adapter: str, half: bool
) -> None:
    method = LORAS[adapter]
    measured = saved_bytes(model(made(name), method, half), half, False)
    found = predicted(made(name), method, shape_of(method, half, False))
    # Where no attention behind what learns reads it, positions are not kept for a backward pass.
    unread = adapter == "late" and name in ("ladder", "shallow", "narrow ladder")
    positions = sum(e.bytes for e in found.entries if e.what == "positions, masks")
    assert kept(found) - positions * unread == measured


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", FORMS)
def test_flops_are_those_of_pytorchs_counter(name: str, recompute: bool) -> None:
    full = model(made(name), None, False)
    full.recompute = recompute
    expected = ledger(made(name), shape_of(None, False, False), recompute=recompute)
    assert flops(full) == (expected.flops("forward"), expected.flops("backward"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("name", FORMS)
def test_the_peak_is_the_one_that_the_meter_sees(name: str, adapter: str, recompute: bool) -> None:
    fields = {"forms": FORMS[name], "kv_heads": 2, "vocabulary_size": 30}
    measured, peak = peaks(fields, adapter, False, recompute, 1)
    assert 0.99 * measured <= peak <= 1.03 * measured


TRACED = {
    "ladder": ladder(6),
    "shallow": shallow(6),
    "parallel": parallel(6),
    "in groups": FormPlan().with_blocks(
        {block(n): shallow(3).block(block(n % 3)) for n in range(6)},
    ),
    "narrow": NARROW,
}


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", TRACED)
def test_the_arithmetic_is_what_a_trace_finds(name: str, recompute: bool) -> None:
    traced, told = both("full", False, False, 1, {"forms": TRACED[name]}, recompute)
    for phase in PHASES:
        assert traced.by_phase()[phase] == pytest.approx(told.by_phase()[phase], rel=0.01), phase
    assert traced.flops() == told.flops()


def test_a_shorter_model_has_streams_that_fit() -> None:
    groups = FormPlan().with_blocks({block(n): shallow(2).block(block(n % 2)) for n in range(8)})
    shorter = {"ladder": (ladder(9), 3, 9), "late": (late(ladder(9), 5), 5, 9)}
    shorter["groups"] = groups, 4, 8
    # A ladder behind groups begins as none of them does, so nothing is left out.
    both_ways = groups.with_blocks(late(ladder(11), 8).blocks)
    shorter["both"] = both_ways.with_block(block(8), mixer_skips=()), 11, 11
    for plan, expected, layers in shorter.values():
        made = model(config(width=32, heads=4, layers=layers, forms=plan), None, False)
        (found,) = block_lists(made, made.blocks)
        assert len(found.kept) == expected
        assert sum(found.kept.values()) == layers


def late(plan: FormPlan, first: int) -> FormPlan:
    """The plan for later blocks alone."""
    return FormPlan(blocks={n: b for n, b in plan.blocks.items() if int(n[13:]) >= first})
