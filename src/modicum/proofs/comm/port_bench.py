"""Ports that become slow or are down, and who is named: for C4's proof and its benchmark.

Four hosts, a network namespace and a rank each, whose ports are shaped. In an iteration a rank
sleeps in place of computing; then each sends to the next one round a ring, three times, as in an
all-gather of four parts. A port comes to a quarter of its rate, in either direction, or is down.
`python -m` this module is the process between the hosts, or a rank to which the second happens.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from modicum.comm.c4 import C4
from modicum.core.errors import InputError, Interrupted
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.comm.fault_bench import (
    CALM,
    COMPUTE,
    MOST,
    TrialFinding,
    watched_over_unwatched,
    watched_ranks,
)
from modicum.proofs.comm.links import apart, burst_for, in_words, make_hosts, shape_port, shaped

RATE = 100  # Mb/s of a port
MESSAGE = 262_144  # bytes that a rank sends at a time, some 21 ms
PORTS = ("out", "in")
AT = 25  # the iteration after which a port is down
STARTED_SECONDS, WITHIN_SECONDS = 120.0, 45.0  # until the fault, and after it
_MODULE = "modicum.proofs.comm.port_bench"  # also where it runs as `__main__`
_INSIDE = (
    'exec ip netns exec md$RANK unshare --uts sh -c \'hostname host-$RANK; exec "$@"\' sh "$@"'
)


def on_ports(calls: list[tuple[str, dict[str, Any]]], size: int = 4) -> list[Any]:
    """Several of this file's trials one after the other, on ports that are shaped.

    Raises:
        InputError: such a network cannot be made here, or a rank failed.
    """
    burst = burst_for(RATE * 1e6 / 8, MESSAGE)
    told: list[dict[str, Any]] = [{"calls": calls, "burst": burst}]
    found: list[Any] = shaped(
        size, [f"{RATE}mbit"], f"{_MODULE}:series", told, bursts=[burst], named=True, seconds=7200
    )[0]
    return found


def series(ranks: Ranks, calls: list[tuple[str, dict[str, Any]]], burst: int) -> list[Any]:
    """What `on_ports` has each rank do: the name of each trial, and its arguments."""
    known: dict[str, Callable[..., Any]] = {
        one.__name__: one for one in (slow_port_trials, slow_rank_trials, calm_ring, cost_of_a_ring)
    }
    shared = {"slow_port_trials": {"burst": burst}}
    return [known[name](ranks, **arguments, **shared.get(name, {})) for name, arguments in calls]


# Slow ports


def slow_port_trials(
    ranks: Ranks, trials: list[dict[str, Any]], burst: int, shift: int = 0
) -> list[TrialFinding]:
    """A port comes to a quarter of its rate: what was named, and after how many iterations.

    Args:
        trials: the `rank` whose port is asked for, and which `port` of it, `out` or `in`.
        burst: bytes that pass a port at once.
        shift: that many ranks further the fault is injected.
    """
    return [_slow_port(ranks, one["rank"], one["port"], burst, shift) for one in trials]


def slow_rank_trials(
    ranks: Ranks, trials: list[dict[str, Any]], shift: int = 0
) -> list[TrialFinding]:
    """A rank of the ring computes longer, and no link is slow; as `fault_bench.slow_trials`."""
    return [_slow_rank(ranks, one["rank"], one["part"], shift) for one in trials]


def _slow_rank(ranks: Ranks, asked: int, part: float, shift: int) -> TrialFinding:
    guilty = ranks.rank == (asked + shift) % ranks.size
    found: TrialFinding = {"rank": asked, "part": part, "right": False, "false": 0}
    heard = _in_a_ring(ranks, found, lambda step: 1 + part * (guilty and step >= CALM))
    if heard and not found["false"]:
        found["right"] = (heard[0]["kind"], heard[0]["rank"]) == ("slow", asked)
    return found


def _slow_port(ranks: Ranks, asked: int, port: str, burst: int, shift: int) -> TrialFinding:
    guilty = (asked + shift) % ranks.size
    found: TrialFinding = {"rank": asked, "port": port, "right": False, "false": 0}

    def compute(step: int) -> float:
        if step == CALM and ranks.rank == guilty:
            shape_port(guilty, port, f"{RATE // 4}mbit", burst)
        return 1.0

    heard = _in_a_ring(ranks, found, compute)
    if ranks.rank == guilty:
        shape_port(guilty, port, f"{RATE}mbit", burst)
    dist.barrier()
    if heard and not found["false"]:
        first = heard[0]
        source = asked if port == "out" else (asked - 1) % ranks.size
        link = ("slow link", source, (source + 1) % ranks.size)
        found["right"] = (first["kind"], first["rank"], first["peer"]) == link
        found["rate"] = first["rate"] / (RATE * 1e6 / 8)
        found["usual_rate"] = first["usual_rate"] / (RATE * 1e6 / 8)
    return found


def _in_a_ring(
    ranks: Ranks, found: TrialFinding, compute: Callable[[int], float]
) -> list[dict[str, Any]]:
    """Iterations until something is said, which is noted in `found`; what rank 0's host has.

    Args:
        compute: in times of what a rank usually sleeps, by the number of the iteration.
    """
    with watched_ranks(ranks) as (_, events):
        for step in range(CALM + MOST):
            time.sleep(COMPUTE * compute(step))
            ring(ranks.rank, ranks.size)
            if _told(1.0 if events() else 0.0):
                break
        heard: list[dict[str, Any]] = events()
    if heard and step < CALM:
        found["false"] = len(heard)
    elif heard:
        found["iterations"] = step - CALM
    found["said"] = [one["sentence"] for one in heard]
    return heard


def calm_ring(ranks: Ranks, seconds: float) -> dict[str, Any]:
    """No fault, and compute that varies by a tenth: what was named, which must be nobody."""
    draws, begun, step = random.Random(f"calm ring {ranks.rank}"), time.monotonic(), 0
    with watched_ranks(ranks) as (_, events):
        over = False
        while not over:
            time.sleep(COMPUTE * (1 + draws.gauss(0, 0.05)))
            ring(ranks.rank, ranks.size)
            step += 1
            over = _told(1.0 if ranks.first and time.monotonic() - begun > seconds else 0.0)
        heard = events()
    return {"iterations": step, "said": [one["sentence"] for one in heard]}


def cost_of_a_ring(ranks: Ranks, pairs: int, steps: int) -> list[float]:
    """What it costs to be watched, where ranks send in a ring after they computed."""
    return watched_over_unwatched(lambda: ring(ranks.rank, ranks.size), pairs, steps)


def ring(rank: int, size: int) -> None:
    """Each part is sent on by every rank but the one that had it last.

    Receives are begun first. A send fills the port's queue, in which what announces a receive would
    stand behind it, for longer the later it comes.
    """
    part, come = torch.ones(MESSAGE // 4), torch.empty(MESSAGE // 4)
    for _ in range(size - 1):
        works = [dist.irecv(come, (rank - 1) % size), dist.isend(part, (rank + 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        part, come = come, part


def _told(value: float) -> bool:
    """Whether any rank says more than nothing."""
    said = torch.tensor([value])
    dist.all_reduce(said)
    return bool(said.item() > 0)


# Ports that are down


def port_down_trials(
    trials: list[dict[str, Any]], size: int = 4, shift: int = 0
) -> list[TrialFinding]:
    """In each trial the port of a rank's host goes down: who was named, when, and how all ended.

    Every host that is left must name the rank, and the run's record too.

    Args:
        trials: the `rank` whose port is asked for; where `apart` is true, another network is there
            for those who watch, as many clusters have one, so no host falls silent.
        shift: that many ranks further it is down.

    Returns:
        Of each whether it was `right`, `seconds` from then to the last host's sentence, `ended`
        to the end of the last process, and whether all ended with `code_4`.

    Raises:
        InputError: such hosts cannot be made here.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = {"trials": trials, "size": size, "shift": shift}
        (folder / "task.json").write_text(json.dumps(task), encoding="utf-8")
        command = f"exec {sys.executable} -m {_MODULE} between {folder}"
        done = subprocess.run(apart(command), capture_output=True, text=True, check=False)
        if not (folder / "found.json").exists():
            raise InputError(f"hosts could not be made here: {done.stderr.strip()[-2000:]}")
        found: list[TrialFinding] = json.loads((folder / "found.json").read_bytes())
    return found


def between(folder: Path) -> None:
    """Make the hosts in this process's namespaces, and the trials of a folder's task."""
    task = json.loads((folder / "task.json").read_bytes())
    size, found = task["size"], []
    make_hosts(size)
    _add_network(size)
    for host in range(size):
        for port in PORTS:
            shape_port(host, port, f"{RATE}mbit", burst_for(RATE * 1e6 / 8, MESSAGE))
    for number, trial in enumerate(task["trials"]):
        place = folder / str(number)
        place.mkdir()
        found.append(_down(place, number, task["shift"], size, **trial))
    (folder / "found.json.new").write_text(json.dumps(found), encoding="utf-8")
    os.replace(folder / "found.json.new", folder / "found.json")


def _add_network(size: int) -> None:
    """A second bridge, by which those who watch reach one another when ports are down."""
    in_words("ip -n mdsw link add br1 type bridge")
    in_words("ip -n mdsw link set br1 up")
    for host in range(size):
        in_words(f"ip link add mdm{host} netns mdsw type veth peer name eth1 netns md{host}")
        in_words(f"ip -n mdsw link set mdm{host} master br1 up")
        in_words(f"ip -n md{host} addr add 10.78.0.{host + 1}/24 dev eth1")
        in_words(f"ip -n md{host} link set eth1 up")


def _down(
    place: Path, number: int, shift: int, size: int, rank: int, apart: bool = False
) -> TrialFinding:
    asked, guilty = rank, (rank + shift) % size
    running = {"modicum": "", "status": "running", "interruptions": 0, "error": None}
    (place / "run.json").write_text(json.dumps(running), encoding="utf-8")
    meet = ("10.78.0.1" if apart else "10.77.0.1", 29_511 + number)
    processes = [_start(place, host, size, meet) for host in range(size)]
    others = [host for host in range(size) if host != guilty]
    when, heard, end = 0.0, dict[int, float](), time.monotonic() + STARTED_SECONDS
    try:
        while any(one.poll() is None for one in processes) and time.monotonic() < end:
            time.sleep(0.02)
            if not when and (place / "there").exists():
                in_words(f"ip -n mdsw link set mdp{guilty} down")
                when = time.monotonic()
                end = when + WITHIN_SECONDS
            for host in others:
                if host not in heard and _said(place, host):
                    heard[host] = time.monotonic() - when
        ended = time.monotonic() - when
    finally:
        alive = [one for one in processes if one.poll() is None]
        for one in alive:
            one.kill()
        for one in processes:
            one.wait()
        in_words(f"ip -n mdsw link set mdp{guilty} up")
    if not when:
        raise InputError(f"ranks ended before their fault: {_said(place, 0)}")
    error = json.loads((place / "run.json").read_bytes())["error"] or ""
    said = [*(_said(place, host) for host in others), error]
    return {
        "rank": asked,
        "apart": apart,
        "right": all(re.search(rf"rank {asked}\b", one) for one in said),
        "seconds": max(heard.values()) if len(heard) == len(others) else None,
        "ended": None if alive else ended,
        "code_4": [one.returncode for one in processes] == [Interrupted.exit_code] * size,
        "said": said,
    }


def _said(place: Path, host: int) -> str:
    """The first sentence of a host's watch; empty: there is none yet."""
    text = (place / f"said-{host}").read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("modicum: ")]
    return lines[0] if lines else ""


def _start(place: Path, rank: int, size: int, meet: tuple[str, int]) -> subprocess.Popen[bytes]:
    """A rank on its host, which meets the others there; what it says goes to a file."""
    own = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": meet[0],
        "MASTER_PORT": str(meet[1]),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    words = ["sh", "-c", _INSIDE, "sh", sys.executable, "-m", _MODULE, "rank", str(place)]
    with open(place / f"said-{rank}", "wb") as file:
        return subprocess.Popen(
            words, env=os.environ | own, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def train(place: Path) -> None:
    """Iterations of a rank, without end."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    C4().watch(record=place / "record", run=place / "run.json")
    for step in range(10_000):
        time.sleep(COMPUTE)
        ring(rank, size)
        if step == AT and rank == 0:
            (place / "there").touch()


if __name__ == "__main__":
    {"between": between, "rank": train}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread of gloo may still want the interpreter
