"""The sweep over architectures resumes where it stopped, and sees a model that differs."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
EQUAL = {"result": "equal", "class": "A", "layers": 1, "apart": {"peft": 1e-7, "merged": 2e-7}}
OTHER = {"result": "differs", "class": "B", "layers": 1, "apart": {"peft": 1.0}, "why": "peft"}


@pytest.fixture
def fidelity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("fidelity")


def test_a_sweep_goes_on_where_it_stopped(
    fidelity: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def fake(name: str, limit: float) -> dict[str, Any]:
        asked.append(name)
        return {"a": EQUAL, "b": OTHER, "c": {"result": "not made", "why": "it is"}}[name]

    monkeypatch.setattr(fidelity, "in_a_process", fake)
    progress = tmp_path / "progress.jsonl"
    fidelity.sweep(["a"], progress, 1, [])
    cases = fidelity.sweep(["a", "b", "c"], progress, 1, [])
    assert asked == ["a", "b", "c"]
    fidelity.sweep(["a", "b", "c"], progress, 1, ["differs"])
    assert asked == ["a", "b", "c", "b"]
    found = fidelity.summed(cases)
    assert found["counts"] == {"equal": 1, "refused": 0, "not_made": 1, "differs": 1}
    assert found["checked"] == 2
    assert found["largest_among_equal"]["merged"] == 2e-7
    assert found["not_made"] == {"c": {"why": "it is"}}


@pytest.mark.expensive
def test_a_model_is_equal_and_one_whose_factors_are_read_otherwise_differs(
    fidelity: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = importlib.import_module("fidelity_check")
    case = check.check("gpt2")
    assert case["result"] == "equal", case
    assert case["apart"].keys() == check.CLOSE.keys()

    def skewed(plain: Any, folder: Path) -> Any:
        model = real(plain, folder)
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "lora_B" in n).mul_(1.1)
        return model

    real = check._peft
    monkeypatch.setattr(check, "_peft", skewed)
    case = check.check("gpt2")
    assert case["result"] == "differs"
    assert "peft" in case["why"]
