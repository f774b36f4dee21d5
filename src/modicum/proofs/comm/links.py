"""Links that are really slow: every rank in a network namespace, joined by ports that are shaped.

A bridge joins the namespaces, and tbf shapes each port in both directions. All of it is made inside
user namespaces, so it needs no privileges where the kernel allows these, touches no interface of
the machine, and is gone when the process that made it ends. Where it cannot be made, proofs pretend
a link instead (`modicum.core.ranks.collectives.Link`).
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.proofs.ranks import SECONDS, RanksFailed, at_ranks

# A burst much larger than a message passes it at memory speed; 100 ms of queue lose nothing.
BURST = 32_768
COLD_OFF = 0.15  # by which a cold message may be off the time of its bytes
_SHAPE = "root tbf rate {rate} burst {burst}b latency 100ms"
COLD = "modicum.proofs.comm.links:cold_seconds"
_LEAST_BURST = 3_200  # two full packets
# Which of these a kernel lets a namespace have. Its own choice may be BBR, which looks for a link's
# rate by losing packets of it: where calls follow one another, a third of a slow link stood idle.
_CONGESTION = ("cubic", "reno")
_HEADERS = 66  # of a packet: Ethernet 14, IP 20, TCP 20 and its time stamps 12
_FAILED = 7  # ends the process that made the links where what ran on them failed, and they did not
_INSIDE = (
    "exec ip netns exec md$((RANK / {local})) "
    'env MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME=eth0 "$@"'
)
_NAMED = (
    "exec ip netns exec md$((RANK / {local})) unshare --uts "
    "sh -c 'hostname host-$((RANK / {local})); exec \"$@\"' sh "
    'env MASTER_ADDR=10.77.0.1 GLOO_SOCKET_IFNAME=eth0 "$@"'
)


class NoLinks(InputError):
    """Links cannot be made or shaped here: a tool, a right or a part of the kernel is missing."""


def shaped(
    ranks: int,
    rates: list[str],
    function: str,
    arguments: Sequence[Mapping[str, Any]],
    *,
    local: int = 1,
    bursts: list[int] | None = None,
    named: bool = False,
    seconds: int = SECONDS,
) -> list[Any]:
    """What `function(Ranks, **arguments[i])` gives at rank 0, over ports shaped to `rates[i]`.

    Args:
        rates: as tc spells them, such as `200mbit`.
        local: ranks that share a namespace, and with it a port, as those of one host do.
        bursts: bytes that pass at once after a rest, for each rate, as of `burst_for`.
        named: whether each namespace is a host with a name of its own; else all have one name.
        seconds: after so long at one rate a rank is ended.

    Raises:
        NoLinks: such a network cannot be made here.
        InputError: a rank failed on it.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder) / "task.json", Path(folder) / "result.json"
        series = {
            "ranks": ranks,
            "rates": rates,
            "function": function,
            "arguments": list(arguments),
        }
        series |= {"local": local, "bursts": bursts or [BURST] * len(rates), "seconds": seconds}
        series["named"] = named
        task.write_text(json.dumps(series), encoding="utf-8")
        command = f"exec {sys.executable} -m {__name__} {task} {result}"
        done = subprocess.run(apart(command), stderr=subprocess.PIPE, text=True, check=False)
        said = done.stderr.strip()[-2000:]
        if done.returncode == _FAILED or done.returncode < 0:
            raise InputError(f"what ran on shaped links failed: {said}")
        if not result.exists():
            raise NoLinks(f"links could not be shaped here: {said}")
        return list(json.loads(result.read_bytes()))


def apart(command: str) -> list[str]:
    """The words that run a shell's command where it may make network namespaces of its own.

    Raises:
        NoLinks: a tool is missing.
    """
    missing = [name for name in ("unshare", "ip", "tc") if not shutil.which(name)]
    if missing:
        raise NoLinks(
            f"links are made and shaped by tools of which {', '.join(missing)} is not here"
        )
    inside = f"mount -t tmpfs none /run && mkdir /run/netns && {command}"
    return ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", inside]


def all_reduce_seconds(ranks: Ranks, elements: int, repeats: int = 3) -> float:
    """Seconds that an all-reduce of so many fp32 takes, the median after a first one."""
    buffer, times = torch.ones(elements), []
    for _ in range(repeats + 1):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def burst_for(rate: float, message: int) -> int:
    """Bytes of burst for a link: under a twentieth of the smallest message that is timed.

    A link needs what passes in a millisecond, or its timers slow it: at 200 Mb/s a burst of a third
    of that makes messages take 1.3 times their bytes.

    Args:
        rate: bytes a second.
        message: bytes that a rank sends in the smallest call.

    Raises:
        InputError: both cannot be had.

    >>> burst_for(2.5e6, 200_000), burst_for(2.5e7, 10_000_000)
    (10000, 32768)
    """
    least = max(_LEAST_BURST, round(rate / 1000))
    if message < 20 * least:
        raise InputError(
            f"a link of {rate:.4g} bytes a second passes at least {least} bytes at once after a "
            "rest, more than a twentieth of the smallest message, which would seem too fast",
            field="message",
            value=message,
            allowed=f"{20 * least} bytes or more",
        )
    return max(least, min(BURST, message // 20))


def in_tc(rate: float) -> str:
    """Bytes a second as tc spells them.

    >>> in_tc(2.5e6)
    '20000kbit'
    """
    return f"{round(rate * 8 / 1000)}kbit"


def tried_link(ranks: int, rate: float, message: int) -> tuple[int, float]:
    """The burst for a link, and by what part a cold message on it is off the time of its bytes.

    Args:
        rate: bytes a second.
        message: bytes that a rank sends in the smallest call that is timed.

    Raises:
        NoLinks: links cannot be shaped here.
        InputError: the messages are too short for such a link, or it is not its rate.
    """
    burst = burst_for(rate, message)
    [cold] = shaped(ranks, [in_tc(rate)], COLD, [{"message": message}], bursts=[burst])
    off = cold / (message / rate) - 1
    if abs(off) > COLD_OFF:
        problem = f"a cold message takes {off:+.0%} of its bytes' time on a shaped link"
        raise InputError(problem, field="burst", value=burst)
    return burst, off


def cold_seconds(ranks: Ranks, message: int, repeats: int = 5) -> float:
    """Seconds in which an all-reduce sends so many bytes after a rest, the median of some.

    A rest fills the bucket of a shaped link, so that a burst which is too large shows.
    """
    elements = message * ranks.size // (2 * (ranks.size - 1)) // 4
    buffer, times = torch.ones(elements), []
    dist.all_reduce(buffer)  # connections
    for _ in range(repeats):
        dist.barrier()
        time.sleep(0.15)
        started = time.perf_counter()
        dist.all_reduce(buffer)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def sent() -> int:
    """Bytes that this namespace's eth0 has sent; 0 where there is none."""
    device = psutil.net_io_counters(pernic=True, nowrap=False).get("eth0")
    return device.bytes_sent if device else 0


def payload_sent() -> int:
    """What `sent` counts, less the headers of Ethernet, IP and TCP; 0 where there is no eth0."""
    device = psutil.net_io_counters(pernic=True, nowrap=False).get("eth0")
    return device.bytes_sent - _HEADERS * device.packets_sent if device else 0


def _serve(task: Path, result: Path) -> None:
    """Make the network in the namespaces that this process was started in, and do the task."""
    series = json.loads(task.read_bytes())
    hosts = series["ranks"] // series["local"]
    make_hosts(hosts)
    in_words("ip netns exec md0 true")  # where that is not allowed, no rank is at fault
    results = []
    for rate, burst, arguments in zip(
        series["rates"], series["bursts"], series["arguments"], strict=True
    ):
        for host in range(hosts):
            for port in ("out", "in"):
                shape_port(host, port, rate, burst)
        inside = _NAMED if series["named"] else _INSIDE
        within = ("sh", "-c", inside.format(local=series["local"]), "sh")
        found = at_ranks(
            series["function"], series["ranks"], arguments, within=within, seconds=series["seconds"]
        )
        results.append(found[0])
    result.write_text(json.dumps(results), encoding="utf-8")


def shape_port(host: int, port: str, rate: str, burst: int) -> None:
    """Give a host's port a rate in one direction; ranks inside the namespaces may do it too.

    Args:
        port: `out` of the host, or `in` to it.
        rate: as tc spells it, such as `200mbit`.
        burst: bytes that pass at once after a rest.
    """
    where, device = (f"md{host}", "eth0") if port == "out" else ("mdsw", f"mdp{host}")
    shape = _SHAPE.format(rate=rate, burst=burst)
    in_words(f"tc -n {where} qdisc replace dev {device} {shape}")


def make_hosts(hosts: int) -> None:
    """Make so many namespaces, `md0` on, joined by a bridge in `mdsw`, in those of this process."""
    in_words("ip netns add mdsw")
    in_words("ip -n mdsw link add br0 type bridge")
    in_words("ip -n mdsw link set br0 up")
    for host in range(hosts):
        in_words(f"ip netns add md{host}")
        in_words(f"ip link add mdp{host} netns mdsw type veth peer name eth0 netns md{host}")
        in_words(f"ip -n mdsw link set mdp{host} master br0 up")
        in_words(f"ip -n md{host} addr add 10.77.0.{host + 1}/24 dev eth0")
        in_words(f"ip -n md{host} link set lo up")
        in_words(f"ip -n md{host} link set eth0 up")
        _set_congestion_control(host)


def _set_congestion_control(host: int) -> None:
    """The same on every machine, or at least one like it; else the kernel's own stays."""
    for name in _CONGESTION:
        write = f"echo {name} > /proc/sys/net/ipv4/tcp_congestion_control"
        command = ["ip", "netns", "exec", f"md{host}", "sh", "-c", write]
        if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            return


def in_words(command: str) -> None:
    """Run a command of words without spaces; an error where it fails."""
    subprocess.run(command.split(), check=True)


if __name__ == "__main__":
    try:
        _serve(Path(sys.argv[1]), Path(sys.argv[2]))
    except subprocess.CalledProcessError as error:
        sys.exit(str(error))
    except Exception as error:
        of_ranks = isinstance(error, RanksFailed)
        print(error if of_ranks else traceback.format_exc(), file=sys.stderr)
        sys.exit(_FAILED)
