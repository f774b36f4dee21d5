"""The table of tuned optimizers is that of their proofs."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_full_proofs_come_before_quick_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tuned = importlib.import_module("tuned")
    monkeypatch.setattr(tuned, "RESULTS", tmp_path)
    (tmp_path / "proofs").mkdir()

    def write(file: str, mode: str, ratio: float) -> None:
        words = ["", ", lower end", ", upper end"]
        figures = [
            {"name": f"Eve: {tuned.WORDS}{end}", "method": 100.0, "baseline": 100 * ratio + place}
            for place, end in enumerate(words)
        ]
        figures.append({"name": "Eve: held-out loss (nats)", "ratio": 0.9})
        found = {"figures": figures, "mode": mode, "seeds": [0, 1], "when": "2026-11-26"}
        (tmp_path / "proofs" / file).write_text(json.dumps(found))

    write("eve.json", "quick", 3.0)
    write("adam.json", "quick", 1.0)
    write("eve.full.json", "full", 1.5)
    (tmp_path / "proofs" / "lora.json").write_text('{"figures": [{"name": "loss"}]}')
    rows = {row["optimizer"]: row for row in tuned.rows()}
    assert list(rows) == ["adam", "eve"]
    eve = rows["eve"]
    assert (eve["speed_up"], eve["lower"], eve["upper"]) == pytest.approx((1.5, 1.51, 1.52))
    assert (eve["proof"], eve["loss_over_adamw"], eve["seeds"]) == ("full", 0.9, 2)
