"""The benchmark of exchanges: its links, its recipes, and what is summed up."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.core.errors import InputError
from modicum.proofs.comm import links
from modicum.proofs.comm.links import COLD, burst_for


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


def test_what_was_not_measured_holds_no_bar(bench) -> None:
    row = {"over_bound": 1.0, "bytes_are_ledger": None, "step": 1.0, "wire": 0.0}
    found = bench.main.summed({"sleeping": {"ratios": {"3.0": {"none": 1, "arms": {"ours": row}}}}})
    for bar in ("dense_is_as_fast_as_ddp", "acp_sgd_is_faster", "device_counts_the_bytes"):
        assert found[bar] is None


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


GRADIENTS, COMPUTE = 13_000_000, 1.0
LENGTHS = {"dense_fp32": 2_000_000, "acp_sgd": 200_000}  # bytes of a call


class Bench:
    """What the bench of recipes gives at two ranks, and what it was asked for."""

    def __init__(self, off: float) -> None:
        self.off, self.asked = off, list[tuple[Any, ...]]()

    def shaped(self, ranks: int, rates: list[str], name: str, tasks: Any, **more: Any) -> list[Any]:
        self.asked.append((name.partition(":")[2], rates[0], *more["bursts"]))
        if name == COLD:
            return [(1 + self.off) * tasks[0]["message"] * 8 / (1000 * int(rates[0][:-4]))]
        return [self.answer(name, tasks[0])]

    def at_ranks(self, name: str, ranks: int, task: Any, **more: Any) -> list[Any]:
        self.asked.append((name.partition(":")[2], task.get("rate")))
        return [self.answer(name, task)]

    def answer(self, name: str, task: Any) -> Any:
        if name.endswith(":curve"):
            return {"arms": {}, "link": {"rate": 1e6, "latency": 0.01}}
        if name.endswith(":keeps_link"):
            return {"rate": 1e6, "latency": 0.01}
        row = {"seconds": [3.0, 2.0, 2.5], "loss": 1.0, "said": 2e6, "ring_steps": 8.0,
               "forecast": 2.0, "chosen": None}  # fmt: skip
        return {
            label: row | {"bytes": 2e6, "calls": 2e6 / LENGTHS.get(label, 2_000_000)}
            for label in task["recipes"]
        }


@pytest.fixture
def wire(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    def made(off: float = 0.1) -> Bench:
        bench.made = Bench(off)
        for home in (bench.recipes, links):
            monkeypatch.setattr(home, "shaped", bench.made.shaped)
        monkeypatch.setattr(bench.recipes, "at_ranks", bench.made.at_ranks)
        monkeypatch.setattr(bench.recipes, "by_itself", lambda *_: (COMPUTE, GRADIENTS))
        return bench.made

    return made


def in_the_trainer(bench: SimpleNamespace, ratio: float) -> Any:
    ratios = {"pretended": (0.3,), "shaped": (ratio,)}
    recipes = bench.recipes
    found = recipes.in_the_trainer(recipes.FULL_RUN, 14, ratios, True, lambda: 0.25)
    return found["ratios"]


def test_links_of_the_trainer_are_tried_before_they_are_believed(bench, wire) -> None:
    """By the rule of `links`: its burst, and a cold message."""
    wire()
    found = in_the_trainer(bench, 10.0)["10.0"]
    rate = GRADIENTS / (10.0 * COMPUTE)
    burst = burst_for(rate, LENGTHS["acp_sgd"])
    assert (found["link_is"], found["burst"], found["load"]) == ("shaped", burst, 0.25)
    assert burst <= 0.05 * LENGTHS["acp_sgd"]
    assert found["cold_off"] == pytest.approx(0.1)
    at = links.in_tc(rate)
    names = ("cold_seconds", "curve", "trained")
    assert bench.made.asked[-3:] == [(name, at, burst) for name in names]


@pytest.mark.parametrize(("off", "ratio"), [(0.2, 10.0), (0.0, 1.0)])
def test_a_link_that_fails_the_rule_is_pretended_and_says_so(bench, wire, off, ratio) -> None:
    """Its cold message is late; or a twentieth of its messages is less than it passes at once."""
    wire(off)
    found = in_the_trainer(bench, ratio)[str(ratio)]
    assert found["link_is"] == "pretended"
    assert "burst" not in found
    assert ("a cold message takes +20%" if off else "more than a twentieth") in found["not_shaped"]
    assert bench.made.asked[-1] == ("trained", GRADIENTS / ratio)


def test_the_bound_of_the_trainer_counts_each_step_of_a_call(bench, wire) -> None:
    wire()
    found = in_the_trainer(bench, 10.0)
    shaped, pretended = (found[at]["arms"]["acp_sgd"] for at in ("10.0", "0.3"))
    assert shaped["wire"] == shaped["bound"] == pytest.approx(8 * 0.01 + 2.0)
    assert shaped["over_bound"] == pytest.approx(2.5 / 2.08)
    assert pretended["bound"] == COMPUTE
    assert pretended["wire"] == pytest.approx(2e6 / (GRADIENTS / 0.3))


def test_links_for_auto_are_tried_by_the_same_rule(bench, wire, monkeypatch) -> None:
    auto = importlib.import_module("comm_auto")
    made = wire()
    monkeypatch.setattr(auto, "by_itself", lambda *_: (COMPUTE, GRADIENTS))
    loads = iter((0.0, 0.125, 0.25))
    (_, rows) = auto.measured(auto.FULL_RUN, 24, (1.0, 10.0), True, lambda: next(loads))
    assert [(row["link_is"], row["load"]) for row in rows.values()] == [
        ("pretended", 0.125),
        ("shaped", 0.25),
    ]
    burst = burst_for(GRADIENTS / 10, LENGTHS["acp_sgd"])
    assert [each[0] for each in made.asked[-3:]] == ["cold_seconds", "keeps_link", "trained"]
    assert {each[2] for each in made.asked[-3:]} == {burst}
