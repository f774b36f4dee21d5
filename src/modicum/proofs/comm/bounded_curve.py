"""Steps under exchanges at ratios of communication to computing, held against their bounds.

The ratio is that of the time of a dense all-reduce in fp32 to that of a pass. Links are shaped
(`modicum.proofs.comm.links`), or pretended where these cannot be made, and where a link would be so
fast that its shape costs more than it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from modicum.proofs.base import ProofRun
from modicum.proofs.bench.quiet import quiet
from modicum.proofs.comm.links import NoLinks, burst_for, in_tc, shaped, tried_link
from modicum.proofs.comm.step_bounds import StepRow, World, WorldArms, break_even, judged_all
from modicum.proofs.ranks import at_ranks

BENCH = "modicum.proofs.comm.curve_bench:curve"
BAR = 1.25
# Layers that sleep take no core from the library that moves bytes.
SLEEPING = World(ranks=4, layers=16, width=512, compute=1.0)
RATIOS, VIRTUAL_RATIOS = (1.0, 3.0, 10.0), (0.3,)
DENSE = "dense_fp32"


def on_a_pretended_link(
    world: World,
    rate: float,
    latency: float = 0.0,
    labels: Sequence[str] = (),
    *,
    settled: Callable[[], float] = quiet,
) -> StepRow:
    """The arms of a world, or those of `labels`, on a pretended link, which holds up no DDP.

    Args:
        settled: waits until nothing else runs here, and gives the `load` of the result.
    """
    arms = {label: arm for label, arm in _chosen(world, labels).items() if label != "ddp"}
    task = _task(world, arms) | {"rate": rate, "latency": latency}
    load = settled()
    found: StepRow = at_ranks(BENCH, world.ranks, task, seconds=7200)[0]
    return judged_all(world, found) | {"load": load}


def on_shaped_links(
    world: World,
    rates: Mapping[float, float],
    message: int,
    labels: Sequence[str] = (),
    *,
    settled: Callable[[], float] = quiet,
) -> tuple[dict[float, StepRow], dict[float, float]]:
    """The arms of a world, or those of `labels`, on shaped links, each checked before its series.

    Args:
        rates: bytes a second, by the ratio for which they stand.
        message: bytes of the smallest call, a cold one of which must take the time of its bytes.
        settled: waits until nothing else runs here, and gives the `load` of a result.

    Returns:
        What was found at each ratio, and by how much a cold message was off there.

    Raises:
        NoLinks: links cannot be shaped here.
        InputError: they are not what they should be, or a rank failed.
    """
    for rate in rates.values():
        burst_for(rate, message)  # what cannot be had is said before anything is timed
    found, off = dict[float, StepRow](), dict[float, float]()
    task = _task(world, _chosen(world, labels))
    for ratio, rate in rates.items():
        load = settled()
        burst, off[ratio] = tried_link(world.ranks, rate, message)
        [each] = shaped(world.ranks, [in_tc(rate)], BENCH, [task], bursts=[burst], seconds=7200)
        found[ratio] = judged_all(world, each) | {"load": load}
    return found, off


def over_its_bound(
    run: ProofRun,
    label: str,
    *,
    null: str,
    null_is: str,
    rivals: Sequence[str] = (),
    world: World = SLEEPING,
) -> dict[float, StepRow]:
    """Hold steps under an exchange against their bound at each ratio, and say where it pays.

    Args:
        label: the arm of the world.
        null: the arm whose steps are held against this one's bound in a null run.
        rivals: arms that are timed as well.

    Returns:
        What `judged_all` found at each ratio, and whether the link was `pretended`.

    Raises:
        InputError: a link that was made is not what it should be, or a rank failed on it.
    """
    tells = run.contender(label, null=null, null_is=null_is)
    labels = list(dict.fromkeys(("none", DENSE, label, tells, *rivals)))
    run.progress(f"steps at ratios of {VIRTUAL_RATIOS[0]:g} to {RATIOS[-1]:g}")
    points = _points(run, world, labels)
    for ratio, point in points.items():
        arms = point["arms"]
        over = arms[tells]["step"] / arms[label]["bound"]
        run.at_most(f"{at_ratio(ratio, point)}: a step over its bound", over, BAR, part="check")
        run.figure(
            f"{at_ratio(ratio, point)}: seconds of a step, next to dense sums",
            method=arms[tells]["step"],
            baseline=arms[DENSE]["step"],
        )
    steps = {r: {k: row["step"] for k, row in point["arms"].items()} for r, point in points.items()}
    if tells != DENSE and (pays := break_even(steps, tells)["exact"]) is not None:
        greatest = max(points)
        run.figure("ratio from which a step is shorter", method=pays, baseline=greatest)
    return points


def at_ratio(ratio: float, point: StepRow) -> str:
    """How a criterion says at which ratio it is, and on what kind of link."""
    kind = " (pretended link)" if point["pretended"] else ""
    return f"communication {ratio:g} times computing{kind}"


def _points(run: ProofRun, world: World, labels: Sequence[str]) -> dict[float, StepRow]:
    """What was found at each ratio, and whether its link was `pretended`."""
    rates = {ratio: world.rate(ratio) for ratio in (*VIRTUAL_RATIOS, *RATIOS)}

    def pretended(ratio: float) -> StepRow:
        return on_a_pretended_link(world, rates[ratio], labels=labels, settled=run.quiet)

    found = {ratio: pretended(ratio) for ratio in VIRTUAL_RATIOS}
    rows = next(iter(found.values()))["arms"].values()
    message = int(min(row["bytes"] / row["calls"] for row in rows if row["calls"]))
    asked = {ratio: rates[ratio] for ratio in RATIOS}
    try:
        shaped_ones = on_shaped_links(world, asked, message, labels, settled=run.quiet)[0]
    except NoLinks:
        shaped_ones = {}
        found |= {ratio: pretended(ratio) for ratio in asked}
    made = {ratio: {**point, "pretended": False} for ratio, point in shaped_ones.items()}
    return {ratio: {**point, "pretended": True} for ratio, point in found.items()} | made


def _chosen(world: World, labels: Sequence[str]) -> WorldArms:
    return {label: arm for label, arm in world.arms().items() if not labels or label in labels}


def _task(world: World, arms: WorldArms) -> dict[str, Any]:
    return {"arms": arms, "model": world.model, "steps": world.steps, "repeats": world.repeats}
