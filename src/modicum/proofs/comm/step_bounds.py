"""What a step under an exchange is held against: no step, the link, and what must follow what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

EXACT_DENSE = ("dense_fp32", "ddp")
DENSE = (*EXACT_DENSE, "dense_bf16", "dense_fp16")
FORWARD = 1 / 3
WorldArms = dict[str, dict[str, Any]]
StepRow = dict[str, Any]


@dataclass(frozen=True)
class World:
    """Ranks, the layers that they train under every exchange, and how often they are timed.

    Args:
        compute: seconds that layers sleep in a pass; 0 where they multiply `rows`.
        low_rank: layers in a bucket of products, whose messages are short.
    """

    ranks: int
    layers: int
    width: int
    compute: float
    rows: int = 0
    rank: int = 32
    low_rank: int = 8
    steps: int = 2
    repeats: int = 3

    @property
    def model(self) -> dict[str, Any]:
        """The arguments of the bench's layers."""
        sleeps = {"forward": FORWARD * self.compute, "backward": (1 - FORWARD) * self.compute}
        return {"layers": self.layers, "width": self.width, "rows": self.rows, **sleeps}

    @property
    def dense_bytes(self) -> float:
        """What a rank sends of gradients in fp32."""
        return 2 * (self.ranks - 1) / self.ranks * 4 * self.layers * self.width**2

    def rate(self, ratio: float, compute: float = 0.0) -> float:
        """Bytes a second of a link on which they take `ratio` passes of so many seconds."""
        return self.dense_bytes / (ratio * (compute or self.compute))

    def arms(self) -> WorldArms:
        """What is compared; a bucket holds a layer, where messages need not be longer.

        SDP4Bit's weights are in bf16. Where layers multiply it is left out: a processor without
        instructions for bf16 takes ten times as long then, whatever travels.
        """
        layer, several = 4 * self.width**2, 4 * self.width**2 * self.low_rank
        product = {"arm": "matrix", "rank": self.rank, "bucket_bytes": several}
        sums = {"arm": "matrix", "method": "dense_sums", "bucket_bytes": layer}
        found: WorldArms = {
            "none": {"arm": "none"},
            "dense_fp32": sums,
            "dense_bf16": {**sums, "dtype": "bf16"},
            "dense_fp16": {**sums, "dtype": "fp16"},
            "ddp": {"arm": "ddp", "bucket_bytes": layer},
            "powersgd": {"method": "powersgd", **product},
            "acp_sgd": {"method": "acp_sgd", **product},
            "dear": {"arm": "dear", "bucket_bytes": layer},
            "sdp4bit": {"arm": "sdp4bit", "bucket_bytes": several},
        }
        return {k: arm for k, arm in found.items() if not (self.rows and k == "sdp4bit")}

    def buckets(self, label: str) -> int:
        """How many an arm has."""
        return math.ceil(4 * self.layers * self.width**2 / self.arms()[label]["bucket_bytes"])


# The part of an arm's bytes that leaves when the backward pass is over.
LATE = {"powersgd": 0.5, "sdp4bit": 0.5}


def chain(compute: float, wire: float, buckets: int, late: float = 0.0) -> float:
    """Seconds of a step whose buckets are sent one after the other as a backward pass fills them.

    Args:
        compute: seconds of a pass.
        wire: seconds of all calls.
        late: the part of them that begins when all others are through.

    >>> chain(3.0, 3.0, buckets=2), chain(3.0, 0.2, buckets=2), chain(3.0, 3.0, 2, late=0.5)
    (5.0, 3.1, 5.25)
    """
    forward, backward, free = FORWARD * compute, (1 - FORWARD) * compute, 0.0
    for bucket in range(1, buckets + 1):
        free = max(free, forward + backward * bucket / buckets) + (1 - late) * wire / buckets
    return round(max(compute, free) + late * wire, 12)


def halves(compute: float, wire: float) -> float:
    """Seconds of a step whose reduce-scatter and all-gather each hide behind one pass.

    >>> halves(3.0, 8.0)
    8.0
    """
    forward, backward = FORWARD * compute, (1 - FORWARD) * compute
    return max(forward, wire / 2) + max(backward, wire / 2)


def judged(
    world: World, label: str, row: StepRow, none: float, link: Mapping[str, float]
) -> StepRow:
    """An arm's row: its step, what bounds it, and whether its bytes are the ledger's."""
    buckets, ring = world.buckets(label), row["ring_steps"]
    if label == "ddp":  # which nobody meters
        ring = 2 * (world.ranks - 1) * buckets
    metered = label != "ddp"
    sent = row["bytes"] if metered else row["said"]
    wire = link["latency"] * ring + sent / link["rate"]
    bound, step = max(none, wire), median(row["seconds"])
    must = halves(none, wire)
    if label != "dear":
        must = chain(none, wire, buckets, LATE.get(label, 0.0))
    return {
        "step": step,
        "range": [min(row["seconds"]), max(row["seconds"])],
        "bound": bound,
        "over_bound": step / bound,
        "chain": must,
        "over_chain": step / must,
        "wire": wire,
        "waited": row["waited"],
        "busy": row["busy"],
        "bytes": sent,
        "ledger": row["said"],
        "bytes_are_ledger": sent == row["said"] if metered else None,
        "device_over_bytes": row["device"] / sent if row["device"] and sent else None,
        "payload_over_bytes": row["payload"] / sent if row["payload"] and sent else None,
        "calls": row["calls"],
    }


def break_even(points: Mapping[float, Mapping[str, float]], label: str) -> StepRow:
    """The ratio from which an arm's step is shorter than the best dense one's: by exact, by any.

    Between two ratios it is where the two lines cross, over the logarithm of the ratio. `from`
    null: at no ratio that was measured; the least ratio: from there on at least.

    Args:
        points: at each ratio every arm's step.

    >>> steps = {1.0: {"ddp": 1.0, "dense_fp32": 1.2, "dear": 1.1}, 4.0: {"ddp": 4.0, "dear": 3.9}}
    >>> break_even(steps, "dear")["exact"]
    2.0
    """
    return {
        name: _crossing({at: _gain(steps, label, dense) for at, steps in points.items()})
        for name, dense in (("exact", EXACT_DENSE), ("any", DENSE))
    }


def _gain(steps: Mapping[str, float], label: str, dense: tuple[str, ...]) -> float:
    return min(steps[name] for name in dense if name in steps and name != label) - steps[label]


def _crossing(gains: Mapping[float, float]) -> float | None:
    ratios = sorted(gains)
    if gains[ratios[-1]] <= 0:
        return None
    above = ratios[-1]
    for below in reversed(ratios[:-1]):
        if gains[below] <= 0:
            part = -gains[below] / (gains[above] - gains[below])
            return float(f"{below * (above / below) ** part:.4g}")
        above = below
    return above


def judged_all(world: World, found: StepRow) -> StepRow:
    """What a bench found at one ratio, arm by arm."""
    none = median(found["arms"]["none"]["seconds"])
    rows = {
        label: judged(world, label, row, none, found["link"])
        for label, row in found["arms"].items()
        if label != "none"
    }
    return {"none": none, "link": found["link"], "arms": rows}
