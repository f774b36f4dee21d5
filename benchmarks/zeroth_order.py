"""What DistZO2 learns, holds and takes: the figures of its specification, each with its bar.

Learning, the peak of memory and the blocks on the device are those of its proof, which runs here in
full. What it takes is measured in a decoder at 1,024 tokens an update, on one thread, everything in
turns in one run: an update without its forward passes, which is the draws, next to two forward
passes; an update with blocks that come over a pretended link of several rates, next to the same
update with all blocks on the device; and an update of two processes of one thread each, which share
the points or the rows, next to that of one of them alone. Half of an update that a process makes
while the other makes one of its own, and they share nothing, is the least that two can take here.

Parts can be run apart: what was measured at the same settings before is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import RESULTS, alone, interleaved, paired_ratio, say, spread, write_result
from torch import Tensor, nn

from modicum.core.ranks.ranks import joined
from modicum.core.streaming import PretendedLink
from modicum.models import ModelConfig, create
from modicum.optim.streamed_two_point import StreamedTwoPoint, blocks_of_model
from modicum.optim.two_point import TwoPoint

FULL: dict[str, Any] = {
    "width": 512,
    "layers": 8,
    "heads": 8,
    "mlp_width": 1376,
    "vocabulary_size": 2048,
}
TINY: dict[str, Any] = {
    "width": 64,
    "layers": 4,
    "heads": 2,
    "mlp_width": 160,
    "vocabulary_size": 64,
}
PARTS = ("learning", "draws", "streaming", "ranks")
ROWS, LENGTH, RATE = 4, 256, 1e-6
TRANSFERS = (0.5, 1.0, 2.0)  # of blocks over the pretended link, in the time of an update's compute
DRAWS_BAR, STREAMED_BAR, RESIDENT_BAR, RANKS_BAR = 0.5, 1.15, 3, 0.6


class Task:
    """A decoder, rows of random symbols, and updates that are numbered on."""

    def __init__(self, sizes: dict[str, Any], rows: slice = slice(None)) -> None:
        self.model = create(ModelConfig(context=LENGTH, **sizes), seed=0).requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        shape = (ROWS, LENGTH + 1)
        self.rows = torch.randint(sizes["vocabulary_size"], shape, generator=generator)[rows]
        self.step = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained ones, by name."""
        return dict(self.model.named_parameters())

    def loss(self) -> float:
        """The mean loss of the rows."""
        found: Tensor = self.model(self.rows[:, :-1]).flatten(0, 1)
        return F.cross_entropy(found, self.rows[:, 1:].flatten()).item()

    def update(self, training: TwoPoint, loss: Callable[[], float], **options: Any) -> float:
        """Seconds of one more update."""
        self.step += 1
        return seconds_of(lambda: training.update(self.step, RATE, loss, **options))


def seconds_of(work: Callable[[], object]) -> float:
    """How long it takes, without gradients."""
    begun = time.perf_counter()
    with torch.no_grad():
        work()
    return time.perf_counter() - begun


def learning(*, full: bool) -> list[dict[str, Any]]:
    """The claims of the proof: what is learned, the peak of memory, blocks on the device."""
    from modicum.proofs import prove

    proof = prove("distzo2", full=full)
    return [
        {"what": one.sentence, "figure": one.figure, one.relation.replace(" ", "_"): one.bar}
        for one in proof.criteria
        if one.part == "claim"
    ]


def draws(sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """An update but for its forward passes, over two of these, by kind of draw."""
    task = Task(sizes)
    runs: dict[str, Callable[[], float]] = {
        "two forward passes": lambda: seconds_of(lambda: (task.loss(), task.loss()))
    }
    kinds: tuple[Any, ...] = ("normal", "rademacher")
    for kind in kinds:
        training = TwoPoint(task.parameters, seed=0, draw=kind)
        runs[kind] = partial(task.update, training, lambda: 0.0)
    seconds = interleaved(runs, rounds=rounds)
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "over_forward": {n: paired_ratio(seconds[n], seconds["two forward passes"]) for n in kinds},
    }


def streaming(sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """An update with blocks on their way over the longer of its transfer and its compute."""
    still = Task(sizes)
    resident = TwoPoint(still.parameters, seed=0, snapshot=True)
    runs = {"on the device": partial(still.update, resident, still.loss)}
    compute = min(runs["on the device"]() for _ in range(3))
    streamed: dict[float, StreamedTwoPoint] = {}
    transfers: dict[float, float] = {}
    for share in TRANSFERS:
        task, transfers[share] = Task(sizes), share * compute
        blocks = blocks_of_model(task.model)
        size = sum(p.numel() * p.element_size() for b in blocks for p in b.parameters())
        link = PretendedLink(2 * size / transfers[share])  # up twice an update, and home once
        training = StreamedTwoPoint(task.parameters, model=task.model, seed=0, link=link)
        streamed[share] = training
        runs[f"transfer {share:g}"] = partial(_second, task, training)
    try:
        seconds = interleaved(runs, rounds=rounds)
    finally:
        for training in streamed.values():
            training.close()
    found: dict[str, Any] = {"on_the_device": spread(seconds["on the device"]), "links": {}}
    for share, training in streamed.items():
        own = seconds[f"transfer {share:g}"]
        longer = [max(transfers[share], other) for other in seconds["on the device"]]
        found["links"][f"{share:g}"] = {
            "transfer": transfers[share],
            "seconds": spread(own),
            "over_longer": paired_ratio(own, longer),
            "blocks_on_the_device": training.streamer.most_resident,
        }
    return found


def _second(task: Task, training: TwoPoint) -> float:
    """Seconds of the second of two updates, whose first block came up as in a long run."""
    task.update(training, task.loss)
    return task.update(training, task.loss)


def ranks(sizes: dict[str, Any], rounds: int) -> dict[str, Any]:
    """An update of two processes over that of one alone, all of one thread."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    place |= {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        __file__,
        "--rank-of",
        json.dumps({"sizes": sizes, "rounds": rounds}),
    ]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank ended with an error")
    seconds: dict[str, list[float]] = json.loads(printed[0])
    alone_one = seconds["alone"]
    halves = [both / 2 for both in seconds["both"]]
    return {
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "over_one": {n: paired_ratio(seconds[n], alone_one) for n in ("points", "rows")},
        "halves_of_two_alone": paired_ratio(halves, alone_one),
    }


def of_rank(sizes: dict[str, Any], rounds: int) -> None:
    """One of two processes: what rank 0 takes, alone and together with the other."""
    with joined() as group:
        share = ROWS // group.size
        full, part = Task(sizes), Task(sizes, slice(share * group.rank, share * (group.rank + 1)))
        options: dict[str, Any] = {"totals": group.sum}

        def together(
            task: Task, training: TwoPoint, loss: Callable[[], float], **own: Any
        ) -> float:
            group.sum(0.0)  # both begin at once
            return task.update(training, loss, **options, **own)

        def by_itself(training: TwoPoint) -> float:
            group.sum(0.0)
            return full.update(training, full.loss) if group.first else 0.0

        def beside_the_other(training: TwoPoint) -> float:
            group.sum(0.0)
            return full.update(training, full.loss)

        def one_of(task: Task) -> TwoPoint:
            return TwoPoint(task.parameters, seed=0)

        points = (group.rank, group.size)
        runs = {
            "alone": partial(by_itself, one_of(full)),
            "both": partial(beside_the_other, one_of(full)),
            "points": partial(together, full, one_of(full), full.loss, share=points),
            "rows": partial(together, part, one_of(part), lambda: part.loss() / group.size),
        }
        print(json.dumps(interleaved(runs, rounds=rounds)), flush=True)


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar with its figure, and whether it holds."""
    rows = list(figures.get("learning", []))

    def at_most(what: str, figure: float, bar: float) -> None:
        rows.append({"what": what, "figure": figure, "at_most": bar})

    for kind, ratio in figures.get("draws", {}).get("over_forward", {}).items():
        at_most(f"{kind} draws over two forward passes", ratio["median"], DRAWS_BAR)
    for share, link in figures.get("streaming", {}).get("links", {}).items():
        what = f"streamed over the longer, transfer of {share} of compute"
        at_most(what, link["over_longer"]["median"], STREAMED_BAR)
        at_most(f"blocks at once, transfer of {share}", link["blocks_on_the_device"], RESIDENT_BAR)
    for what, ratio in figures.get("ranks", {}).get("over_one", {}).items():
        at_most(f"two ranks that share {what} over one", ratio["median"], RANKS_BAR)
    return [row | {"holds": _holds(row)} for row in rows]


def _holds(row: dict[str, Any]) -> bool:
    figure: float = row["figure"]
    most: float = row.get("at_most", figure)
    least: float = row.get("at_least", figure)
    return least <= figure <= most


def kept(settings: dict[str, Any]) -> dict[str, Any]:
    """What earlier runs of the same settings measured."""
    path = RESULTS / "zeroth_order.json"
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    same = known["settings"] == settings
    return {part: known[part] for part in PARTS if part in known} if same else {}


def main() -> None:
    """Measure what is asked for, say how it stands to its bars, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model; keeps no result")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank_of:
        of_rank(**json.loads(arguments.rank_of))
        return
    sizes = TINY if arguments.quick else FULL
    settings = {**sizes, "rows": ROWS, "length": LENGTH, "rounds": arguments.rounds, "threads": 1}
    figures: dict[str, Any] = {} if arguments.quick else kept(settings)
    measures: dict[str, Callable[[], Any]] = {
        "learning": lambda: learning(full=not arguments.quick),
        "draws": lambda: draws(sizes, arguments.rounds),
        "streaming": lambda: streaming(sizes, arguments.rounds),
        "ranks": lambda: ranks(sizes, arguments.rounds),
    }
    with alone():
        for part in arguments.parts:
            say(part)
            figures[part] = measures[part]()
    figures["bars"] = bars(figures)
    for row in figures["bars"]:
        bar = f"at most {row['at_most']}" if "at_most" in row else f"at least {row['at_least']}"
        say(f"{'holds' if row['holds'] else 'FALLS'}  {row['what']}: {row['figure']:.3f} ({bar})")
    if (least := figures.get("ranks", {}).get("halves_of_two_alone")) is not None:
        say(f"       the least that two ranks can take here: {least['median']:.3f}")
    figures["all_hold"] = all(row["holds"] for row in figures["bars"])
    if arguments.quick:
        print(json.dumps(figures, indent=2))
    else:
        write_result("zeroth_order", figures, settings)


if __name__ == "__main__":
    main()
