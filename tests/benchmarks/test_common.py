from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def common() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_common", HERE / "common.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_contenders_take_turns_in_alternating_order(common: ModuleType) -> None:
    calls: list[str] = []

    def contender(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    figures = common.interleaved(
        {"a": lambda: contender("a"), "b": lambda: contender("b")}, rounds=3, warm_up=1
    )
    assert "".join(calls) == "abbaabba"
    assert figures == {"a": [4.0, 5.0, 8.0], "b": [3.0, 6.0, 7.0]}


def test_spread_and_paired_ratios(common: ModuleType) -> None:
    assert common.spread([4.0, 1.0, 3.0, 2.0, 5.0]) == {
        "median": 3.0,
        "lower_quartile": 2.0,
        "upper_quartile": 4.0,
        "least": 1.0,
        "greatest": 5.0,
        "count": 5,
    }
    assert common.spread([2.0])["upper_quartile"] == 2.0
    # Pairs, not medians: a machine that becomes twice as slow changes no ratio.
    assert common.paired_ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])["greatest"] == 2.0


def test_one_benchmark_at_a_time(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with common.alone():
        (lock,) = tmp_path.iterdir()
        with open(lock, "a") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert str(os.getuid()) in lock.name
    with open(lock, "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_result_says_where_it_comes_from(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr("sys.argv", [str(HERE / "startup.py"), "--rounds", "3"])
    path = common.write_result("startup", {"seconds": 1.5}, {"rounds": 3})
    result = json.loads(path.read_text())
    assert result["command"] == "python benchmarks/startup.py --rounds 3"
    assert result["seconds"] == 1.5
    assert result["settings"] == {"rounds": 3}
    assert {"processor", "cores", "memory_bytes", "flops"} <= result["machine"].keys()
    assert {"python", "torch"} <= result["versions"].keys()


def test_a_benchmark_ends_where_others_have_the_processors(
    common: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*, refuses: bool) -> float:
        if refuses:
            raise common.BusyMachine("other programs run here")
        return 1.5

    monkeypatch.setattr(common.quiet_machine, "quiet", busy)
    assert common.quiet(refuses=False) == 1.5
    with pytest.raises(SystemExit, match="other programs run here; the same command when"):
        common.quiet()
