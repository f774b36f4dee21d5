"""The benchmark of exchanges: its links, its recipes, and what is summed up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.errors import InputError
from modicum.proofs.comm.links import burst_for


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    recipes = importlib.import_module("comm_recipes")
    return SimpleNamespace(main=importlib.import_module("comm"), recipes=recipes)


def test_messages_of_the_full_worlds_are_long_enough_for_their_links(bench) -> None:
    """At the fastest link that is shaped; of products of low rank, the shortest."""
    for world, compute in ((bench.main.SLEEPING, 1.0), (bench.main.COMPUTING, 0.9)):
        rate = world.dense_bytes / compute
        product = 4 * world.low_rank * world.width * world.rank
        message = int(2 * (world.ranks - 1) / world.ranks * product)
        assert burst_for(rate, message) > 0
    with pytest.raises(InputError):
        burst_for(rate, message // 4)


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
