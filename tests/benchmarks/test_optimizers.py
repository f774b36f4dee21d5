"""The benchmark of optimizers' steps, of a tiny decoder and one round."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from modicum.core.contracts.catalog import catalog

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("optimizers")


def test_a_contest_has_seconds_and_bytes_of_both_sides(benchmark: ModuleType) -> None:
    rules = benchmark.CONTESTS["muon"]
    row = benchmark.contest("muon", rules, benchmark.TINY, 1)
    assert row["fastest"] == "torch Muon"
    assert set(row["seconds"]) == {"ours", "torch Muon"} == set(row["state"])
    assert row["state"]["ours"] == row["ledger"]["state"]
    # Both keep one moment of matrices and two of all else, and count steps in their own ways.
    parameters = 2 * len(benchmark.Subject(benchmark.TINY).gradients)
    assert abs(row["state"]["ours"] - row["state"]["torch Muon"]) <= 4 * parameters
    rows = {row["what"]: row for row in benchmark.bars({"methods": {"muon": row}})}
    ratio = row["over_fastest"]["median"]
    assert rows["muon: step over torch Muon's"]["holds"] == (ratio <= 1.1)
    assert rows["geometric mean of steps over peers'"]["figure"] == pytest.approx(ratio)
    assert rows["muon: bytes of state, as the ledger says"]["holds"]
    assert rows["muon: scratch of a step"]["holds"]


def test_a_peer_that_is_not_there_is_said(benchmark: ModuleType) -> None:
    def broken(subject: object) -> None:
        raise ImportError("No module named 'nobody'")

    rules = benchmark.Contest({"nobody": broken}, not_run={"cuda": "needs a GPU"})
    row = benchmark.contest("lion", rules, benchmark.TINY, 1)
    assert row["not_run_here"].keys() == {"nobody", "cuda"}
    assert "No module named 'nobody'" in row["not_run_here"]["nobody"]
    assert "over_fastest" not in row
    assert [*row["state"]] == ["ours"]


def test_a_pass_is_timed_next_to_none_and_its_factors_are_counted(benchmark: ModuleType) -> None:
    row = benchmark.passes(benchmark.TINY, 1)
    assert row["step"]["median"] > 0
    layers = [(160, 64), (64, 160)] * 2  # out and in, and a constant 1 next to the inputs
    factors = sum(out**2 + (inputs + 1) ** 2 for out, inputs in layers)
    sums = sum(out + inputs + 1 for out, inputs in layers)
    assert row["state"]["ours"] - 2 * factors == pytest.approx(4 * sums, rel=0.1)
    assert row["state"]["ours, factors in fp32"] - row["state"]["ours"] == 2 * factors
    if "fastest" in row:
        rows = {each["what"]: each for each in benchmark.bars({"passes": row})}
        ratio = row["over_fastest"]["median"]
        assert rows[f"mkor: pass over {row['fastest']}'s"]["holds"] == (ratio <= 1.1)
    else:
        assert any(label.startswith("kfac-pytorch") for label in row["not_run_here"])


def test_every_optimizer_with_steps_of_its_own_is_in_the_contest(benchmark: ModuleType) -> None:
    known = {name for name, record in catalog().items() if record.info.slot == "optimizer"}
    # Plain SGD is PyTorch's; ADMM finds the weights of a recurrent net, and no other.
    assert known - {"sgd", "admm_rnn"} <= benchmark.CONTESTS.keys()


def test_state_is_found_wherever_it_is_kept(benchmark: ModuleType) -> None:
    class Kept:
        def __init__(self) -> None:
            self.basis = torch.zeros(3, 2)

    class Peer:
        def __init__(self) -> None:
            shared = torch.zeros(4)
            state = {"a": shared, "b": [shared[:2], {"c": Kept()}], "step": 3}
            self.state = {torch.nn.Parameter(torch.zeros(9)): state}

    assert benchmark.Stepping.of(Peer()).state_bytes == 4 * 4 + 4 * 6


@pytest.mark.expensive
def test_products_are_counted_by_their_rate(benchmark: ModuleType) -> None:
    found = benchmark.products((128,), 3)["128"]
    assert 0 < found["share"]["median"] < 3
