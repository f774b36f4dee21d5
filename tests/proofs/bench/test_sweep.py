from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from modicum.comparison import cache
from modicum.core.contracts.catalog import find
from modicum.proofs.base import ProofRun
from modicum.proofs.bench.sweep import Sweep


@dataclass(frozen=True)
class Ended:
    loss: float


class Bowl:
    """Arms whose loss is least at a rate of their own; counts what was trained."""

    def __init__(self, *, fresh: bool = False, **options: Any) -> None:
        self.run = ProofRun(find("lora"), null=False, full=False, fresh=fresh)
        self.run.seeds = (0, 1)
        self.trained: list[tuple[float, float, int]] = []
        self.sweep = Sweep(self.run, self.train, lambda ended: ended.loss, kind=Ended, **options)

    def train(self, arm: float, rate: float, seed: int) -> Ended:
        self.trained.append((arm, rate, seed))
        return Ended(abs(math.log2(rate / arm)) + 0.01 * seed)


@pytest.mark.parametrize(
    ("arm", "rates", "tried"),
    [
        (2.0, (1.0, 2.0, 4.0), (1.0, 2.0, 4.0)),
        (2.0, (4.0, 2.0), (1.0, 2.0, 4.0)),
        (16.0, (1.0, 2.0), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)),
        (1.0, (1.0,), (0.5, 1.0, 2.0)),
        (0.25, (1.0, 3.0, 9.0), (1 / 9, 1 / 3, 1.0, 3.0, 9.0)),
    ],
)
def test_no_best_rate_is_at_an_end_of_its_grid(
    arm: float, rates: tuple[float, ...], tried: tuple[float, ...]
) -> None:
    bowl = Bowl()
    swept = bowl.sweep.best("bowl", arm, rates)
    assert swept.rates == pytest.approx(tried)
    assert swept.rates[0] < swept.learning_rate < swept.rates[-1]
    assert swept.each("loss") == [ended.loss for ended in swept.outcomes]
    assert swept.mean("loss") == pytest.approx(sum(swept.each("loss")) / 2)
    assert len(bowl.trained) == len(set(bowl.trained)) == 2 * len(tried)


def test_a_grid_is_not_continued_for_ever_and_the_record_says_so() -> None:
    bowl = Bowl()
    swept = bowl.sweep.best("bowl", 1e9, (1.0, 2.0))
    assert swept.learning_rate == swept.rates[-1] == 2.0**5
    bowl.run.contender(1, null=2, null_is="another")
    bowl.run.at_most("it", 1, 2)
    (known,) = bowl.run.conclude().as_json()["sweeps"]
    assert known == {"arm": "bowl", "best": 32.0, "tried": list(swept.rates), "at_edge": True}


def test_a_rate_that_diverges_is_never_the_best() -> None:
    bowl = Bowl()
    diverges = lambda ended: math.nan if ended.loss < 0.5 else ended.loss  # noqa: E731
    swept = bowl.sweep.best("bowl", 2.0, (0.5, 1.0, 2.0, 4.0, 8.0), score=diverges)
    assert swept.learning_rate in (1.0, 4.0)


def test_the_first_seed_may_choose_alone_and_nothing_is_trained_twice() -> None:
    bowl = Bowl(chosen_by="first")
    swept = bowl.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0))
    assert sorted(bowl.trained) == [(2.0, 1.0, 0), (2.0, 2.0, 0), (2.0, 2.0, 1), (2.0, 4.0, 0)]
    assert bowl.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0)) == swept
    assert len(bowl.trained) == 4


def test_a_baseline_is_trained_once_for_all_proofs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, again, other = (Bowl(shared={"size": size}) for size in (1, 1, 2))
    found = first.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    assert again.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True) == found
    other.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    assert [len(bowl.trained) for bowl in (first, again, other)] == [6, 0, 6]
    assert [bowl.run.reused for bowl in (first, again, other)] == [0, 6, 0]
    fresh = Bowl(fresh=True, shared={"size": 1})
    fresh.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    assert (len(fresh.trained), fresh.run.reused) == (6, 0)
    # The method itself is trained in every proof, and so is all after a change of the sources.
    again.sweep.best("the method", 3.0, (1.0, 2.0, 4.0, 8.0))
    assert len(again.trained) == 8
    monkeypatch.setattr(cache, "sources_digest", lambda: "others")
    changed = Bowl(shared={"size": 1})
    changed.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    assert len(changed.trained) == 6


def test_an_arm_may_be_known_by_other_facts_than_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other = Bowl(shared={}, facts=lambda arm: {"arm": "bowl"}), Bowl(shared={"arm": "bowl"})
    found = one.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    again = Bowl(shared={}, facts=lambda arm: {"arm": "bowl"})
    assert again.sweep.best("the same", 2.0, (1.0, 2.0, 4.0), baseline=True) == found
    other.sweep.best("bowl", 2.0, (1.0, 2.0, 4.0), baseline=True)
    assert [len(bowl.trained) for bowl in (one, again, other)] == [6, 0, 6]


@pytest.mark.parametrize("text", ["", "{}", '{"outcome": {"result": {"loss": "much"}}}'])
def test_what_is_kept_of_an_arm_is_taken_only_if_it_is_whole(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Bowl(shared={}).sweep.outcome("bowl", 2.0, 1.0, 0, baseline=True)
    (file,) = tmp_path.rglob("*.json")
    file.write_text(text)
    damaged, mended = Bowl(shared={}), Bowl(shared={})
    found = damaged.sweep.outcome("bowl", 2.0, 1.0, 0, baseline=True)
    assert mended.sweep.outcome("bowl", 2.0, 1.0, 0, baseline=True) == found == Ended(1.0)
    assert [len(bowl.trained) for bowl in (damaged, mended)] == [1, 0]
