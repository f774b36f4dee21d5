"""`run.json`: what a run is, did and cost, kept true while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from modicum import __version__
from modicum.core.clock import Clock
from modicum.core.errors import Interrupted, ModicumError
from modicum.core.machine import versions
from modicum.core.machine.memory import peak_resident_bytes
from modicum.core.ranks.ranks import PeerLost, Ranks
from modicum.core.run_folders import PEER_LOST
from modicum.planner import Plan
from modicum.trainer.cost_meter import CostMeter
from modicum.trainer.folder import RunFolder
from modicum.trainer.stop import StopRequested
from modicum.trainer.time_account import TimeAccount, carried

MOST_ANOMALIES = 100  # that are kept, the last ones


class RunRecord:
    """The record of a run over all its processes."""

    def __init__(
        self, folder: RunFolder, content: dict[str, Any], plan: Plan, clock: Clock
    ) -> None:
        self._folder, self.content, self._plan = folder, content, plan
        self.time = TimeAccount(clock, content)
        self._left = {"seconds": float(content["seconds"]), "time": content["time"]}
        self._again = bool(content["seconds"]) and not self.finished
        self._recent: deque[float] = deque(maxlen=20)
        self._step_seconds = self._data_seconds = 0.0
        self._step_tokens = 0
        self._steps_done = 0
        self._cost = CostMeter(plan, content["cost"])

    @classmethod
    def open(
        cls, folder: RunFolder, plan: Plan, forked_from: str | None = None, *, clock: Clock
    ) -> RunRecord:
        """The record in the folder, or that of a new run, forked from another where given.

        Args:
            clock: of this process.
        """
        old, row = folder.read_record(), plan.row()
        content = {
            "status": old.get("status", "running"),
            "modicum": __version__,
            "versions": versions(),
            "machine": plan.machine.as_json(),
            "environments": old.get("environments", []),
            "inputs": old.get("inputs", {}),
            "directory": old.get("directory", str(Path.cwd())),
            "unit": plan.task.unit,
            "forked_from": old.get("forked_from", forked_from),
            "started": old.get("started") or _now(),
            "ended": old.get("ended"),
            "seconds": old.get("seconds", 0.0),
            "time": old.get("time"),
            "steps": old.get("steps", 0),
            "steps_planned": plan.steps,
            "data": old.get("data", {}),
            "tokens": old.get("tokens", 0),
            "tokens_per_second": old.get("tokens_per_second", 0.0),
            "data_wait": old.get("data_wait"),
            "peak_bytes": {
                "predicted": row["prediction"]["peak_bytes"],
                "measured": None,
                "process": None,
                "process_predicted": row["prediction"]["process_bytes"],
                "process_range": row["prediction"]["process_range"],
                "base": row["prediction"]["process_base"],
                "budget": row["prediction"]["budget_bytes"],
            }
            | {k: v for k, v in old.get("peak_bytes", {}).items() if k in ("measured", "process")},
            "measured_by_kind": old.get("measured_by_kind"),
            "parameters": row["parameters"],
            "final": old.get(
                "final", {"loss": None, "validation_loss": None, "initial_validation_loss": None}
            ),
            "best": old.get("best"),
            "stopped_early": old.get("stopped_early"),
            "cost": old.get("cost"),
            "saves": old.get("saves"),
            "interruptions": old.get("interruptions", 0),
            "resumed_after": old.get("resumed_after", []),
            "anomalies": old.get("anomalies", []),
            "outputs": old.get("outputs", {}),
            "error": None,
            "failed_by": None,
        }
        return cls(folder, content, plan, clock)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return bool(self.content["status"] == "finished")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark the run as running; if the block raises, as failed, with the error."""
        self._cost.begin()
        if self.content["status"] == "running" and self._left["seconds"]:
            self.content["interruptions"] += 1  # the process before this one was killed
        self.content |= {"status": "running", "ended": None, "error": None, "failed_by": None}
        self._write()
        try:
            yield
        except StopRequested:
            raise
        except Interrupted as error:
            self.interrupted(error)
            raise
        except BaseException as error:
            told = error if isinstance(error, ModicumError) else f"{type(error).__name__}: {error}"
            failed = {"error": str(told), "failed_by": type(error).__name__}
            self.content |= {"status": "failed", "ended": _now(), **failed}
            self._write()
            raise

    def resumes_from(
        self, step: int, notes: Mapping[str, Any], metrics: list[dict[str, Any]]
    ) -> None:
        """Take over what earlier processes spent, and what of it was lost.

        Args:
            step: the run resumes after it.
            notes: of the checkpoint.
            metrics: the rows of all steps, also of those that will be done again.
        """
        self.time.carry(carried(self._left, notes, metrics, step))
        if notes:
            before = self.content["resumed_after"]
            steps = [*(before if isinstance(before, list) else ()), step]
            self.content["resumed_after"] = [s for n, s in enumerate(steps) if s not in steps[:n]]

    def begun(self, ranks: Ranks) -> None:
        """The start-up of this process is over; all ranks call this."""
        self.time.begun(again=ranks.broadcast(self._again))

    def resume(self, metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
        """Count what earlier processes did and what of it was kept."""
        for row in metrics:
            self.count(row, write=False)
        self._recent.clear()
        for row in evaluations:
            self.evaluated(row)
        self._write()

    def count(self, row: dict[str, Any], *, write: bool = True) -> None:
        """Take in a row of the metrics."""
        self._recent.append(row["seconds"])
        self._step_seconds += row["seconds"]
        self._data_seconds += row.get("data_seconds", 0.0)
        self._step_tokens += row["tokens"]
        self._steps_done += 1
        read = self._steps_done * self._plan.tokens_per_update
        self.content |= {
            "steps": row["step"],
            "tokens": self._step_tokens,
            "tokens_per_second": read / self._step_seconds,
            "data_wait": self._data_seconds / self._step_seconds,
        }
        self.content["final"]["loss"] = row["loss"]
        # Often enough for who looks on, seldom enough to cost nothing.
        if write and row["step"] % 20 == 1:
            self._write()

    def counted(self, plan: Plan) -> None:
        """Take in the plan of a run whose data is prepared."""
        self._plan = plan
        self.content |= {"steps_planned": plan.steps, "data": dict(plan.counts)}

    def evaluated(self, row: dict[str, Any]) -> None:
        """Take in a row of the evaluations."""
        if row["step"] == 0:
            self.content["final"]["initial_validation_loss"] = row["loss"]
        self.content["final"]["validation_loss"] = row["loss"]

    def tested(self, row: dict[str, Any]) -> None:
        """Take in what the test gave: the figures of the run's end."""
        kept = {key: value for key, value in row.items() if key not in ("seconds", "findings")}
        self.content["final"]["test"] = kept

    def metered(self, peak: int) -> None:
        """Take in the meter's peak of tensor bytes."""
        peaks = self.content["peak_bytes"]
        peaks["measured"] = max(peak, peaks["measured"] or 0)
        self._write()

    def forecast(self, row: dict[str, Any]) -> None:
        """Take in what another revision of the plan predicts."""
        peaks, said = self.content["peak_bytes"], row["prediction"]
        peaks["predicted"] = said["peak_bytes"]
        peaks["process_predicted"] = said["process_bytes"]
        peaks["process_range"] = said["process_range"]
        self._write()

    def reshaped(self, row: dict[str, Any]) -> None:
        """Take in the plan of a run whose layers have changed.

        What is measured is the most of the full run, so the forecast stays the larger of both.
        """
        peaks, said = self.content["peak_bytes"], row["prediction"]
        if said["peak_bytes"] > peaks["predicted"]:
            self.forecast(row)
        self.content["parameters"] = row["parameters"]
        self._write()

    def notes(self) -> dict[str, Any]:
        """What is kept next to a checkpoint's state, for people."""
        return {
            "modicum": __version__,
            "when": _now(),
            "tokens": self._step_tokens,
            **self.time.as_json(),
        }

    def seconds_left(self, step: int) -> float | None:
        """The time that the remaining steps take at the recent speed."""
        if not self._recent:
            return None
        return (self._plan.steps - step) * sum(self._recent) / len(self._recent)

    def recent_positions_per_second(self, positions: int) -> float:
        """Positions per second over the recent steps but the first, which warms up."""
        steps = list(self._recent)[1:] or list(self._recent)
        return positions * len(steps) / sum(steps)

    def noticed(self, row: dict[str, Any]) -> None:
        """Take in that a rank held up the others after a step."""
        self.content["anomalies"] = [*self.content["anomalies"][-MOST_ANOMALIES + 1 :], row]
        self._write()

    def interrupted(self, error: Interrupted | None = None) -> None:
        """The run was asked to stop and saved its state, or lost a rank."""
        self.content["interruptions"] += 1
        self.content |= {"status": "interrupted", "ended": _now()}
        if isinstance(error, PeerLost):
            self.content |= {"error": str(error), "failed_by": PEER_LOST}
        self._write()

    def finish(self, outputs: dict[str, str], ranks: Ranks) -> dict[str, Any]:
        """The run came to its end; all ranks call this."""
        self.time.compare(ranks)
        self.content |= {"status": "finished", "ended": _now(), "outputs": outputs}
        self._write()
        return self.content

    def _write(self) -> None:
        self.content |= self.time.as_json()
        self.content["cost"] = self._cost.row(self.content["seconds"])
        peaks = self.content["peak_bytes"]
        peaks["process"] = max(peak_resident_bytes(), peaks["process"] or 0)
        self._folder.write_record(self.content)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
