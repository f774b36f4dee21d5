"""The benchmark of faults on the wire: what it draws, and what it sums up."""

from __future__ import annotations

import importlib
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT

from modicum.proofs.comm.fault_moments import MOMENTS
from modicum.recipe import Recipe


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("comm_faults")


def test_every_fault_is_injected_as_often_at_drawn_moments(bench) -> None:
    drawn = [bench.drawn(3, number) for number in range(100)]
    assert drawn[7] == bench.drawn(3, 7)
    assert drawn[8] != bench.drawn(4, 8)
    assert set(Counter(each["kind"] for each in drawn).values()) == {20}
    cuts = [each for each in drawn if each["kind"] == "cut"]
    assert {each["rank"] for each in cuts} == {0, 1}
    assert len({each["step"] for each in cuts}) > 3
    assert any(each["step"] == 0 for each in drawn if each["kind"] in ("cut", "paused", "killed"))
    assert all(0 <= each["step"] < bench.STEPS - 2 for each in drawn)
    for kind in ("cut", "paused", "killed"):
        moments = Counter(each["moment"] for each in drawn if each["kind"] == kind)
        assert moments[None] == 10
        assert set(moments) == {None, *MOMENTS}
    assert not any(each["moment"] for each in drawn if each["kind"] in ("nan", "other recipe"))


def test_what_is_wrong_stays_in_the_row(bench) -> None:
    good: dict[str, Any] = {
        "kind": "cut", "rank": 1, "step": 4, "moment": None, "seconds": 6.0, "ended": 6.5,
        "codes": [4, 4], "said": ["", ""], "outcome": "calm", "to_the_bit": None,
    }  # fmt: skip
    bad = good | {"seconds": None, "outcome": "", "step": 0}
    found = bench.row([bench.judged(each, "calm") for each in (good, good | {"seconds": 8.0}, bad)])
    assert (found["injected"], found["right"], found["resumed_to_the_bit"]) == (3, 2, 2)
    assert found["greatest_seconds_to_the_sentence"] is None  # of one that nobody said
    assert found["median_seconds_to_the_sentence"] == 7.0
    [wrong] = found["wrong"]
    assert wrong["step"] == 0
    assert len(wrong["wrong"]) == 2


def test_its_run_owes_what_it_leaves_unsent_and_is_watched(bench, tmp_path) -> None:
    recipe = Recipe(**bench.recipe_of(tmp_path / "text.jsonl"))
    assert recipe.comm is not None
    assert recipe.comm["method"] == "acp_sgd"
    assert recipe.watchdog == {"method": "c4"}
