"""Proofs that need several ranks: a function run at so many of them on this machine.

Each rank is a process of its own, started as `modicum train --ranks` starts them. Arguments and
results are JSON in files of a folder that is gone afterwards; nothing is unpickled. Rank 0 prints
to this process's standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from modicum.parallel.launch import Supervisor
from modicum.parallel.rank_environment import LOST, end_with_supervisor

SECONDS = 900


class RanksFailed(RuntimeError):
    """A rank raised, died or did not end in time; the message says which, and how."""


def at_ranks(
    function: str,
    ranks: int,
    arguments: Mapping[str, Any] | None = None,
    *,
    within: Sequence[str] = (),
    seconds: int = SECONDS,
) -> list[Any]:
    """What `function(Ranks, **arguments)` returns at each of so many gloo ranks, in order.

    Every rank has one thread, unless OMP_NUM_THREADS says otherwise. Call it from the main thread.

    Args:
        function: `module:name`, which every rank imports.
        ranks: how many; one rank alone is a process without a group.
        arguments: keywords for it, of JSON; results are of JSON too.
        within: a command that runs the command after it, such as `ip netns exec NAME`; RANK stands
            in its environment.
        seconds: after so long a rank is ended.

    Raises:
        RanksFailed: a rank failed.

    >>> at_ranks("modicum.proofs.ranks:number", 2, {"times": 10})
    [0, 10]
    """
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name), list[str]()
        task = {"function": function, "arguments": dict(arguments or {}), "seconds": seconds}
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        command = [*within, sys.executable, "-m", "modicum.proofs.ranks", name]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        code = Supervisor(command, ranks, environment=environment, say=said.append).run()
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        answers = [json.loads(file.read_bytes()) if file.exists() else {} for file in files]
    failed = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if "error" in a]
    if code or failed or not all("result" in answer for answer in answers):
        raise RanksFailed("\n".join([f"{function} failed at {ranks} ranks", *failed, *said]))
    return [answer["result"] for answer in answers]


def number(ranks: Any, times: int = 1) -> int:
    """A rank's number, multiplied: what the example runs."""
    return int(ranks.rank * times)


def _serve(folder: Path) -> int:
    """Run the task of a folder as one of its ranks; the exit code."""
    from modicum.core.ranks.ranks import PeerLost, joined

    task = json.loads((folder / "task.json").read_bytes())
    signal.alarm(task["seconds"])
    os.dup2(2, 1)  # what a library prints is no result of the command that runs the proof
    module, name = task["function"].split(":")
    answer, code, rank = {}, 0, int(os.environ.get("RANK", "0"))
    try:
        with joined() as ranks:
            answer["result"] = getattr(importlib.import_module(module), name)(
                ranks, **task["arguments"]
            )
            ranks.gather(True)  # who leaves early may take the meeting place from the others
    except PeerLost:
        code = LOST  # the consequence of another's failure, which its supervisor tells of
    except Exception:
        answer, code = {"error": traceback.format_exc()}, 1
    (folder / f"{rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    return code


if __name__ == "__main__":
    end_with_supervisor()
    status = _serve(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread of gloo may still want the interpreter: it is not taken down
