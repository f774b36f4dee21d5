"""What a run gives: its record, its model, adapter and tokenizer, its curves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modicum.core.extras import library
from modicum.core.html import html_table
from modicum.core.units import format_bytes, format_duration

if TYPE_CHECKING:
    from modicum.serve import Conversation


class TrainedRun(dict[str, Any]):
    """The content of `run.json`, and what the run made; weights are read when they are asked for.

    Args:
        content: of `run.json`.
        folder: the run folder.
    """

    def __init__(self, content: Mapping[str, Any], folder: str | Path) -> None:
        super().__init__(content)
        self.folder = Path(folder)

    @cached_property
    def conversation(self) -> Conversation:
        """The run's model, ready to write: `conversation.write(prompt)` gives pieces of text.

        Raises:
            InputError: the run exported no language model, or its base is gone or has changed.
        """
        from modicum.serve import load_run

        return load_run(self.folder)

    @property
    def model(self) -> Any:
        """The trained model as an `nn.Module` in evaluation mode; with the adapter, if it has one.

        Raises:
            InputError: as `conversation`.
        """
        return self.conversation.model

    @property
    def adapter(self) -> Any:
        """The adapter, attached to `model` (`merge()`, `detach()`); None: all was trained."""
        return self.conversation.adapter

    @property
    def tokenizer(self) -> Any:
        """The tokenizer: `encode(text)`, `decode(ids)`."""
        return self.conversation.tokenizer

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a step."""
        return self._rows("metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of `evaluations.jsonl`; step 0 is before training."""
        return self._rows("evaluations.jsonl")

    def curves(self) -> Any:
        """A DataFrame with a row a step: the columns of `metrics`, and `validation_…` where known.

        Raises:
            InputError: pandas is not installed.
        """
        pandas = library("pandas", "notebook", "curves()")
        trained = {row["step"]: row for row in self.metrics}
        for row in self.evaluations:
            seen = {f"validation_{key}": value for key, value in row.items() if key != "step"}
            trained[row["step"]] = trained.get(row["step"], {"step": row["step"]}) | seen
        rows = [trained[step] for step in sorted(trained)]
        return pandas.DataFrame.from_records(rows, index="step")

    def report(self) -> Path:
        """Write the run's `report.html` anew; the path."""
        from modicum import report

        return report.write(self.folder)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]

    def _repr_html_(self) -> str:
        final, peak = self.get("final") or {}, self.get("peak_bytes") or {}
        losses = (("loss", "loss"), ("validation loss", "validation_loss"))
        rows = [("status", self.get("status")), ("steps", self.get("steps"))]
        rows += [(name, f"{final[key]:.4f}") for name, key in losses if final.get(key) is not None]
        if (test := final.get("test") or {}).get("loss") is not None:
            rows.append(("test loss", f"{test['loss']:.4f}"))
        rows.append(("time", format_duration(self.get("seconds") or 0.0)))
        if peak.get("process") is not None:
            rows.append(("peak memory of the process", format_bytes(peak["process"])))
        outputs = (self.get("outputs") or {}).items()
        rows += [(name, self.folder / path) for name, path in outputs]
        return html_table(f"Run in {self.folder}", ("", ""), rows)
