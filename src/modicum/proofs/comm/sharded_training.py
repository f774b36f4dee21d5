"""A bench for exchanges of sharded data parallelism: a small decoder, and layers that sleep.

What is here runs at ranks that a proof has started.

The decoder learns a source of permutations, whose entropy is known. Copies are bfloat16 and masters
fp32, as in the paper.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.comm.sdp4bit import SDP4Bit, SDP4BitExchange
from modicum.core.codecs.elements import Stream
from modicum.core.random import derive_seed
from modicum.core.ranks.exchange import NODE, SHARD, ExchangeContext, Pending, ShardExchange
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.models import ModelConfig, create
from modicum.parallel.zero import Zero
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.bench.permutations import MODES, PermutationSource
from modicum.proofs.bench.training import RateSchedule, train
from modicum.proofs.comm.links import sent as sent_by_device
from modicum.proofs.comm.step_time_bench import Fields

SCHEDULE = RateSchedule(20, "line", last=0.05)


class Direct(SDP4BitExchange):
    """Weights are quantized themselves, not their differences, as QSDP does."""

    def __init__(self, method: SDP4Bit, context: ExchangeContext) -> None:
        super().__init__(method, context)
        self.incremental = False

    def refresh(self, copy: Tensor, shard: Tensor, name: str) -> Pending:
        """Every rank's copy becomes what was sent of the weights."""
        return super().refresh(copy.zero_(), shard, name)


def exchange_of(ranks: Ranks, arm: Fields, links: Mapping[str, Link] | None = None) -> Any:
    """The exchange of an arm: SDP4Bit's fields, and `direct` for weights without differences."""
    fields = {key: value for key, value in arm.items() if key != "direct"}
    context = ExchangeContext(ranks, links=links or {})
    return (Direct if arm.get("direct") else SDP4BitExchange)(SDP4Bit(**fields), context)


def between_hosts(exchange: ShardExchange) -> int:
    """Bytes that leave a host: what each of its ranks sends to other hosts, and its part of rings.

    A ring around all ranks leaves every host once, from the last of its ranks.
    """
    sent = exchange.sent()
    rings = sum(count for (_, axis), count in sent.items() if axis == SHARD)
    return exchange.nodes.local * sent["all_to_all", NODE] + rings


@dataclass(frozen=True)
class ShardedSize:
    """How large the experiment is."""

    symbols: int = 24
    tokens: int = 16
    blocks: int = 1
    width: int = 64
    rows: int = 16
    steps: int = 120
    learning_rate: float = 3e-3

    @property
    def source(self) -> PermutationSource:
        """What the decoder learns."""
        return PermutationSource(self.symbols, self.tokens)


def trained(
    ranks: Ranks, *, arms: Mapping[str, Fields], size: Fields, seeds: list[int]
) -> dict[str, Any]:
    """Each arm's held-out loss by seed (nats a token), and bytes between hosts an update."""
    chosen = ShardedSize(**size)
    results: dict[str, Any] = {}
    for label, arm in arms.items():
        losses = [_train(ranks, arm, chosen, seed) for seed in seeds]
        results[label] = {
            "losses": [chosen.source.floor + excess for excess, _ in losses],
            "between_hosts": losses[0][1] / chosen.steps,
        }
    return results


def _train(ranks: Ranks, arm: Fields, size: ShardedSize, seed: int) -> tuple[float, int]:
    config = ModelConfig(
        vocabulary_size=size.symbols + MODES,
        width=size.width,
        layers=size.blocks,
        heads=max(2, size.width // 32),
        context=size.tokens,
    )
    model = create(config, seed=seed).bfloat16()
    source, table = size.source, size.source.table(seed)
    exchange = exchange_of(ranks, arm)
    strategy = Zero(ranks, exchange=exchange)
    strategy.start(model)
    masters = [master for _, master in strategy.trained(model)]
    optimizer = torch.optim.AdamW(masters, lr=size.learning_rate, weight_decay=0.0)
    generator = generator_of(f"training {ranks.rank}", seed)
    rows = size.rows // ranks.size

    def loss(step: int) -> Tensor:
        return source.loss(model, source.batch(table, generator, rows)) / ranks.size

    train([optimizer], loss, size.steps, schedule=SCHEDULE, clip=1.0, strategy=strategy)
    return source.excess(model, table), between_hosts(exchange)


def generator_of(name: str, seed: int) -> torch.Generator:
    """A generator of torch's that a seed and a name make."""
    return torch.Generator().manual_seed(derive_seed(seed, name))


def timed(
    ranks: Ranks,
    *,
    arms: Mapping[str, Fields],
    elements: int,
    compute: float,
    coded: Fields,
    rate: float = 0.0,
    steps: int = 4,
) -> dict[str, Any]:
    """Seconds of a step of each arm, interleaved, the fastest of each; and bytes that eth0 sent.

    Then what it takes to code and decode a million elements, at rank 0 while the others wait.

    Args:
        elements: of the one weight, whose computation is slept.
        compute: seconds of it.
        coded: fields of the method whose codes are timed.
        rate: bytes a second that a host sends over a pretended link; 0 for the link that is there.
    """
    ready: dict[str, tuple[Zero, nn.Linear, torch.optim.Optimizer]] = {}
    for label, arm in arms.items():
        model = nn.Linear(256, elements // 256, bias=False).bfloat16()
        local = int(arm["ranks_per_node"])
        links = {SHARD: Link(rate), NODE: Link(rate / local)} if rate else {}
        strategy = Zero(ranks, exchange=exchange_of(ranks, arm, links))
        strategy.start(model)
        sgd = torch.optim.SGD([m for _, m in strategy.trained(model)], lr=1e-3)
        ready[label] = strategy, model, sgd
    before, carried = 0, dict.fromkeys(arms, 0)

    def begin(label: str) -> None:
        nonlocal before
        dist.barrier()
        before = sent_by_device()

    def step(label: str) -> None:
        strategy, model, optimizer = ready[label]
        time.sleep(compute)
        strategy.before_backward(last=True)
        model.weight.sum().backward()
        strategy.after_backward()
        strategy.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()

    def count(label: str, counts: bool) -> None:
        carried[label] += counts * (sent_by_device() - before)

    passes = {label: partial(step, label) for label in arms}
    times = in_turns(passes, steps, before=begin, after=count)  # the first makes connections
    coding = coding_seconds(ranks, fields=coded, elements=1_000_000) if ranks.first else {}
    return {
        "coding": coding,
        "fastest": {label: each.fastest for label, each in times.items()},
        "sent": {label: count / steps for label, count in carried.items()},
    }


def coding_seconds(ranks: Ranks, *, fields: Fields, elements: int) -> dict[str, float]:
    """Seconds to code and decode so many elements at one rank, the fastest of three."""
    method = SDP4Bit(**fields)
    numbers = torch.randn(1, elements, generator=generator_of("numbers", 0))
    codes = {"weights": method.weight_codec, "gradients": method.gradient_codec(NODE)}
    passes = {}
    for label, code in codes.items():
        assert code is not None
        passes[label] = partial(_code_and_decode, code, numbers)
    times = in_turns(passes, 3, warm_up=0)
    return {label: each.fastest for label, each in times.items()}


def _code_and_decode(code: Any, numbers: Tensor) -> None:
    code.decode(code.encode(numbers, Stream()), numbers.numel())
