from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from formula_trials import RATE, Bowl, sides
from hypothesis import given, settings
from hypothesis import strategies as st

from modicum.comparison import (
    Comparison,
    OneOf,
    Outcome,
    Settings,
    Side,
    Study,
    TrialPart,
    TrialRange,
)
from modicum.core import files
from modicum.core.errors import InputError, Interrupted

AB = sides("a", "b")
WIDE = TrialRange(1e-4, 1, 1e-3)


def run(folder: Path, trial: Any, **arguments: Any) -> Comparison:
    values: dict[str, Any] = {"sides": AB, "journal": False, "sampler": "grid"} | arguments
    retry = values.pop("retry", False)
    return Study(folder, values.pop("sides"), trial, **values).run(retry=retry)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "compare.json").read_text())
    return found


def test_a_better_side_is_found_and_the_result_says_all(tmp_path: Path) -> None:
    bowl, events = Bowl(gains={"b": 0.05}), list[dict[str, Any]]()
    study = Study(tmp_path, AB, bowl, seeds=6, given={"recipe": 1})
    found = study.run(events.append)
    assert found.winner == "b"
    (difference,) = found.judgement.differences
    assert (difference.side, difference.against, difference.verdict) == ("a", "b", "worse")
    assert difference.mean == pytest.approx(0.05, abs=0.02)
    assert found.tests["held out"].winner == "b"
    assert [row.job.part for row in found.trials].count("judge") == 12
    counts = Counter((row.job.side, row.job.part) for row in found.trials)
    assert counts["a", "tune"] == counts["b", "tune"] == 12
    assert len(bowl.calls) == len(found.trials) == len(set(bowl.calls))
    seeds = {part: {row.job.seed for row in found.trials if row.job.part == part}
             for part in ("tune", "judge")}  # fmt: skip
    assert seeds == {"tune": {0, 1000, 1001}, "judge": {1, 2, 3, 4, 5, 6}}
    assert found.data[1] == {"hash": "d1", "same": True, "hashes": {"a": "d1", "b": "d1"}}
    side = found.side("a")
    assert side.frozen == {"method": "a"} | {"rate": side.frozen["rate"]} if side.frozen else False
    assert [value for value, _, _ in side.curves["rate"]] == sorted(
        value for value, _, _ in side.curves["rate"]
    )
    assert result(tmp_path) == json.loads(json.dumps(found.to_json()))
    names = [event["event"] for event in events]
    assert names[0] == "begun"
    assert names[-2:] == ["trial", "judged"]
    assert names.count("trial") == 36
    assert names.count("frozen") == 1


def test_settings_are_frozen_before_any_trial_judges(tmp_path: Path) -> None:
    def trial(side: str, settings: Settings, seed: int, part: TrialPart) -> Outcome:
        frozen = json.loads((tmp_path / "study.json").read_text())["frozen"]
        assert (frozen is not None) == (part == "judge")
        assert frozen is None or frozen["settings"][side] == settings
        return Bowl()(side, settings, seed, part)

    assert all(side.frozen for side in run(tmp_path, trial).sides)


@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(4)), parallel=st.integers(2, 4))
def test_the_result_does_not_depend_on_who_finishes_first(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], parallel: int
) -> None:
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    run(alone, Bowl(), sampler="tpe", trials=8)
    turn, bowl = threading.Semaphore(1), Bowl()

    def trial(side: str, values: Settings, seed: int, part: TrialPart) -> Outcome:
        for _ in range(order[len(bowl.calls) % 4]):
            with turn:
                pass
        return bowl(side, values, seed, part)

    run(together, trial, sampler="tpe", trials=8, parallel=parallel)
    assert result(together) == result(alone)


@pytest.mark.expensive
def test_trials_run_in_processes_too(tmp_path: Path) -> None:
    run(tmp_path / "here", Bowl(), trials=6)
    with ProcessPoolExecutor(2) as executor:
        run(tmp_path / "there", Bowl(), trials=6, executor=executor)
    assert result(tmp_path / "there") == result(tmp_path / "here")


def test_a_study_that_is_done_runs_nothing_again(tmp_path: Path) -> None:
    run(tmp_path, Bowl())
    before, again = result(tmp_path), Bowl()
    run(tmp_path, again)
    assert again.calls == []
    assert result(tmp_path) == before


@pytest.mark.expensive
@settings(max_examples=12, deadline=None)
@given(kills=st.lists(st.integers(0, 30), min_size=1, max_size=4), parallel=st.sampled_from([1, 3]))
def test_a_study_that_is_stopped_ends_as_one_that_is_not(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int], parallel: int
) -> None:
    calm, broken = tmp_path_factory.mktemp("calm"), tmp_path_factory.mktemp("broken")
    run(calm, Bowl())
    finished: Counter[str] = Counter()
    for kill in [*kills, 1000]:
        bowl = Bowl()

        def trial(
            side: str,
            values: Settings,
            seed: int,
            part: TrialPart,
            kill: int = kill,
            b: Bowl = bowl,
        ) -> Outcome:
            if len(b.calls) >= kill:
                raise KeyboardInterrupt
            outcome = b(side, values, seed, part)
            finished[f"{side} {sorted(values.items())} {seed} {part}"] += 1
            return outcome

        try:
            run(broken, trial, parallel=parallel)
        except Interrupted as error:
            assert "the same command resumes" in str(error)  # noqa: PT017
    assert result(broken) == result(calm)
    assert set(finished.values()) == {1}


@pytest.mark.expensive
@pytest.mark.parametrize("sampler", ["grid", "tpe"])
def test_a_process_that_dies_at_any_trial_leaves_what_resumes(tmp_path: Path, sampler: str) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from formula_trials import Bowl, sides
from modicum.comparison import Study
bowl, kill = Bowl(), int(sys.argv[2])
def trial(*arguments):
    if len(bowl.calls) == kill:
        os._exit(9)
    return bowl(*arguments)
Study(sys.argv[1], sides("a", "b"), trial, sampler={sampler!r}).run()
print(len(bowl.calls))
"""
    run(tmp_path / "calm", Bowl(), sampler=sampler)
    done = 0
    for kill in (0, 7, 3, 11, 2, 1000):
        command = [sys.executable, "-c", program, str(tmp_path / "killed"), str(kill)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == (9 if kill < 1000 else 0), ended.stderr
        done += kill if kill < 1000 else int(ended.stdout)
    assert done == 34
    assert result(tmp_path / "killed") == result(tmp_path / "calm")
    assert (tmp_path / "killed" / "journal.log").is_file()


def test_trials_and_seeds_may_grow_as_if_they_had_been_so_from_the_start(tmp_path: Path) -> None:
    run(tmp_path / "grown", Bowl(), trials=6, seeds=2)
    grown = Bowl()
    run(tmp_path / "grown", grown, trials=13, seeds=6)
    fresh = Bowl()
    run(tmp_path / "fresh", fresh, trials=13, seeds=6)
    ours, theirs = result(tmp_path / "grown"), result(tmp_path / "fresh")
    assert len(grown.calls) < len(fresh.calls)
    assert ours.pop("frozen_before") != theirs.pop("frozen_before") or ours == theirs
    assert ours == theirs
    with pytest.raises(InputError, match=r"trials: this comparison has more trials.*13 or more"):
        run(tmp_path / "grown", Bowl(), trials=12, seeds=6)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"given": {"recipe": 2}}, r"given\.recipe: 1 there, 2 here"),
        ({"sampler": "random"}, r'sampler: "grid" there, "random" here'),
        (
            {"sides": sides("a", "b", rate=WIDE)},
            r"a\.space\.rate\.high: 0\.1 there",
        ),
        ({"sides": sides("a", "c")}, r"sides\.b: \{.*there, nothing here"),
        ({"seed": 3}, "seed: 0 there, 3 here"),
        ({"baseline": "a"}, 'baseline: null there, "a" here'),
    ],
)
def test_another_study_in_the_folder_is_refused_with_the_difference(
    tmp_path: Path, other: Mapping[str, Any], difference: str
) -> None:
    run(tmp_path, Bowl(), trials=1, seeds=1, given={"recipe": 1})
    trial = Bowl()
    with pytest.raises(InputError, match=f"holds another comparison.*{difference}"):
        run(tmp_path, trial, **{"trials": 1, "seeds": 1, "given": {"recipe": 1}} | dict(other))
    assert trial.calls == []


@pytest.mark.parametrize("sampler", ["grid", "random", "tpe"])
def test_a_best_value_at_the_edge_widens_and_gives_all_sides_as_many_more(
    tmp_path: Path, sampler: Any
) -> None:
    narrow = Side("b", {"rate": TrialRange(1e-4, 1e-3, 3e-4)}, {"method": "b"})
    found = run(tmp_path, Bowl(), sides=[AB[0], narrow], sampler=sampler)
    counts = Counter(row.job.side for row in found.trials if row.job.part == "tune")
    assert counts["a"] == counts["b"] > 12
    assert any("its range became" in note for note in found.side("b").notes)
    frozen = found.side("b").frozen
    assert frozen is not None
    assert frozen["rate"] > 1e-3


def test_an_edge_that_stays_best_is_noted(tmp_path: Path) -> None:
    hard = TrialRange(1e-4, 1e-3, 3e-4, bounds=(1e-4, 1e-3))
    found = run(tmp_path, Bowl(), sides=[AB[0], Side("b", {"rate": hard}, {"method": "b"})])
    assert found.side("b").notes == [
        "rate is best at its edge 0.001, beyond which nothing was tried"
    ]


def test_failures_are_reported_as_such_and_the_others_continue(tmp_path: Path) -> None:
    trial = Bowl(
        ends={
            ("a", 2): "diverged",
            ("c", 3): MemoryError("no room"),
            ("d", None): ZeroDivisionError("by zero"),
            ("e", None): InputError("rank is too large"),
        }
    )
    five = [*sides("a", "b", "c", "d", "e"), Side("f", refusal="LoRA and SGD do not combine")]
    found = run(tmp_path, trial, sides=five)
    problems = {one.side: one.problem for one in found.judgement.standings}
    assert problems == {
        "a": "diverged in 1 of 5 seeds",
        "b": "",
        "c": "out of memory in 1 of 5 seeds",
        "d": "was not run in 5 of 5 seeds",
        "e": "was not run in 5 of 5 seeds",
        "f": "was not run in 5 of 5 seeds",
    }
    assert found.side("d").problem.startswith(
        "none of 8 trials finished: crashed, ZeroDivisionError: by zero"
    )
    assert found.side("e").problem.endswith("refused, rank is too large")
    assert found.side("f").problem == "LoRA and SGD do not combine"
    assert {one.verdict for one in found.judgement.differences} == {"not judged"}
    assert found.winner is None
    again = Bowl()
    run(tmp_path, again, sides=five, retry=True)
    assert {call[0] for call in again.calls} == {"c", "d", "e"}


def test_one_seed_is_run_and_has_no_interval(tmp_path: Path) -> None:
    (difference,) = run(tmp_path, Bowl(), trials=1, seeds=1).judgement.differences
    assert difference.interval is None
    assert (difference.verdict, difference.reason) == ("not judged", "one seed has no interval")


def test_a_damaged_record_is_trained_again_and_nothing_else(tmp_path: Path) -> None:
    run(tmp_path, Bowl())
    before = result(tmp_path)
    first, second = sorted((tmp_path / "trials").glob("*.json"))[:2]
    first.write_text('{"side": ')
    second.write_text(first.with_name(second.name).read_text().replace('"seed": ', '"seed": 9'))
    trial, events = Bowl(), list[dict[str, Any]]()
    Study(tmp_path, AB, trial, sampler="grid", journal=False).run(events.append)
    damaged = [event["file"] for event in events if event["event"] == "damaged"]
    assert damaged == [str(first), str(second)]
    assert len(trial.calls) == 2
    assert result(tmp_path) == before


@pytest.mark.parametrize("text", ["", '{"format": ', "[]", "\x00" * 90])
def test_a_damaged_study_is_made_anew_from_its_trials(tmp_path: Path, text: str) -> None:
    run(tmp_path, Bowl())
    before, study = result(tmp_path), (tmp_path / "study.json").read_text()
    (tmp_path / "study.json").write_text(text)
    trial, events = Bowl(), list[dict[str, Any]]()
    Study(tmp_path, AB, trial, sampler="grid", journal=False).run(events.append)
    damaged = [event["file"] for event in events if event["event"] == "damaged"]
    assert damaged == [str(tmp_path / "study.json")]
    assert trial.calls == []
    assert result(tmp_path) == before
    assert (tmp_path / "study.json").read_text() == study


def test_what_is_no_study_is_refused(tmp_path: Path) -> None:
    run(tmp_path, Bowl(), trials=1, seeds=1)
    for text in ('{"format": 1}', '{"format": 99}'):
        (tmp_path / "study.json").write_text(text)
        with pytest.raises(InputError, match=r"study\.json"):
            run(tmp_path, Bowl(), trials=1, seeds=1)
    (tmp_path / "study.json").unlink()
    again = Bowl()
    run(tmp_path, again, trials=1, seeds=1)
    assert again.calls == []


def test_a_full_disk_stops_with_one_sentence_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, bowl = tmp_path / "calm", Bowl()
    run(calm, Bowl())
    written, write_json = [0], files.write_json

    def full(path: Path, value: Any) -> None:
        written[0] += 1
        if written[0] == 9:
            raise InputError("the disk is full", file=path)
        write_json(path, value)

    monkeypatch.setattr("modicum.comparison.records.write_json", full)
    with pytest.raises(InputError, match="the disk is full"):
        run(tmp_path / "full", bowl, parallel=2)
    run(tmp_path / "full", bowl)
    assert result(tmp_path / "full") == result(calm)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    def trial(*arguments: Any) -> Outcome:
        with pytest.raises(InputError, match="this comparison is in use by process"):
            run(tmp_path, Bowl())
        return Outcome("finished", 1.0)

    run(tmp_path, trial, trials=1, seeds=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a comparison needs a folder"):
        run(tmp_path / "file", trial)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sides": sides("a")}, "two sides or more that can run"),
        ({"sides": [AB[0], Side("b", refusal="no such card")]}, "can run; b: no such card"),
        ({"sides": [AB[0], AB[0]]}, "two sides have this name.*'a'"),
        ({"sides": [Side("a", {"rate": RATE}), Side("b", {"rate": RATE})]}, "the same as a"),
        ({"trials": 0}, "trials: one at least.*found: 0"),
        ({"seeds": 0}, "seeds: one at least"),
        ({"seeds": 1000}, "seeds: too many.*1 to 999"),
        ({"parallel": 0}, "parallel: one at least"),
        ({"more": 0}, "more: one at least"),
        ({"sampler": "gird"}, "Did you mean 'grid'"),
        ({"baseline": "bb"}, "no such side takes part.*Did you mean 'b'"),
        ({"given": {"path": Path()}}, "settings are JSON values"),
        ({"sides": [AB[0], Side("b", fixed={"x": float("nan")})]}, "settings are JSON values"),
    ],
)
def test_bad_input_is_one_message(
    tmp_path: Path, arguments: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path, Bowl(), **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_side_without_a_search_is_tried_once(tmp_path: Path) -> None:
    plain = Side("plain", fixed={"rate": 1e-3, "method": "plain"})
    listed = Side("listed", {"rate": OneOf((1e-3, 1e-2), 1e-3)}, {"method": "listed"})
    found = run(tmp_path, Bowl(), sides=[plain, listed], trials=4, baseline="plain")
    assert [side.tried for side in found.sides] == [1, 2]
    assert found.side("listed").notes == ["all 2 settings were tried"]
    assert found.judgement.reference == "plain"
