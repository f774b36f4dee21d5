"""What FSDP2's step on a CPU takes where its gathers and sums travel while blocks compute.

Two ranks on this machine train one small decoder over a pretended link (bytes wait, and cost no
core), in turns: waiting for each gather and sum where FSDP2 asks for it, as it does by itself on a
CPU, and as modicum has them. Next to it stands what a plan would say: of a step on this machine's
own link, which takes next to nothing, and of what travels.
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
ARMS = ("waits", "travels", "no link")


def timed(ranks: Any, rate: float, size: dict[str, int]) -> dict[str, Any]:
    """Seconds of an update in each round, by how gathers and sums travel; what travels in one."""
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

    runs, links = {arm: made(arm) for arm in ARMS}, {arm: Link(rate=rate) for arm in ARMS[:2]}
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for number in range(1 + size["rounds"]):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            model, strategy = runs[arm]
            for engine in strategy.engines:
                engine.meter.clear()
            ranks.sum(0.0)
            started = time.perf_counter()
            with pretending(links.get(arm)):  # engines are made when they are first used
                for _ in range(size["steps"]):
                    _update(model, strategy, task.loss_sum(model, batch) / batch.count)
            seconds = (time.perf_counter() - started) / size["steps"]
            if number:
                found[arm].append(ranks.max(seconds)[0])
    meters = [engine.meter for engine in runs["travels"][1].engines]
    sent = {
        name: [sum(each[name] for each in counts) // size["steps"] for counts in
               ([m.bytes for m in meters], [m.calls for m in meters])]
        for name in ("all_gather", "reduce_scatter")
    }  # fmt: skip
    return {"seconds": found, "sent": sent}


def _update(model: Any, strategy: Any, loss: Any) -> None:
    strategy.before_backward(last=True)
    loss.backward()
    strategy.after_backward()
    model.zero_grad(set_to_none=True)


def foretold(compute: float, sent: dict[str, list[int]], rate: float) -> float:
    """Seconds of an update, as a plan says them that knows what it takes where nothing travels."""
    from modicum.core.contracts.ledger import Wire
    from modicum.core.machine.links import MeasuredLink
    from modicum.core.ranks.layout import Layout
    from modicum.planner.wire_time import WireQuery, wire_time

    wires = tuple(Wire(name, size, "shard", calls) for name, (size, calls) in sent.items())
    at = WireQuery(wires, Layout.of(2, 2), compute)
    return compute + wire_time(at, MeasuredLink(0.0, rate)).waited


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
            answer = at_ranks("fsdp_overlap:timed", 2, {"rate": rate, "size": SIZE})[0]
            found, sent = answer["seconds"], answer["sent"]
            ratio = paired_ratio(found["travels"], found["waits"])
            waits, travels, free = (spread(found[arm]) for arm in ARMS)
            forecast = foretold(free["median"], sent, rate)
            error = forecast / travels["median"] - 1
            say(
                f"{rate / 1e6:.0f} MB/s: {waits['median']:.3f} s where it waits, "
                f"{travels['median']:.3f} s where it travels ({ratio['median']:.2f}), "
                f"{forecast:.3f} s foretold ({error:+.0%})"
            )
            row = {"rate": rate, "waits": waits, "travels": travels, "ratio": ratio}
            rows.append({**row, "no_link": free, "sent": sent, "forecast": forecast,
                         "forecast_error": error})  # fmt: skip
    worst = max(abs(row["forecast_error"]) for row in rows)
    write_result("fsdp_overlap", {"rows": rows, "largest_forecast_error": worst}, SIZE)


if __name__ == "__main__":
    main()
