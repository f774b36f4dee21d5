"""The page of linear forms says of each what the committed file says."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.committed
def test_each_form_has_a_row_with_its_own_figures() -> None:
    spec = importlib.util.spec_from_file_location("linear_forms", ROOT / "docs/linear_forms.py")
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    found = json.loads(written.FILE.read_text(encoding="utf-8"))
    table = [line.strip("| ").split(" | ") for line in written.page().splitlines()]
    for form, row in found["products"].items():
        products, costs = (cells[1:] for cells in table if cells[0] == form)
        assert float(products[-2]) == pytest.approx(row["widths"]["2048"]["faster"]["median"], 0.01)
        assert products[-1] == ("none" if row["break_even"] is None else str(row["break_even"]))
        assert float(costs[0]) == pytest.approx(found["steps"][form]["over_dense"]["median"], 0.01)
        assert float(costs[2]) <= 1.05
