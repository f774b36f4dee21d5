"""The benchmark of exchanges: bounds, chains, where methods begin to pay, and what is summed up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.errors import InputError


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    names = ("judging", "recipes")
    found = {name: importlib.import_module(f"comm_{name}") for name in names}
    return SimpleNamespace(main=importlib.import_module("comm"), **found)


def measured(**changes: Any) -> dict[str, Any]:
    row = {"seconds": [2.5, 2.0, 2.25], "said": 1000, "bytes": 1000.0, "calls": 4.0,
           "ring_steps": 8.0, "waited": 0.5, "device": 1066.0, "payload": 1010.0}  # fmt: skip
    return row | changes


def test_the_bound_is_the_larger_of_computing_and_the_methods_own_calls(bench) -> None:
    world, link = bench.main.QUICK, {"latency": 0.01, "rate": 1000.0}
    row = bench.judging.judged(world, "dense_fp32", measured(), 1.0, link)
    assert row["wire"] == row["bound"] == pytest.approx(1.08)
    assert row["over_bound"] == pytest.approx(2.25 / 1.08)
    assert row["bytes_are_ledger"] is True
    assert row["device_over_bytes"] == pytest.approx(1.066)
    assert row["payload_over_bytes"] == pytest.approx(1.01)
    slow = bench.judging.judged(world, "dense_fp32", measured(said=1001), 3.0, link)
    assert (slow["bound"], slow["bytes_are_ledger"]) == (3.0, False)


def test_nobody_meters_ddp_whose_bytes_and_calls_are_in_closed_form(bench) -> None:
    world, link = bench.main.QUICK, {"latency": 0.01, "rate": 1000.0}
    row = bench.judging.judged(world, "ddp", measured(bytes=0.0, ring_steps=0.0), 1.0, link)
    assert world.buckets("ddp") == 4
    assert row["wire"] == pytest.approx(1.0 + 0.01 * 2 * 4)
    assert row["bytes_are_ledger"] is None


def test_a_chain_begins_with_the_first_gradients(bench) -> None:
    chain = bench.judging.chain
    assert chain(3.0, 0.0, 5) == 3.0
    assert chain(3.0, 6.0, 1) == 9.0
    assert chain(3.0, 6.0, 1000) == pytest.approx(7.0, rel=1e-3)  # F + A
    assert chain(3.0, 1.0, 1000) == pytest.approx(3.0, rel=1e-3)  # F + B
    assert chain(3.0, 6.0, 1, late=0.5) == 9.0
    assert bench.judging.halves(3.0, 2.0) == 3.0


def test_where_a_method_begins_to_pay(bench) -> None:
    dense = {0.3: 1.0, 1.0: 1.4, 3.0: 3.0, 10.0: 10.0}
    points = {at: {"dense_fp32": step, "acp_sgd": 1.2} for at, step in dense.items()}
    found = bench.judging.break_even(points, "acp_sgd")
    assert 0.3 < found["exact"] < 1.0
    points[10.0]["acp_sgd"] = 11.0
    assert bench.judging.break_even(points, "acp_sgd")["exact"] is None
    always = {at: {"dense_fp32": 2.0, "ddp": 2.0, "dense_bf16": 1.0, "x": 1.5} for at in dense}
    assert bench.judging.break_even(always, "x") == {"exact": 0.3, "any": None}


def test_messages_of_the_full_worlds_are_long_enough_for_their_links(bench) -> None:
    """At the fastest link that is shaped; of products of low rank, the shortest."""
    for world, compute in ((bench.main.SLEEPING, 1.0), (bench.main.COMPUTING, 0.9)):
        rate = world.dense_bytes / compute
        product = 4 * world.low_rank * world.width * world.rank
        message = int(2 * (world.ranks - 1) / world.ranks * product)
        assert bench.main.burst_for(rate, message) > 0
    with pytest.raises(InputError):
        bench.main.burst_for(rate, message // 4)


def test_the_sum_names_what_is_over_its_bound_and_off_its_ledger(bench) -> None:
    row = {"over_bound": 1.2, "bytes_are_ledger": True, "step": 2.0, "wire": 0.5}
    arms = {"acp_sgd": row, "dear": row | {"over_bound": 1.3, "bytes_are_ledger": False}}
    others = {"powersgd": row | {"step": 2.5}, "ddp": row, "dense_fp32": row | {"step": 2.04}}
    slower = {name: one | {"over_bound": 1.1} for name, one in {"acp_sgd": row, **others}.items()}
    world = {
        "ratios": {"1.0": {"arms": arms, "none": 1.0}, "3.0": {"arms": slower, "none": 1.0}},
        "pretended_over_shaped": {"1.0": {"dear": 0.9, "acp_sgd": 1.02}},
    }
    found = bench.main.summed({"sleeping": world})
    assert found["greatest_over_bound"] == {"acp_sgd": 1.2, "dear": 1.3} | dict.fromkeys(
        others, 1.1
    )
    assert found["within_bar"] == dict.fromkeys(slower, True) | {"dear": False}
    assert found["dense_over_ddp"] == {"sleeping, 3.0": pytest.approx(1.02)}
    assert found["dense_is_as_fast_as_ddp"]
    assert found["powersgd_over_acp_sgd"] == {"sleeping, 3.0": pytest.approx(1.25)}
    assert found["acp_sgd_is_faster"]
    assert found["bytes_other_than_the_ledger"] == ["sleeping, ratio 1.0, dear"]
    assert found["other_than_the_ledger"] == 1
    assert found["pretended_off_shaped"] == pytest.approx(0.1)
    assert found["pretended_is_shaped"] is True


def test_recipes_differ_in_their_exchange_alone(bench, tmp_path) -> None:
    from modicum.recipe import Recipe

    data = tmp_path / "text.jsonl"
    bench.recipes.write_data(data)
    assert len(data.read_text().splitlines()) == 1500
    made = bench.recipes.recipes_of(data, 8, bench.recipes.FULL_RUN)
    assert set(made) == set(bench.main.QUICK.arms()) - {"none", "ddp"}
    kept = {label: Recipe(**values) for label, values in made.items()}
    assert kept["acp_sgd"].comm["method"] == "acp_sgd"
    for recipe in kept.values():
        assert recipe.training == kept["dear"].training
        assert recipe.model == kept["dear"].model
