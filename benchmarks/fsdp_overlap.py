"""What FSDP2's step on a CPU takes where its gathers and sums travel while blocks compute.

Two ranks on this machine train one small decoder over a pretended link (bytes wait, and cost no
core), in turns: waiting for each gather and sum where FSDP2 asks for it, as it does by itself on a
CPU, and as modicum has them.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any
from unittest import mock

from common import HERE, alone, paired_ratio, say, spread, write_result

SIZE = {"blocks": 6, "width": 384, "length": 128, "rows": 2, "steps": 2, "rounds": 7}
RATES = [20e6, 60e6, 200e6]  # bytes a second
ARMS = ("waits", "travels")


def timed(ranks: Any, rate: float, size: dict[str, int]) -> dict[str, list[float]]:
    """Seconds of an update in each round, by how gathers and sums travel."""
    import torch

    from modicum.core.ranks.pretended_link import Link, pretending
    from modicum.data.batch import Batch
    from modicum.models.config import ModelConfig
    from modicum.models.llama import Llama
    from modicum.tasks import CausalLM

    torch.set_num_threads(1)
    config = ModelConfig(
        vocabulary_size=512,
        width=size["width"],
        layers=size["blocks"],
        heads=size["width"] // 64,
    )
    ids = torch.randint(0, 512, (size["rows"], size["length"] + 1))
    batch, task = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()), CausalLM()

    def made(arm: str) -> Any:
        model = Llama(config)
        model.initialise(0)
        return model, _strategy(ranks, model, arm)

    with pretending(Link(rate=rate)):  # engines are made when they are first used
        runs = {arm: made(arm) for arm in ARMS}
        return _in_turns(ranks, runs, lambda model: task.loss_sum(model, batch) / batch.count, size)


def _in_turns(ranks: Any, runs: Any, loss: Any, size: dict[str, int]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(1 + size["rounds"]):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            model, strategy = runs[arm]
            ranks.sum(0.0)
            started = time.perf_counter()
            for _ in range(size["steps"]):
                value = loss(model)
                strategy.before_backward(last=True)
                value.backward()
                strategy.after_backward()
                model.zero_grad(set_to_none=True)
            seconds = (time.perf_counter() - started) / size["steps"]
            if number:
                found[arm].append(ranks.max(seconds)[0])
    return found


def _strategy(ranks: Any, model: Any, arm: str) -> Any:
    """FSDP2 on the engines; waiting is what it does by itself on a CPU."""
    import torch

    from modicum.core.ranks.layout import Layout
    from modicum.core.torch_private import gather_early
    from modicum.parallel import fsdp_wires
    from modicum.parallel.sharded import Sharded

    strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size))
    early = (lambda module: False) if arm == "waits" else gather_early
    with mock.patch.object(fsdp_wires, "gather_early", early):
        strategy.cut(model, model.model.layers, torch.device("cpu"))
    strategy.start(model)
    if arm == "waits":
        strategy.when_ready(model, lambda parameter: None)  # sums are then waited for
    return strategy


def main() -> None:
    """Time it, and write the result."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    from modicum.proofs.ranks import at_ranks

    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    rows = []
    with alone():
        for rate in RATES:
            found = at_ranks("fsdp_overlap:timed", 2, {"rate": rate, "size": SIZE})[0]
            ratio = paired_ratio(found["travels"], found["waits"])
            waits, travels = spread(found["waits"]), spread(found["travels"])
            say(
                f"{rate / 1e6:.0f} MB/s: {waits['median']:.3f} s where it waits, "
                f"{travels['median']:.3f} s where it travels ({ratio['median']:.2f})"
            )
            rows.append({"rate": rate, "waits": waits, "travels": travels, "ratio": ratio})
    write_result("fsdp_overlap", {"rows": rows}, SIZE)


if __name__ == "__main__":
    main()
