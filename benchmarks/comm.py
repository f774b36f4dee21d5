"""Every way to exchange gradients, on links that take 0.3 to 10 times what computing takes.

Three worlds: four ranks whose layers sleep, two ranks that multiply matrices, and two ranks that
run `modicum train` with recipes. In each the same model is trained with every exchange in turns: a
step's seconds, the bytes that its meter counts and its ledger says, and the bound: the larger of a
step in which nothing travels and the time of the method's own calls on the measured link. `chain`
is the step by what must follow what: the first gradients come after the forward pass, and so on.

Ratios are of the time of a dense fp32 all-reduce over a pass's. Links are shaped ports of network
namespaces (`modicum.proofs.comm.links`), and pretended ones where these cannot be made, and at 0.3.
Where both are there, pretended ones are compared with shaped ones. With `--quick` everything is
small, the link is pretended unless `--shaped`, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
from comm_recipes import FULL_RUN, QUICK_RUN, in_the_trainer
from common import RESULTS, alone, quiet, say, write_result

from modicum.core.machine import this_machine
from modicum.proofs.comm.bounded_curve import (
    BAR,
    RATIOS,
    SLEEPING,
    VIRTUAL_RATIOS,
    on_a_pretended_link,
    on_shaped_links,
)
from modicum.proofs.comm.links import NoLinks
from modicum.proofs.comm.step_bounds import StepRow as Row
from modicum.proofs.comm.step_bounds import World, break_even
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.curve_bench"
APART = 0.15
# What a port's counter says, less the headers of packets, over the bytes of the meter.
PAYLOAD, DEVICE_OFF = "payload_over_bytes", 0.03
# The most that fp32 sums may take of DDP's step; the least that PowerSGD's step may be of ACP-SGD's
# where its bytes take so much of computing. At rank 4 and width 512 they do at no ratio here.
OVER_DDP, POWERSGD_OVER_ACP, FROM = 1.03, 1.2, 0.3


COMPUTING = World(ranks=2, layers=16, width=512, compute=0.0, rows=1024)
QUICK = World(ranks=2, layers=4, width=256, compute=0.2, low_rank=4, steps=1, repeats=2)
WORLDS, RESULT = ("sleeping", "computing", "trainer"), RESULTS / "comm.json"

# Measuring


def curve(
    world: World,
    ratios: Mapping[str, tuple[float, ...]],
    by_port: bool,
    settled: Callable[[], float],
) -> Row:
    """A world at every ratio, what pretended links are off, and where methods begin to pay.

    Args:
        ratios: those of links that are pretended in any case, and of those shaped where possible.
        settled: waits until nothing else runs here, and gives the load.
    """
    pretended = partial(on_a_pretended_link, world, settled=settled)
    compute = world.compute
    if not compute:
        settled()
        task = {"arms": {"none": {"arm": "none"}}, "model": world.model, "rate": 1e12}
        compute = median(
            at_ranks(f"{BENCH}:curve", world.ranks, task)[0]["arms"]["none"]["seconds"]
        )
    rates = {r: world.rate(r, compute) for each in ratios.values() for r in each}
    points = {ratio: pretended(rates[ratio]) for ratio in ratios["pretended"]}
    kinds = dict.fromkeys(points, "pretended")
    asked, apart, why = {r: rates[r] for r in ratios["shaped"]}, dict[str, Any](), None
    first = next(iter(points.values()))["arms"].values()
    message = int(min(row["bytes"] / row["calls"] for row in first if row["calls"]))
    try:
        if not by_port:
            raise NoLinks("pretended links were asked for")
        ports, off = on_shaped_links(world, asked, message, settled=settled)
        for ratio, part in off.items():
            say(f"ratio {ratio:g}: a cold message of {message} bytes is off by {part:+.1%}")
        points |= ports
        kinds |= dict.fromkeys(ports, "shaped")
        for ratio in {min(asked), max(asked)}:
            link = ports[ratio]["link"]
            alike = pretended(link["rate"], link["latency"])
            apart[str(ratio)] = _over(alike["arms"], ports[ratio]["arms"])
    except NoLinks as error:  # what failed on links that there are is no reason to pretend some
        why = str(error)
        say(f"links are pretended: {why}")
        points |= {ratio: pretended(rate) for ratio, rate in asked.items()}
        kinds |= dict.fromkeys(asked, "pretended")
    steps = {
        ratio: {label: row["step"] for label, row in point["arms"].items()}
        for ratio, point in points.items()
    }
    labels = [label for label in world.arms() if label not in ("none", "ddp", "dense_fp32")]
    settled()
    coded = at_ranks(f"{BENCH}:coding", world.ranks, {"arms": world.arms(), "model": world.model})
    return {
        "compute": compute,
        "coding": coded[0],
        "ratios": {
            str(ratio): {"link_is": kinds[ratio], "megabits": rates[ratio] * 8e-6, **points[ratio]}
            for ratio in sorted(points)
        },
        "not_shaped": why,
        "pretended_over_shaped": apart,
        "break_even": {label: break_even(steps, label) for label in labels},
    }


def _over(ours: Mapping[str, Row], theirs: Mapping[str, Row]) -> dict[str, float]:
    """Steps on a pretended link over those on a shaped one; DDP's is the dense one's."""
    found = {label: row["step"] / theirs[label]["step"] for label, row in ours.items()}
    return found | {"ddp": ours["dense_fp32"]["step"] / theirs["ddp"]["step"]}


def summed(worlds: Mapping[str, Row]) -> Row:
    """What the bars are asked of: the greatest step over its bound, by method, and the bytes.

    None: nothing of it was measured.
    """
    greatest: dict[str, float] = {}
    not_ledger, apart, over_ddp = [], 0.0, dict[str, float]()
    payload: list[float] = []
    over_acp: dict[str, float] = {}
    for world, found in worlds.items():
        for ratio, point in found["ratios"].items():
            arms = point["arms"]
            if "ddp" in arms:
                over_ddp[f"{world}, {ratio}"] = arms["dense_fp32"]["step"] / arms["ddp"]["step"]
            if "powersgd" in arms and arms["powersgd"]["wire"] >= FROM * point["none"]:
                over_acp[f"{world}, {ratio}"] = arms["powersgd"]["step"] / arms["acp_sgd"]["step"]
            payload += [abs(each - 1) for row in arms.values() if (each := row.get(PAYLOAD))]
            for label, row in point["arms"].items():
                greatest[label] = max(greatest.get(label, 0.0), row["over_bound"])
                if row["bytes_are_ledger"] is False:
                    not_ledger.append(f"{world}, ratio {ratio}, {label}")
        for rows in found.get("pretended_over_shaped", {}).values():
            apart = max([apart, *(abs(each - 1) for each in rows.values())])
    return {
        "greatest_over_bound": greatest,
        "within_bar": {label: most <= BAR for label, most in greatest.items()},
        "bytes_other_than_the_ledger": not_ledger,
        "other_than_the_ledger": len(not_ledger),
        "dense_over_ddp": over_ddp,
        "dense_is_as_fast_as_ddp": max(over_ddp.values()) <= OVER_DDP if over_ddp else None,
        "powersgd_over_acp_sgd": over_acp,
        "acp_sgd_is_faster": min(over_acp.values()) >= POWERSGD_OVER_ACP if over_acp else None,
        "greatest_payload_off_bytes": max(payload, default=None),
        "device_counts_the_bytes": max(payload) <= DEVICE_OFF if payload else None,
        "pretended_off_shaped": apart or None,
        "pretended_is_shaped": apart <= APART if apart else None,
    }


def main() -> None:
    """Measure every world, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small; writes no result")
    parser.add_argument("--shaped", action="store_true", help="shape links in a quick run, too")
    parser.add_argument(
        "--worlds",
        nargs="+",
        choices=WORLDS,
        default=WORLDS,
        help="these alone; others stay as the result has them",
    )
    given = parser.parse_args()
    by_port = given.shaped or not given.quick
    settled = partial(quiet, refuses=not given.quick)
    few = {"pretended": (0.3,), "shaped": (3.0,)}
    every = {"pretended": VIRTUAL_RATIOS, "shaped": RATIOS}
    if given.quick:
        measured = {
            "sleeping": lambda: curve(QUICK, few, by_port, settled),
            "trainer": lambda: in_the_trainer(QUICK_RUN, 8, {"shaped": (3.0,)}, by_port, settled),
        }
    else:
        measured = {
            "sleeping": lambda: curve(SLEEPING, every, by_port, settled),
            "computing": lambda: curve(COMPUTING, every, by_port, settled),
            "trainer": lambda: in_the_trainer(FULL_RUN, 14, every, by_port, settled),
        }
    settings = {"sleeping": vars(SLEEPING), "computing": vars(COMPUTING), "run": FULL_RUN}
    worlds: dict[str, Row] = {}
    if not given.quick and tuple(given.worlds) != WORLDS and RESULT.exists():
        worlds = json.loads(RESULT.read_text(encoding="utf-8"))["worlds"]
    with alone():
        for name in (world for world in measured if world in given.worlds):
            started = datetime.now(UTC).isoformat(timespec="seconds")
            machine = this_machine(torch.device("cpu")).as_json()
            worlds[name] = measured[name]() | {"when": started, "machine": machine}
            if not given.quick:  # what has ended stays, should a later world fail
                complete = {"complete": set(worlds) == set(WORLDS)}
                write_result("comm", {"worlds": worlds, **summed(worlds), **complete}, settings)
    figures = {"worlds": worlds} if given.quick else {}
    print(json.dumps(figures | summed(worlds), indent=2))


if __name__ == "__main__":
    main()
