"""MLflow, by its own settings (MLFLOW_TRACKING_URI)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from modicum.core.files import write_json
from modicum.trainer.tracking.base import Tracked
from modicum.trainer.tracking.identity import IDS, read_ids

_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_LONGEST = 500  # characters of a parameter, as MLflow takes them
_AT_ONCE = 100  # parameters in a call, likewise


class MlflowTracker:
    """One run there for one run folder; a step that is there already is not sent again.

    Args:
        tracked: the run.
        mlflow: the module.
    """

    def __init__(self, tracked: Tracked, mlflow: Any) -> None:
        self._mlflow = mlflow
        mlflow.set_experiment(tracked.project)
        ids = read_ids(tracked.folder)
        known = ids.get("mlflow")
        run = mlflow.start_run(run_id=known, run_name=None if known else tracked.name)
        self._id = run.info.run_id
        if known is None:
            write_json(tracked.folder / IDS, ids | {"mlflow": self._id})
            parameters = list(_flat(tracked.recipe))
            for start in range(0, len(parameters), _AT_ONCE):
                mlflow.log_params(dict(parameters[start : start + _AT_ONCE]))
        self._last: dict[str, int] = {}

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take a step's figures."""
        new = {name: value for name, value in figures.items() if step > self._seen(name)}
        if new:
            self._mlflow.log_metrics(new, step=step)

    def _seen(self, name: str) -> int:
        """The last step that is there of a figure, as it was when this process began."""
        if name not in self._last:
            client = self._mlflow.MlflowClient()
            history = client.get_metric_history(self._id, name)
            self._last[name] = max((each.step for each in history), default=-1)
        return self._last[name]

    def close(self, status: str) -> None:
        """End the run there."""
        self._mlflow.end_run(_STATUS[status])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)[:_LONGEST]


def begin(tracked: Tracked, package: Any) -> MlflowTracker:
    """The tracker of a run, by its library."""
    return MlflowTracker(tracked, package)
