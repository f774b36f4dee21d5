"""A step of every optimizer next to those of peers, at the shapes of a decoder of 30 M parameters.

Ours and those of peers take turns on the same weights and gradients, in fp32, at equal settings
where the peer has them; `over_fastest` is the ratio to the peer that is fastest, of the same round.
Bases and factors that are refreshed seldom are made in the first, untimed step. Next to the seconds
stand bytes of state, which are to be those of the ledger and no more than a peer's (but for a few
numbers, such as counts of steps), the scratch memory of a step against the ledger's, and Newton and
Schulz's steps by the rate of their products over that of the machine. What goes over the wire is
counted in tests of two ranks, not here.

MKOR is no optimizer but stands before one: what it adds to a step is measured next to kfac-pytorch,
see `optimizers_passes.py`.

Methods can be run apart: what was measured at the same settings before is kept.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from math import exp, log
from statistics import fmean
from typing import Any

import torch
from common import RESULTS, alone, interleaved, paired_ratio, say, spread, write_result
from optimizers_contenders import CONTESTS, FULL, TINY, Contest, Stepping, Subject, ours
from optimizers_passes import passes

from modicum.core.machine.memory import TensorMeter
from modicum.optim.orthogonal import NewtonSchulz

MEAN_BAR, PASS_BAR, PRODUCTS_BAR, SCALARS = 1.0, 1.1, 0.7, 4096
WIDTHS = (512, 1024, 2048)


def contest(name: str, rules: Contest, sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Seconds, bytes of state and scratch memory of a method and of those who do the same."""
    subject = Subject(sizes)
    own, said = ours(name, rules, subject)
    started: dict[str, Stepping] = {}
    absent = dict(rules.not_run)
    for label, make in rules.peers.items():
        try:
            peer = make(subject)
            subject.refresh()
            peer.step()
        except Exception as error:  # a peer may fail in any way, and says how
            absent[label] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        else:
            started[label] = peer
    runs = {label: subject.stepper(each.step) for label, each in {"ours": own, **started}.items()}
    seconds = interleaved(runs, rounds=rounds)
    subject.refresh()
    with TensorMeter("cpu") as meter:
        own.step()
    row: dict[str, Any] = {
        "seconds": {label: spread(values) for label, values in seconds.items()},
        "state": {label: each.state_bytes for label, each in {"ours": own, **started}.items()},
        "ledger": said,
        "scratch": meter.peak or 0,
        "not_run_here": absent,
    }
    if started:
        fastest = min(started, key=lambda label: row["seconds"][label]["median"])
        row["fastest"] = fastest
        row["over_fastest"] = paired_ratio(seconds["ours"], seconds[fastest])
    return row


def products(widths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """The rate of Newton and Schulz's products over that of one product of the same width."""
    found = {}
    for width in widths:
        generator = torch.Generator().manual_seed(width)
        one, other = (torch.randn(width, width, generator=generator) for _ in range(2))
        runs: dict[str, Callable[[], float]] = {
            "steps": lambda x=one: _seconds(lambda: NewtonSchulz()(x)),  # type: ignore[misc]
            "product": lambda x=one, y=other: _seconds(lambda: x @ y),  # type: ignore[misc]
        }
        seconds = interleaved(runs, rounds=rounds)
        work = NewtonSchulz().flops((width, width)) / (2 * width**3)
        shares = [work * p / s for p, s in zip(seconds["product"], seconds["steps"], strict=True)]
        found[str(width)] = {"share": spread(shares), "seconds": spread(seconds["steps"])}
    return found


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its figure, and whether it holds."""
    rows = []

    def bar(what: str, figure: float, holds: bool, **bars: float) -> None:
        rows.append({"what": what, "figure": figure, **bars, "holds": holds})

    ratios = []
    for name, row in figures.get("methods", {}).items():
        if "over_fastest" in row:
            ratio, most = row["over_fastest"]["median"], CONTESTS[name].most
            ratios.append(ratio)
            bar(f"{name}: step over {row['fastest']}'s", ratio, ratio <= most, at_most=most)
        if name == "distzo2" or "ours" not in row["state"]:
            continue
        state, said = row["state"]["ours"], row["ledger"]["state"]
        bar(f"{name}: bytes of state, as the ledger says", state, state == said, exactly=said)
        if theirs := [size for label, size in row["state"].items() if label != "ours"]:
            most = min(theirs) + SCALARS
            bar(f"{name}: bytes of state, of peers", state, state <= most, at_most=most)
        scratch, room = row["scratch"], row["ledger"]["scratch"] + SCALARS
        bar(f"{name}: scratch of a step", scratch, scratch <= room, at_most=room)
    if ratios:
        mean = exp(fmean(map(log, ratios)))
        bar("geometric mean of steps over peers'", mean, mean <= MEAN_BAR, at_most=MEAN_BAR)
    if "over_fastest" in (row := figures.get("passes", {})):
        ratio = row["over_fastest"]["median"]
        bar(f"mkor: pass over {row['fastest']}'s", ratio, ratio <= PASS_BAR, at_most=PASS_BAR)
        state, theirs = row["state"]["ours"], row["state"][row["fastest"]]
        bar("mkor: bytes of state, of peers", state, state <= theirs, at_most=theirs)
    for width, row in figures.get("products", {}).items():
        share = row["share"]["median"]
        what = f"Newton-Schulz at width {width}, of the machine's rate"
        bar(what, share, share >= PRODUCTS_BAR, at_least=PRODUCTS_BAR)
    return rows


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs of the same settings measured."""
    path = RESULTS / "optimizers.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    same = known["settings"] == settings
    parts = ("methods", "products", "passes")
    return {part: known[part] for part in parts if part in known} if same else {}


def main() -> None:
    """Measure what is asked for, say how it stands to its bars, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; keeps no result")
    parser.add_argument("--methods", nargs="*", choices=CONTESTS, default=list(CONTESTS))
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")  # of peers, about themselves
    sizes = TINY if arguments.quick else FULL
    threads = torch.get_num_threads()
    settings = {**sizes, "rounds": arguments.rounds, "threads": threads, "dtype": "float32"}
    figures: dict[str, Any] = {} if arguments.quick else kept(settings)
    figures.setdefault("methods", {})
    with alone():
        for name in arguments.methods:
            row = contest(name, CONTESTS[name], sizes, arguments.rounds)
            figures["methods"][name] = row
            times = {k: f"{1e3 * v['median']:.1f} ms" for k, v in row["seconds"].items()}
            say(f"{name}: {times}; not run here: {row['not_run_here'] or 'none'}")
            if not arguments.quick:
                write_result("optimizers", figures | {"bars": bars(figures)}, settings)
        widths = (64,) if arguments.quick else WIDTHS
        figures["products"] = products(widths, arguments.rounds)
        figures["passes"] = row = passes(sizes, min(3, arguments.rounds))
        added = {k: f"{1e3 * v['median']:.1f} ms" for k, v in row["seconds"].items()}
        say(f"mkor: {added} added to a step; not run here: {row['not_run_here'] or 'none'}")
    figures["bars"] = bars(figures)
    for row in figures["bars"]:
        sign = "holds" if row["holds"] else "FALLS"
        say(f"{sign}  {row['what']}: {row['figure']:.4g} {[*row.items()][2]}")
    figures["all_hold"] = all(row["holds"] for row in figures["bars"])
    if arguments.quick:
        print(json.dumps(figures, indent=2))
    else:
        write_result("optimizers", figures, settings)


if __name__ == "__main__":
    main()
