"""What a tracker is, and the listener that feeds those which a recipe names.

A tracker never stops a run: one that fails is named once, and the run's own files have it all.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from modicum.core.errors import InputError, Interrupted
from modicum.core.extras import library
from modicum.core.progress import Listener
from modicum.recipe import Recipe
from modicum.trainer.stop import StopRequested

# The figures of a step that are worth a curve; what a task evaluates is sent in full.
STEP_FIGURES = (
    "loss",
    "extra_loss",
    "learning_rate",
    "gradient_norm",
    "tokens_per_second",
    "bytes",
)

# What figures are named after.
GROUPS = ("train", "validation", "test")
# What each needs, as it is imported; its extra has the tracker's name.
_PACKAGES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}


@dataclass(frozen=True)
class Tracked:
    """What a tracker is made with.

    Args:
        folder: the run folder; a tracker may keep files of its own in `folder / its name`.
        project: what runs are filed under.
        name: of the run.
        recipe: as plain values.
    """

    folder: Path
    project: str
    name: str
    recipe: Mapping[str, Any]


class Tracker(Protocol):
    """Takes the figures of a run.

    A run that was interrupted is one run: a tracker that is made again for the same folder adds to
    what it has, and shows no step twice.
    """

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step, by names such as `train/loss` and `validation/loss`."""

    def close(self, status: str) -> None:
        """The run ended: finished, interrupted or failed."""


class TrackedListener:
    """Calls a listener, and the trackers with what of its events are figures.

    Args:
        listener: is called with every event, and with a warning for a tracker that fails.
        trackers: by name.
    """

    def __init__(self, listener: Listener, trackers: Mapping[str, Tracker]) -> None:
        self.listener, self.trackers = listener, dict(trackers)

    def __call__(self, event: dict[str, Any]) -> None:
        """Take one event."""
        self.listener(event)
        if event["event"] == "step":
            named = {f"train/{name}": event.get(name) for name in STEP_FIGURES}
        elif (
            group := {"evaluation": "validation", "test": "test"}.get(event["event"])
        ) is not None:
            named = {f"{group}/{k}": v for k, v in event.items() if k not in ("event", "step")}
        else:
            return
        figures = {
            name: float(value)
            for name, value in named.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.log(event["step"], figures))

    def close(self, status: str) -> None:
        """The run ended."""
        for name in list(self.trackers):
            self._try(name, lambda tracker: tracker.close(status))
        self.trackers.clear()

    def _try(self, name: str, call: Any) -> None:
        try:
            call(self.trackers[name])
        except Exception as error:
            del self.trackers[name]
            message = f"{name} failed and is left out from here on ({error}); the run's own files"
            self.listener({"event": "warning", "message": f"{message} have every figure"})


def package(kind: str) -> Any:
    """The library of a tracker.

    Raises:
        InputError: it is not installed.
    """
    try:
        return library(_PACKAGES[kind], kind, f"the tracker {kind}")
    except InputError as error:
        raise error.located(field="tracking.to") from None


@contextmanager
def followed(
    recipe: Recipe, folder: Path, listener: Listener, kinds: Iterable[str]
) -> Iterator[Listener]:
    """A listener that feeds trackers while the block runs.

    Args:
        kinds: those of the recipe on the first rank, none on the others.

    Raises:
        InputError: the package of one is not installed, or it could not be set up.
    """
    asked = recipe.tracking
    name = asked.name or folder.resolve().name
    tracked = Tracked(folder, asked.project, name, recipe.plain())
    listening = TrackedListener(listener, {})
    status = "failed"
    try:
        for kind in kinds:
            listening.trackers[kind] = _made(kind, tracked)
        yield listening
        status = "finished"
    except (KeyboardInterrupt, Interrupted, StopRequested):
        status = "interrupted"
        raise
    finally:
        listening.close(status)


def _made(kind: str, tracked: Tracked) -> Tracker:
    module = importlib.import_module(f"modicum.trainer.tracking.{kind}")
    try:
        made: Tracker = module.begin(tracked, package(kind))
    except InputError:
        raise
    except Exception as error:
        problem = f"{kind} could not be set up: {error}"
        raise InputError(problem, field="tracking.to", value=kind) from None
    return made
