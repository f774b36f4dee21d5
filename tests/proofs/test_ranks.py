from __future__ import annotations

from pathlib import Path

import pytest

from modicum.proofs.ranks import RanksFailed, at_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.expensive]
FUNCTIONS = """
import os, time

def both(ranks, factor):
    print("this goes to standard error")
    return [ranks.size, ranks.sum(factor * (ranks.rank + 1))[0]]

def one_raises(ranks, value):
    if ranks.rank == 1:
        raise ArithmeticError(f"no such sum: {value}")
    return ranks.sum(1.0)

def one_dies(ranks):
    if ranks.rank == 1:
        os._exit(9)
    return ranks.sum(1.0)

def too_long(ranks):
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_at_ranks.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_results_are_the_ranks_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    assert at_ranks("functions_at_ranks:both", 3, {"factor": 2.5}) == [[3, 15.0]] * 3
    assert at_ranks("functions_at_ranks:both", 1, {"factor": 2.5}) == [[1, 2.5]]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("function", "arguments", "told"),
    [
        ("one_raises", {"value": "nan"}, "rank 1: Traceback(.|\n)*no such sum: nan"),
        ("one_dies", {}, "failed at 2 ranks\n.*rank 1"),
        ("too_long", {}, "failed at 2 ranks\n.*rank"),
        ("not_there", {}, "has no attribute 'not_there'"),
    ],
)
def test_a_rank_that_fails_is_told(function: str, arguments: dict[str, str], told: str) -> None:
    with pytest.raises(RanksFailed, match=told):
        at_ranks(f"functions_at_ranks:{function}", 2, arguments, seconds=8)
