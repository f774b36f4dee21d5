"""The process next to the ranks of a host: it looks at them, says what is wrong, and ends them.

`python -m modicum.comm.watch_agent` reads its task, a line of JSON, from standard input, and says
on standard output that it has begun. The agent of rank 0's host judges; others send it what they
see. It lives in a session of its own, ends when its ranks have, and never imports torch.
"""

from __future__ import annotations

import json
import math
import os
import queue
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from modicum.comm.anomalies import EITHER_END, Anomaly, DiagnosisLimits
from modicum.comm.judging import Judge
from modicum.core.errors import InputError
from modicum.core.files import write_json
from modicum.core.ranks.call_ring import BEREFT, ENDED, FAILED
from modicum.core.ranks.rank_probe import RankProbe
from modicum.core.ranks.rank_reports import OVER, RankReport
from modicum.core.ranks.side_channel import AgentLine, Controller
from modicum.core.run_folders import note_interrupted

LOOK_SECONDS = 0.1
TICK_SECONDS = 1.0
# Between two looks, after which this process was stopped as well, as by `docker pause`.
PAUSED_SECONDS = 2.0
GRACE_SECONDS = 3.0
# After all ranks of this host have left: until the others' agents have, or a verdict has come; and
# for one that waits for the verdict.
FAREWELL_SECONDS = 6.0
# At the end, for a sentence that nobody has read yet; and how many may wait.
SAYING_SECONDS, MOST_SAID = 2.0, 100
VERDICT = "verdict.json"


class HostAgent:
    """Looks at the ranks of a host until they have ended.

    Args:
        folder: where their rings are, `rank-N.ring`; it is removed at the end.
        ranks: which of the ranks are here; `size` how many there are.
        controller: the address and port of the one that judges; None where that is this one.
        listen: there, the address at which to listen; None where no other host has ranks.
        record: a file to which anomalies are added, a line each.
        run: the `run.json` of a run, in which is said why it was ended.
    """

    def __init__(
        self,
        folder: str,
        ranks: Sequence[int],
        size: int,
        limits: dict[str, float],
        secret: str,
        controller: tuple[str, int] | None,
        listen: str | None,
        record: str | None,
        run: str | None = None,
    ) -> None:
        self._folder, self._limits = Path(folder), DiagnosisLimits(**limits)
        self._probes = [RankProbe(self._folder / f"rank-{rank}.ring") for rank in ranks]
        self._record, self._run = (Path(path) if path else None for path in (record, run))
        self._line = AgentLine(*controller, secret, ranks) if controller else None
        self._judge = None if controller else Judge(self._limits)
        self._judges = controller[0] if controller else ""  # at which address
        self._controller = Controller(listen, secret, size) if listen else None
        self.port = self._controller.port if self._controller else 0
        self._left: dict[int, int] = {}
        self._ticked = self._ended = 0.0
        self._looked, self._resumed = math.inf, -math.inf
        self._said, self._leaving = "", dict[int, float]()
        self._speaker = _Speaker()

    def run(self) -> None:
        """Look at the ranks until they have ended, and as the one that judges until all have."""
        try:
            farewell = 0.0
            while not farewell or (
                not self._finished() and (time.monotonic() < farewell or self._needed())
            ):
                self._wait()
                self._note_pause()
                reports = [probe.look() for probe in self._probes]
                self._left |= {report.rank: report.left for report in reports}
                for event in self._events(reports):
                    self._take(event)
                self._end_ranks()
                self._conclude()
                if not farewell and all(map(self._over, self._probes)):
                    farewell = time.monotonic() + FAREWELL_SECONDS
                    if self._controller is not None and self._ended_well():
                        self._controller.tell(OVER)
        finally:
            for line in (self._line, self._controller):
                if line is not None:
                    line.close()
            self._speaker.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _over(self, probe: RankProbe) -> bool:
        """Whether a rank is dead, or needs nobody who looks: it may live on without its watch.

        Who judges at another host hears of its death from here alone.
        """
        left = self._left.get(probe.rank)
        if left in (FAILED, BEREFT) or (left == ENDED and self._judge is None):
            since = self._leaving.setdefault(probe.rank, time.monotonic())
            return probe.ended or time.monotonic() - since > FAREWELL_SECONDS
        return probe.ended or left == ENDED

    def _note_pause(self) -> None:
        """What stood while nobody looked here, and was not heard, is no sign of anything."""
        now = time.monotonic()
        if now - self._looked > PAUSED_SECONDS:
            self._resumed = now
            if self._judge is not None:
                self._judge.resumed(now)
        self._looked = now

    def _wait(self) -> None:
        """Until the next look is due, or a rank has died, which is seen at once."""
        alive = [probe.exited for probe in self._probes if probe.exited and not probe.ended]
        select.select(alive, [], [], LOOK_SECONDS)

    def _finished(self) -> bool:
        """Whether nothing is left to hear or to say once this host's ranks are dead."""
        if self._ended or self._ended_well():
            return self._controller is None or not self._controller.agents
        return False

    def _ended_well(self) -> bool:
        """Whether the ranks of this host ended, and none of them by an error."""
        return all(left == ENDED for left in self._left.values())

    def _needed(self) -> bool:
        """Whether other hosts' ranks are still judged here, as their work takes longer."""
        agents = self._controller.agents if self._controller else 0
        return agents > 0 and not self._ended and self._ended_well()

    def _events(self, reports: list[RankReport]) -> list[dict[str, Any]]:
        now = time.monotonic()
        if self._judge is None:
            return self._heard(reports, now)
        more = self._controller.reports() if self._controller else []
        self._judge.add([*reports, *more], now)
        events = [anomaly.as_json() for anomaly in self._judge.look(now)]
        if self._controller is not None:
            for event in events:
                self._controller.tell(event)
            if now - self._ticked >= TICK_SECONDS:
                self._ticked = now
                self._controller.tell({})
        return events

    def _heard(self, reports: list[RankReport], now: float) -> list[dict[str, Any]]:
        """What the controller said; where it says nothing for too long, that."""
        line = self._line
        assert line is not None
        for report in reports:  # apart, so that no line is too long, however much has waited
            line.send([report])
        events = line.events()
        silent = 0.0 if line.over else now - max(line.heard, self._resumed)
        if not events and not self._ended and silent >= self._limits.silent_seconds:
            note = f"nothing comes from the process that watches there; {EITHER_END}"
            lost = Anomaly("silent", 0, self._judges, "", False, "", silent, ends=True, note=note)
            events = [lost.as_json()]
        return events

    def _take(self, event: dict[str, Any]) -> None:
        """Say it, note it, and tell the ranks where the run is to end."""
        self._speaker.say(f"modicum: {event['sentence']}\n")
        if self._record is not None and self._judge is not None:
            with suppress(OSError), open(self._record, "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")  # a full disk is no reason to be silent
        if event["ends"] and not self._ended:
            self._ended, self._said = time.monotonic(), event["sentence"]
            with suppress(InputError, OSError):  # no room: they are ended from here, then
                write_json(self._folder / VERDICT, event)

    def _conclude(self) -> None:
        """Say in the run's record why it was ended, where rank 0 has not, and will not any more."""
        if self._run is not None and self._said and self._over(self._probes[0]):
            with suppress(InputError, OSError):
                note_interrupted(self._run, self._said)
            self._run = None

    def _end_ranks(self) -> None:
        """End those that a verdict reached and that have not ended by themselves."""
        late = self._ended and time.monotonic() - self._ended > GRACE_SECONDS
        for probe in self._probes if self._ended else ():
            left = self._left.get(probe.rank) in (ENDED, FAILED, BEREFT)
            if probe.stopped or (late and not left):
                probe.end()


class _Speaker:
    """Writes on standard error, by a thread of its own: a full pipe that nobody reads blocks it."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue(MOST_SAID)
        self._thread = threading.Thread(target=self._write, name="modicum speaker", daemon=True)
        self._thread.start()

    def say(self, line: str | None) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(line)

    def close(self) -> None:
        self.say(None)
        self._thread.join(SAYING_SECONDS)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            if sys.stderr is not None:
                with suppress(OSError):  # nobody reads any more
                    os.write(2, line.encode(errors="replace"))  # past locks that an exit waits for


def main() -> None:
    """Read the task, say that it is begun, and do it.

    It outlives signals that are sent to all processes of a run: the ranks may save what they have.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    task = json.loads(sys.stdin.readline())
    if task["controller"]:
        task["controller"] = tuple(task["controller"])
    agent = HostAgent(**task)
    print(json.dumps({"port": agent.port}), flush=True)
    sys.stdout.close()
    agent.run()


if __name__ == "__main__":
    main()
