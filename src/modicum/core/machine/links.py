"""What was measured of the links between this machine's ranks, and between it and others.

A call that a rank sends `bytes` in, in so many steps of a ring, takes `latency` for each step and
`bytes / rate`. Both are kept next to the machine's record, by axis: `local`, ranks of one host, and
`node`, one rank of each host. They are those of all processors of one kind, whatever the threads.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modicum.core.errors import InputError
from modicum.core.files import regular, write_json
from modicum.core.machine.identity import cache_folder, processor

LOCAL, NODE = "local", "node"


@dataclass(frozen=True)
class MeasuredLink:
    """A link between ranks.

    Args:
        latency: seconds a step of a ring.
        rate: bytes a second in which a rank sends, all others sending too.
        cpu: seconds of a processor that a byte takes, of the sending rank's process.
        ranks: how many took part.
        when: the date and time; empty: it was stated, not measured.
        within: the link between ranks of one host, where this one is between hosts; None: unknown.

    >>> MeasuredLink(latency=0.001, rate=1e6).seconds(5000, steps=3)
    0.008
    """

    latency: float
    rate: float
    cpu: float = 0.0
    ranks: int = 2
    when: str = ""
    within: MeasuredLink | None = None

    def seconds(self, sent: float, steps: float) -> float:
        """What so many bytes take in so many steps, with nothing else on the link."""
        return self.latency * steps + sent / self.rate


def fitted(sent: Sequence[int], steps: int, seconds: Sequence[float]) -> tuple[float, float]:
    """The latency of a step and the rate that explain what calls of these bytes took.

    By least squares of what is off, relative to what each took; neither is negative. Where calls of
    more bytes took no longer, which noise can do, the rate is what the largest one reached at
    least, and so is finite.

    >>> fitted([0, 1000, 4000], 2, [0.002, 0.003, 0.006])
    (0.001, 1000000.0)
    """
    # seconds = a + b sent, each divided by its seconds.
    weights = [1 / each**2 for each in seconds]
    total = math.fsum(weights)
    x = math.fsum(w * s for w, s in zip(weights, sent, strict=True)) / total
    y = math.fsum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    above = math.fsum(w * (s - x) * (t - y) for w, s, t in zip(weights, sent, seconds, strict=True))
    below = math.fsum(w * (s - x) ** 2 for w, s in zip(weights, sent, strict=True))
    slope = above / below if below else 0.0
    if slope <= 0:
        return float(f"{y / steps:.6g}"), float(f"{max(sent) / y:.6g}")
    start = y - slope * x
    if start < 0:  # through the origin then
        squares = math.fsum(w * s * s for w, s in zip(weights, sent, strict=True))
        products = math.fsum(w * s * t for w, s, t in zip(weights, sent, seconds, strict=True))
        return 0.0, float(f"{squares / products:.6g}")
    return float(f"{start / steps:.6g}"), float(f"{1 / slope:.6g}")


def links_file() -> Path:
    """Where they are kept, there or not."""
    digest = hashlib.sha256(processor().encode()).hexdigest()
    return cache_folder() / f"{digest[:16]}.links.json"


def known_links() -> dict[str, MeasuredLink]:
    """The links by axis that were measured from here; none where the file is damaged, or none."""
    found: dict[str, MeasuredLink] = {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        for axis, raw in dict(json.loads(regular(links_file()).read_bytes())).items():
            with suppress(ValueError, KeyError, TypeError, OverflowError):
                found[axis] = link_of(raw)
    return found


def link_of(raw: Mapping[str, Any]) -> MeasuredLink:
    """A link of plain values.

    Raises:
        ValueError, KeyError, TypeError: they are none, or cannot be.
    """
    link = MeasuredLink(
        float(raw["latency"]),
        float(raw["rate"]),
        float(raw["cpu"]),
        int(raw["ranks"]),
        str(raw["when"]),
    )
    if 0 <= link.latency < 3600 and 0 < link.rate < math.inf and 0 <= link.cpu < 1:
        return link
    raise ValueError(f"not a link: {link}")


def keep_links(links: Mapping[str, MeasuredLink]) -> Path:
    """Write them down, next to those of other axes; the file.

    Raises:
        InputError: the user's cache cannot be written.
    """
    file = links_file()
    rows = {axis: asdict(link) for axis, link in {**known_links(), **links}.items()}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot be made: {error.strerror}", file=file.parent) from None
    write_json(file, rows)
    return file
