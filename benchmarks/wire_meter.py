"""What it costs to note each call of a run: interleaved blocks of updates with and without it.

Two ranks train a stack of linear layers on replicas: in buckets of a recipe's size, and in buckets
of one layer, so that an update has many calls. Rank 0 keeps and writes them as a run does
(`modicum.trainer.wire_account`).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from common import HERE, alone, paired_ratio, quiet, say, spread, write_result

SIZE = {"layers": 24, "width": 768, "rows": 64, "block": 4, "blocks": 60}
BUCKETS = {"a recipe's": None, "of one layer": 4 * 768 * 768}


def timed(
    ranks: Any, layers: int, width: int, rows: int, block: int, blocks: int, bucket: int
) -> Any:
    """Seconds of an update in each block, with and without notes, and the calls of an update."""
    import torch
    from torch import nn

    from modicum.core.ranks.layout import Layout
    from modicum.parallel.replicated import Replicated
    from modicum.trainer.folder import WIRE, RunFolder
    from modicum.trainer.wire_account import WireAccount

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    strategy = Replicated(ranks, Layout.of(ranks.size), bucket)
    strategy.start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, step = torch.randn(rows, width), 0

    def update() -> None:
        strategy.before_backward(last=True)
        model(x).square().mean().backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad(set_to_none=True)

    found: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        for number in range(1 + blocks):
            order = ("with", "without") if number % 2 else ("without", "with")
            for label in order:
                account = WireAccount(folder, ranks)
                with account if label == "with" else nullcontext():
                    ranks.sum(0.0)
                    started = time.perf_counter()
                    for _ in range(block):
                        step += 1
                        with account.update(step):
                            update()
                        account.write()
                    seconds = (time.perf_counter() - started) / block
                if number:
                    found[label].append(seconds)
        rows_kept = folder.rows(WIRE)
    calls = rows_kept[-1]["calls"] if rows_kept else []
    return {"seconds": found, "calls": len(calls)}


def main() -> None:
    """Time it, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from modicum.proofs.ranks import at_ranks
    from modicum.recipe.sections import ParallelSection

    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    figures = {}
    with alone():
        for name, bucket in BUCKETS.items():
            size = {**SIZE, "bucket": bucket or ParallelSection().bucket}
            load = quiet()
            found = at_ranks("wire_meter:timed", 2, size)[0]
            ratio = paired_ratio(found["seconds"]["with"], found["seconds"]["without"])
            plain = spread(found["seconds"]["without"])
            cost = ratio["median"] - 1
            update = f"{plain['median'] * 1e3:.1f} ms an update of {found['calls']} calls"
            say(f"buckets {name}: {update}; noting them costs {cost:+.2%}")
            figures[f"buckets {name}"] = {
                "cost": cost,
                "load": load,
                "ratio": ratio,
                "seconds_without": plain,
                "seconds_with": spread(found["seconds"]["with"]),
                "calls_an_update": found["calls"],
            }
    write_result("wire_meter", figures, SIZE)


if __name__ == "__main__":
    main()
