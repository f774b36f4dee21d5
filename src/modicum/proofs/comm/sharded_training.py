"""A bench for exchanges of sharded data parallelism: a small decoder, and layers that sleep.

What is here runs at ranks that a proof has started.

The decoder learns a source of which the entropy is known: a sequence is [mode m, x0, x1, ...], and
x_{t+1} is permutation_m(x_t) with probability 0.9, else uniform over the symbols. So a loss is
reported as its excess over that floor, exactly for the prefixes that are looked at. Copies are
bfloat16 and masters fp32, as in the paper.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.comm.sdp4bit import SDP4Bit, SDP4BitExchange
from modicum.core.codecs.elements import Stream
from modicum.core.random import derive_seed
from modicum.core.ranks.collectives import Link
from modicum.core.ranks.exchange import NODE, SHARD, ExchangeContext, Pending, ShardExchange
from modicum.core.ranks.ranks import Ranks
from modicum.models import ModelConfig, create
from modicum.parallel.zero import Zero
from modicum.proofs.comm.links import sent as sent_by_device
from modicum.proofs.comm.step_time_bench import Fields

MODES, FOLLOWED, HELD_OUT = 4, 0.9, 256


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
    blocks: int = 2
    width: int = 64
    rows: int = 16
    steps: int = 120
    learning_rate: float = 3e-3


def floor(symbols: int) -> float:
    """The entropy of a symbol given the ones before it, in nats."""
    other = (1 - FOLLOWED) / symbols
    right = FOLLOWED + other
    return -right * math.log(right) - (symbols - 1) * other * math.log(other)


def trained(
    ranks: Ranks, *, arms: Mapping[str, Fields], size: Fields, seeds: list[int]
) -> dict[str, Any]:
    """Each arm's held-out loss by seed (nats a token), and bytes between hosts an update."""
    told = ShardedSize(**size)
    results: dict[str, Any] = {}
    for label, arm in arms.items():
        losses = [_train(ranks, arm, told, seed) for seed in seeds]
        results[label] = {
            "losses": [floor(told.symbols) + excess for excess, _ in losses],
            "between_hosts": losses[0][1] / told.steps,
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
    table = _permutations(size.symbols, seed)
    exchange = exchange_of(ranks, arm)
    strategy = Zero(ranks, exchange=exchange)
    strategy.start(model)
    masters = [master for _, master in strategy.trained(model)]
    optimizer = torch.optim.AdamW(masters, lr=size.learning_rate, weight_decay=0.0)
    generator = _generator(f"training {ranks.rank}", seed)
    rows = size.rows // ranks.size
    for step in range(size.steps):
        warm = min(1.0, (step + 1) / 20)
        rate = size.learning_rate * warm * (1 - 0.95 * step / size.steps)
        optimizer.param_groups[0]["lr"] = rate
        tokens = _batch(table, generator, rows, size)
        logits = model(tokens[:, :-1])[:, 1:].float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()) / ranks.size
        strategy.before_backward(last=True)
        loss.backward()
        strategy.after_backward()
        strategy.clip(masters, 1.0, _whole(strategy.norm(masters)))
        strategy.update(optimizer)
        optimizer.zero_grad(set_to_none=True)
    return _excess(model, table, size), between_hosts(exchange)


def _whole(norm: Tensor) -> Tensor:
    full: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
    return norm if full is None else full()


def _permutations(symbols: int, seed: int) -> Tensor:
    generator = _generator("permutations", seed)
    return torch.stack([torch.randperm(symbols, generator=generator) for _ in range(MODES)])


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, name))


def _batch(table: Tensor, generator: torch.Generator, rows: int, size: ShardedSize) -> Tensor:
    """Token ids [rows, tokens]; modes are numbered after the symbols."""
    mode = torch.randint(MODES, (rows,), generator=generator)
    columns = [torch.randint(size.symbols, (rows,), generator=generator)]
    for _ in range(size.tokens - 2):
        follows = torch.rand(rows, generator=generator) < FOLLOWED
        anything = torch.randint(size.symbols, (rows,), generator=generator)
        columns.append(torch.where(follows, table[mode, columns[-1]], anything))
    return torch.stack([size.symbols + mode, *columns], dim=1)


@torch.no_grad()
def _excess(model: nn.Module, table: Tensor, size: ShardedSize) -> float:
    """KL(source || model) a token on held-out prefixes: the loss's exact distance to its floor."""
    tokens = _batch(table, _generator("held out", 0), HELD_OUT, size)
    log_model = F.log_softmax(model(tokens[:, :-1])[:, 1:].float(), dim=-1)
    follows = table[tokens[:, :1] - size.symbols, tokens[:, 1:-1]]
    source = torch.full_like(log_model, (1 - FOLLOWED) / size.symbols)
    source[..., size.symbols :] = 0.0
    source.scatter_add_(2, follows[..., None], torch.full_like(source[..., :1], FOLLOWED))
    return F.kl_div(log_model, source, reduction="sum").item() / follows.numel()


def timed(
    ranks: Ranks,
    *,
    arms: Mapping[str, Fields],
    elements: int,
    compute: float,
    rate: float = 0.0,
    steps: int = 4,
) -> dict[str, Any]:
    """Seconds of a step of each arm, interleaved, the fastest of each; and bytes that eth0 sent.

    Args:
        elements: of the one weight, whose computation is slept.
        compute: seconds of it.
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
    seconds: dict[str, list[float]] = {label: [] for label in arms}
    carried = dict.fromkeys(arms, 0)
    for step in range(steps + 1):
        for label, (strategy, model, optimizer) in ready.items():
            dist.barrier()
            before, started = sent_by_device(), time.perf_counter()
            time.sleep(compute)
            strategy.before_backward(last=True)
            model.weight.sum().backward()
            strategy.after_backward()
            strategy.update(optimizer)
            optimizer.zero_grad(set_to_none=True)
            dist.barrier()
            if step:  # the first makes connections
                seconds[label].append(time.perf_counter() - started)
                carried[label] += sent_by_device() - before
    return {
        "fastest": {label: min(times) for label, times in seconds.items()},
        "sent": {label: count / steps for label, count in carried.items()},
    }


def coding_seconds(ranks: Ranks, *, fields: Fields, elements: int) -> dict[str, float]:
    """Seconds to code and decode so many elements at one rank, the fastest of three."""
    method = SDP4Bit(**fields)
    numbers = torch.randn(1, elements, generator=_generator("numbers", 0))
    codes = {"weights": method.weight_codec, "gradients": method.gradient_codec(NODE)}
    found = {}
    for label, code in codes.items():
        assert code is not None
        times = []
        for _ in range(3):
            started = time.perf_counter()
            code.decode(code.encode(numbers, Stream()), elements)
            times.append(time.perf_counter() - started)
        found[label] = min(times)
    return found
