"""The benchmark of C4: trials in rows, and what the bars are asked of."""

from __future__ import annotations

import importlib
import json
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.benchmarks.conftest import ROOT


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("diagnosis")


def table(bench: Any, **changed: Any) -> dict[str, Any]:
    slow = [{"right": True, "iterations": n, "rate": 0.24} for n in (3, 4, 9)]
    dead = [{"kind": "killed", "right": True, "seconds": 1.5, "ended": 4.0, "code_4": True}] * 3
    down = [{"rank": 1, "right": True, "seconds": 8.1, "ended": 8.4, "code_4": True}] * 3
    rows = {"a port, out": slow, "killed": dead, "a port is down": down} | changed
    return {
        "faults": {fault: bench.row(trials) for fault, trials in rows.items()},
        "nothing, in a ring": bench.at_rest({"iterations": 9, "said": []}, 5.0),
        bench.COST: bench.spread([1.0, 1.002, 1.05]),
        "alarms before faults": 0,
    }


def test_rows_have_what_their_trials_found(bench) -> None:
    rows = table(bench)["faults"]
    assert rows["a port, out"]["right"] == 3
    assert rows["a port, out"]["iterations"]["median"] == 4
    assert rows["killed"]["all others ended with 4"] == 3
    assert rows["a port is down"]["all ended with 4"] == 3
    assert all(bar["holds"] for bar in bench.bars(table(bench)))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"a port, out": [{"right": False, "iterations": 3}]}, "a port, out: right"),
        ({"a port, out": [{"right": True, "iterations": 11}]}, "a port, out: iterations"),
        (
            {"a port is down": [{"right": True, "ended": 10.5, "code_4": True}]},
            "a port is down: seconds to the end",
        ),
        (
            {"a port is down": [{"right": True, "ended": 8.5, "code_4": False}]},
            "a port is down: all ended with 4",
        ),
        (
            {
                "a port is down": [
                    {"right": True, "ended": each, "code_4": True} for each in (8, None)
                ]
            },
            "a port is down: did not end",
        ),
        (
            {"killed": [{"kind": "killed", "right": True, "seconds": 5.5, "code_4": True}]},
            "killed: seconds",
        ),
    ],
)
def test_a_bar_that_is_missed_falls(bench, changed: dict[str, Any], what: str) -> None:
    missed = [bar["what"] for bar in bench.bars(table(bench, **changed)) if not bar["holds"]]
    assert what in missed


def test_alarms_and_cost_count(bench) -> None:
    found = table(bench) | {bench.COST: bench.spread([1.02]), "alarms before faults": 1}
    found["nothing, in a ring"] = bench.at_rest({"iterations": 9, "said": ["a sentence"]}, 5.0)
    missed = [bar["what"] for bar in bench.bars(found) if not bar["holds"]]
    assert missed == ["nothing, in a ring: alarms", bench.COST, "alarms before faults"]


def test_a_part_measured_later_joins_what_the_result_has(
    bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = table(bench) | {"wrong": []}
    missed = [{"kind": "killed", "right": n > 0, "seconds": 2.0, "code_4": True} for n in range(4)]
    none = {"faults": {}, "alarms before faults": 0, "wrong": []}
    fatal = none | {
        "faults": {"paused in compute": bench.row(missed)},
        "alarms before faults": 1,
        "wrong": missed[:1],
    }
    rest = none | {
        "nothing": bench.at_rest({"iterations": 9, "said": []}, 5.0),
        bench.COST: bench.spread([1.004]),
    }
    only_fatal, only_rest = bench.whole({"fatal": fatal}), bench.whole({"rest": rest})
    assert only_fatal["greatest_cost"] is None
    assert only_rest["least_share"] is None
    assert not only_fatal["complete"]
    together = bench.whole({"ports": ports, "fatal": fatal, "rest": rest, "slow": none})
    assert not together["complete"]  # the promise says how many trials
    monkeypatch.setattr(bench, "PROMISED", 3)
    together = bench.whole({"ports": ports, "fatal": fatal, "rest": rest, "slow": none})
    assert together["complete"]
    assert together["least_share"] == 0.75
    assert together["greatest_cost"] == pytest.approx(0.004)
    assert [bar["what"] for bar in together["bars"] if not bar["holds"]] == [
        "paused in compute: right",
        "alarms before faults",
    ]


def test_the_load_is_looked_at_before_each_trial_that_is_made(bench, tmp_path, monkeypatch) -> None:
    asked: list[bool] = []
    loads = iter((0.1, 0.3))

    def quiet(*, refuses: bool) -> float:
        asked.append(refuses)
        return next(loads)

    monkeypatch.setattr(bench, "quiet", quiet)
    file = tmp_path / "trials.jsonl"
    progress = bench.Progress(file, {"of": 1})
    assert progress.of("a", lambda: [1]) == progress.of("a", lambda: [2]) == [1]
    again = bench.Progress(file, {"of": 1}, refuses=False)
    given = SimpleNamespace()

    def trials(progress: Any, found: Any, _: Any) -> dict[str, Any]:
        found["fault"] += [{"right": True} for key in "ab" for _ in progress.of(key, lambda: [3])]
        return {}

    part = bench.of_part(trials, again, given)
    assert asked == [True, False]
    assert part["load before a trial"] == bench.spread([0.1, 0.3])
    assert part["faults"]["fault"]["trials"] == 2
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["key"], line["load"], line["found"]) for line in lines] == [
        ("a", 0.1, [1]),
        ("b", 0.3, [3]),
    ]
    for line in lines:  # of before it was looked at
        del line["load"]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "load before a trial" not in bench.of_part(
        trials, bench.Progress(file, {"of": 1}), given
    )
