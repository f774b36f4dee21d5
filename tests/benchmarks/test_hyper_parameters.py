"""The page on hyper-parameters: its code runs, and its tables are the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "choosing-hyper-parameters.md"
RESULT = ROOT / "benchmarks" / "results" / "hyper_parameters.json"
# Table -> what its lines are, what its columns are.
AXES = {
    "method": ("method", "learning_rate"),
    "size": ("width", "learning_rate"),
    "batch": ("batch_size", "learning_rate"),
    "warm_up": ("learning_rate", "warmup_steps"),
    "rank": ("learning_rate", "rank"),
}
HEADS = {"batch_size": "batch", "learning_rate": "rate", "warmup_steps": "warm-up"}


def grid(rows: list[dict[str, Any]], line: str, column: str) -> str:
    """Losses as a table of two settings, the least of each line bold."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    heads = [f"{HEADS.get(column, column)} {value:g}" for value in columns]
    text = [f"| {HEADS.get(line, line)} | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for name in dict.fromkeys(row[line] for row in rows):
        losses = {row[column]: row["loss"] for row in rows if row[line] == name}
        cells = [
            f"**{losses[value]:.2f}**" if losses[value] == min(losses.values())
            else f"{losses[value]:.2f}"
            for value in columns if value in losses
        ]  # fmt: skip
        shown = name if isinstance(name, str) else f"{name:g}"
        text.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(text)


def curves(rows: list[dict[str, Any]]) -> str:
    """Losses of the two methods at some epochs."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    shown = [row["epoch"] for row in rows if row["method"] == names[0]][::2]
    heads = [f"{name}: {what}" for name in names for what in ("training", "validation")]
    text = [f"| epoch | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for epoch in shown:
        cells = []
        for name in names:
            row = next(row for row in rows if (row["method"], row["epoch"]) == (name, epoch))
            trained = row["training_loss"]
            cells += ["" if trained is None else f"{trained:.2f}", f"{row['loss']:.2f}"]
        text.append(f"| {round(epoch)} | {' | '.join(cells)} |")
    return "\n".join(text)


def tables(result: dict[str, Any]) -> dict[str, str]:
    made = {name: grid(result[name], *axes) for name, axes in AXES.items()}
    return {**made, "epochs": curves(result["epochs"])}


def test_the_tables_are_the_committed_result() -> None:
    """If this fails: paste what `tables` gives of the result."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in tables(json.loads(RESULT.read_text())).items():
        assert f"<!-- table: {name} -->\n\n{table}\n\n" in page, name


@pytest.mark.expensive
def test_the_code_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert set(names["losses"]) == {3e-3, 3e-2}
    assert names["best"] == min(names["losses"], key=names["losses"].get)
    assert names["run"]["best"]["metric"] == "loss"
