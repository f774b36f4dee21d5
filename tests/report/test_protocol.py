"""The page of a protocol's comparison: its figures are those of protocol.json."""

from __future__ import annotations

import html
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from modicum import report
from modicum.core.errors import InputError
from modicum.optim import FairOptim
from modicum.optim.protocol import ProtocolContext, carry_out
from modicum.optim.protocol_trials import ProtocolRegime, ProtocolTrial, TrialResult
from modicum.optim.search_grid import SearchGrid
from modicum.report.protocol import render_protocol

GRID = {"rate": SearchGrid((1e-3, 2e-3, 4e-3), 1e-3, "log")}
REGIMES = [ProtocolRegime(1000, ratio) for ratio in (0.5, 1, 2, 4)]
SPENT = {"adamw": 2000.0, "li<on": 1000.0, "sgd": 500.0}


def trained(trial: ProtocolTrial) -> TrialResult:
    """1.3 times the data for `li<on`, whose curve is below AdamW's from a half on; SGD diverges."""
    if trial.side == "sgd" and trial.regime.ratio > 1:
        return TrialResult(math.inf)
    more = {"adamw": 1.0, "li<on": 1.3, "sgd": 0.5}[trial.side]
    worse = 100 * abs(trial.settings["rate"] - 2e-3) + 1e-4 * (trial.seed % 3)
    loss = 50 * (more * trial.regime.tokens) ** -0.4 + 1 + worse
    early = {"adamw": 3.0, "li<on": 4.0, "sgd": 5.0}[trial.side]
    spent = {"peak_bytes": 10 * SPENT[trial.side], "state_bytes": SPENT[trial.side]}
    return TrialResult(loss, ((0.5, early), (1.0, loss)), spent)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("protocol")
    context = ProtocolContext(dict.fromkeys(SPENT, GRID), REGIMES, reference="adamw")
    found = carry_out(FairOptim(seeds=2).bind(context), trained).to_json()
    failed = {"side": "sgd", "settings": {}, "seed": 0, "part": "tune", "ratio": 0.5,
              "status": "out_of_memory", "message": "it <does> not fit"}  # fmt: skip
    whole = {"identity": {}, **found, "taken": 3, "failed": [failed]}
    (made / "protocol.json").write_text(json.dumps(whole))
    return made


def test_the_page_has_every_speed_up_and_what_stands_in_its_way(folder: Path) -> None:
    page, found = render_protocol(folder), json.loads((folder / "protocol.json").read_text())
    for row in [*found["speedups"], *found["over_default"]]:
        if row["speedup"]["speedup"] is not None:
            assert f"{row['speedup']['speedup']:.2f}×" in page
    assert "1.30×" in page
    assert page.count("diverged") >= 2
    assert "sgd at 0.5 of the tokens (out of memory, it &lt;does&gt; not fit)" in page
    assert "3 trials were taken" in page
    assert "the curves of adamw and li&lt;on cross at" in page
    assert "li<on" not in page
    assert page.count("<svg") == 3  # over data, peak, state; nobody knows seconds
    for note in found["notes"]:
        assert html.escape(note)[:30] in page


def test_the_page_fetches_and_runs_nothing(folder: Path) -> None:
    page = render_protocol(folder)
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page)
    assert "script-src 'none'" in html.unescape(page)
    assert "<script>" not in page


def test_a_folder_is_written_by_what_it_holds(folder: Path, tmp_path: Path) -> None:
    assert report.is_comparison(folder)
    assert report.write_comparison(folder) == folder / "protocol.html"
    assert not report.is_comparison(tmp_path)
    with pytest.raises(InputError, match="holds no finished comparison"):
        report.write_comparison(tmp_path)


def test_a_side_without_any_loss_has_a_line_all_the_same(folder: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = json.loads((folder / "protocol.json").read_text())
    for row in found["findings"]:
        row |= {"losses": [], "settings": None, "metrics": {}} if row["side"] == "sgd" else {}
    (tmp_path / "protocol.json").write_text(json.dumps(found))
    assert render_protocol(tmp_path).count("sgd") >= 4
