"""How long a proof takes: by the last time here, else by its result of record in a checkout.

A run of it is a training, or whatever else the proof names when it comes to it. How many there are
is known afterwards only: a grid of learning rates is continued where the best is at its end.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import modicum
from modicum.core.errors import InputError
from modicum.core.files import read_json, user_cache, write_json

_RECORD = Path(modicum.__file__).parents[2] / "benchmarks" / "results" / "proofs"
Known = Literal["the last time here", "its result of record"]
# Before this nothing is known of how fast this machine is today.
_SOON_SECONDS = 2.0


@dataclass(frozen=True)
class ProofPace:
    """What a proof took.

    Args:
        runs: how many runs it made; of a result of record the trainings of its sweeps.
        began: seconds after which each of them began; nothing where that is not known.
        known_by: where this is from.
    """

    seconds: float
    runs: int
    began: tuple[float, ...] = ()
    known_by: Known = "the last time here"

    def seconds_left(self, run: int, elapsed: float) -> float | None:
        """How long a proof will still take whose run of this number, from 1, begins now.

        As long as it took then from there, by how fast this one has been up to here; None where
        it has taken longer than that.
        """
        before = self._before(run)
        if before is None:
            left = self.seconds - elapsed
        else:
            pace = elapsed / before if before > _SOON_SECONDS else 1.0
            left = (self.seconds - before) * pace
        return left if left > 0 else None

    def _before(self, run: int) -> float | None:
        """After how long this run began; None where it is not known."""
        if self.began:
            return self.began[run - 1] if run <= len(self.began) else None
        return self.seconds * (run - 1) / self.runs if run <= self.runs else None


def known_pace(name: str, mode: str, *, null: bool) -> ProofPace | None:
    """What the proof of a method took, where that is known."""
    with suppress(InputError, KeyError, TypeError, ValueError):
        kept = read_json(_file(name, mode, null=null))
        return ProofPace(
            float(kept["seconds"]), int(kept["runs"]), tuple(map(float, kept["began"]))
        )
    with suppress(InputError, KeyError, TypeError, ValueError):
        record = read_json(_RECORD / f"{name}{'.full' if mode == 'full' else ''}.json")
        trained = (len(swept["tried"]) for swept in record["sweeps"])
        runs = len(record["seeds"]) * sum(trained)
        return ProofPace(float(record["seconds"]), runs, known_by="its result of record")
    return None


def remember_pace(name: str, mode: str, *, null: bool, pace: ProofPace) -> None:
    """Keep what a proof took for its next time; where that cannot be written, it is not known."""
    file = _file(name, mode, null=null)
    with suppress(OSError, InputError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {key: value for key, value in asdict(pace).items() if key != "known_by"})


def pace_event(name: str, mode: str, pace: ProofPace | None) -> dict[str, Any]:
    """What listeners hear before a proof begins."""
    event: dict[str, Any] = {"event": "pace", "name": name, "mode": mode}
    if pace is None:
        return event
    return event | {"runs": pace.runs, "seconds": pace.seconds, "known_by": pace.known_by}


def _file(name: str, mode: str, *, null: bool) -> Path:
    return user_cache("proofs") / f"{name}.{mode}{'.null' if null else ''}.json"
