"""Bounds of a step, chains, and where methods begin to pay."""

from __future__ import annotations

from typing import Any

import pytest

from modicum.proofs.comm.step_bounds import World, break_even, chain, halves, judged

WORLD = World(ranks=2, layers=4, width=256, compute=0.2, low_rank=4, steps=1, repeats=2)


def measured(**changes: Any) -> dict[str, Any]:
    row = {"seconds": [2.5, 2.0, 2.25], "said": 1000, "bytes": 1000.0, "calls": 4.0,
           "ring_steps": 8.0, "waited": 0.5, "busy": 0.9, "device": 1066.0,
           "payload": 1010.0}  # fmt: skip
    return row | changes


def test_the_bound_is_the_larger_of_computing_and_the_methods_own_calls() -> None:
    world, link = WORLD, {"latency": 0.01, "rate": 1000.0}
    row = judged(world, "dense_fp32", measured(), 1.0, link)
    assert row["wire"] == row["bound"] == pytest.approx(1.08)
    assert row["over_bound"] == pytest.approx(2.25 / 1.08)
    assert row["bytes_are_ledger"] is True
    assert row["device_over_bytes"] == pytest.approx(1.066)
    assert row["payload_over_bytes"] == pytest.approx(1.01)
    slow = judged(world, "dense_fp32", measured(said=1001), 3.0, link)
    assert (slow["bound"], slow["bytes_are_ledger"]) == (3.0, False)


def test_nobody_meters_ddp_whose_bytes_and_calls_are_in_closed_form() -> None:
    world, link = WORLD, {"latency": 0.01, "rate": 1000.0}
    row = judged(world, "ddp", measured(bytes=0.0, ring_steps=0.0), 1.0, link)
    assert world.buckets("ddp") == 4
    assert row["wire"] == pytest.approx(1.0 + 0.01 * 2 * 4)
    assert row["bytes_are_ledger"] is None
    nothing = judged(world, "dense_fp32", measured(bytes=0.0), 1.0, link)
    assert nothing["bytes_are_ledger"] is False  # the meter is at fault, or nothing was sent


def test_a_chain_begins_with_the_first_gradients() -> None:
    assert chain(3.0, 0.0, 5) == 3.0
    assert chain(3.0, 6.0, 1) == 9.0
    assert chain(3.0, 6.0, 1000) == pytest.approx(7.0, rel=1e-3)  # F + A
    assert chain(3.0, 1.0, 1000) == pytest.approx(3.0, rel=1e-3)  # F + B
    assert chain(3.0, 6.0, 1, late=0.5) == 9.0
    assert halves(3.0, 2.0) == 3.0


def test_where_a_method_begins_to_pay() -> None:
    dense = {0.3: 1.0, 1.0: 1.4, 3.0: 3.0, 10.0: 10.0}
    points = {at: {"dense_fp32": step, "acp_sgd": 1.2} for at, step in dense.items()}
    found = break_even(points, "acp_sgd")
    assert 0.3 < found["exact"] < 1.0
    points[10.0]["acp_sgd"] = 11.0
    assert break_even(points, "acp_sgd")["exact"] is None
    always = {at: {"dense_fp32": 2.0, "ddp": 2.0, "dense_bf16": 1.0, "x": 1.5} for at in dense}
    assert break_even(always, "x") == {"exact": 0.3, "any": None}
