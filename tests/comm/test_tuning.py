from __future__ import annotations

import sys

import pytest

from modicum.comm.tuning import Tuner
from modicum.core.errors import InputError


def tuned(total: int, seconds: list[float]) -> Tuner:
    """A tuner of which each window was as long as `seconds` says."""
    tuner = Tuner(total)
    for mean in seconds:
        for _ in range(Tuner.WINDOW):
            tuner.record(mean)
    return tuner


def test_the_same_seconds_lead_to_the_same_sizes_within_bounds() -> None:
    seconds = [9.0, 1.0, 0.8, 1.3, 0.7, 0.9]
    one, other = tuned(50_000_000, seconds), tuned(50_000_000, seconds)
    assert one._tried[0] == 25_000_000
    assert len(one._tried) == 5
    assert len(set(one._tried)) > 2
    assert all(500_000 <= size <= 50_000_000 for size in one._tried)
    assert (one._tried, one.bucket_bytes) == (other._tried, other.bucket_bytes)
    assert not one.done


def test_without_optuna_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"needs optuna.*pip install 'modicum\[tuning\]'"):
        Tuner(1_000_000)
