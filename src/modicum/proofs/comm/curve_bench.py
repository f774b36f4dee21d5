"""A bench for every kind of exchange: the same layers under each, in turns, on one link.

What is here runs at ranks that a benchmark or a proof has started. Layers are square matrices that
sleep or multiply. Next to exchanges there is an arm `none`, in which nothing travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.comm.base import ScheduleQuery
from modicum.comm.dear import DeAR
from modicum.comm.sdp4bit import SDP4Bit
from modicum.core.clock import WIRE
from modicum.core.contracts.parameters import trained_shapes
from modicum.core.contracts.strategy import Strategy
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import NODE, SHARD, ExchangeContext, ExchangeQuery
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.link_bench import measure_links
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks
from modicum.parallel.exchange_ledger import row_widths
from modicum.parallel.replicated import Replicated
from modicum.parallel.zero import Zero
from modicum.proofs.bench.busy_cores import BusyCores
from modicum.proofs.bench.meters import in_turns
from modicum.proofs.comm.links import payload_sent, sent
from modicum.proofs.comm.replicated_training import exchange_of, said_to_send
from modicum.proofs.comm.sharded_training import coding_seconds, generator_of
from modicum.proofs.comm.step_time_bench import Fields

# Bytes of the calls by which a link is measured; the largest takes seconds at 10 Mb/s.
SIZES = (4_096, 65_536, 524_288, 2_097_152)


class _SlowProduct(torch.autograd.Function):
    """Adds a row of a matrix, and gives it a gradient that was drawn once, each after a while."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SleepingMatrix) -> Tensor:
        ctx.layer = layer
        time.sleep(layer.forward_seconds)
        return x + weight[:1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        time.sleep(ctx.layer.backward_seconds)
        return gradient, ctx.layer.drawn.to(ctx.layer.weight.dtype, copy=True), None


class SleepingMatrix(nn.Module):
    """A layer of a square matrix that computes for given times, and takes no core for it."""

    def __init__(self, width: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        generator = generator_of("gradient", 0)
        # No buffer, which PyTorch's DDP would broadcast in each forward pass.
        self.drawn = 1e-6 * torch.randn(width, width, generator=generator)
        self.forward_seconds, self.backward_seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        """Add the first row to x, after a while."""
        result: Tensor = _SlowProduct.apply(x, self.weight, self)
        return result


@dataclass
class ExchangeArm:
    """A model under one way to share its gradients.

    Args:
        called: the model as it is called, with `x`.
        wires: the engines that carry its bytes; none where another library does.
        said: bytes that a rank sends in an update, as the ledger says.
    """

    called: nn.Module
    x: Tensor
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    said: int
    wires: Callable[[], list[Collectives]] = field(default=list)

    def step(self) -> None:
        """An update."""
        loss = self.called(self.x).sum()
        self.strategy.before_backward(last=True)
        loss.backward()
        self.strategy.after_backward()
        self.strategy.update(self.optimizer)
        self.optimizer.zero_grad()

    def counted(self) -> dict[str, int]:
        """Bytes, calls and steps of rings since the meters were cleared."""
        found = {"bytes": 0, "calls": 0, "ring_steps": 0}
        for wire in self.wires():
            found["bytes"] += wire.meter.bytes.total()
            for collective, calls in wire.meter.calls.items():
                around = (wire.size - 1) * (2 if collective == "all_reduce" else 1)
                found["calls"] += calls
                found["ring_steps"] += around * calls
        return found


def layers_of(layers: int, width: int, forward: float, backward: float, rows: int) -> nn.Sequential:
    """Square layers, which multiply so many rows, or sleep where there are none.

    Args:
        forward, backward: seconds that all of them sleep together.
    """
    if rows:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    each = forward / layers, backward / layers
    return nn.Sequential(*(SleepingMatrix(width, *each) for _ in range(layers)))


def arm_of(ranks: Ranks, fields: Fields, model: Fields, link: Link | None = None) -> ExchangeArm:
    """An arm's model, at its first weights.

    Args:
        fields: `arm`: `none`, PyTorch's `ddp`, `dear`, `sdp4bit`, or `matrix` with a `method` of
            gradient matrices; `bucket_bytes`, of fp32 gradients; and the method's own fields.
        model: the arguments of `layers_of`.
    """
    own = {key: value for key, value in fields.items() if key not in ("arm", "bucket_bytes")}
    kind, bucket, net = (
        fields["arm"],
        int(fields.get("bucket_bytes", 25_000_000)),
        layers_of(**model),
    )
    width, rows = int(model["width"]), int(model["rows"])
    x = torch.ones(rows or 1, width) / width
    elements = sum(p.numel() for p in net.parameters())
    if kind == "none":
        return ExchangeArm(net, x, Strategy(), _sgd(net.parameters()), 0)
    if kind == "ddp":
        ddp = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=bucket / 2**20)
        said = 2 * (ranks.size - 1) * 4 * elements // ranks.size
        return ExchangeArm(ddp, x, Strategy(), _sgd(ddp.parameters()), said)
    if kind == "dear":
        value = DeAR(bucket_bytes=bucket, **own)
        deferred = value.strategy(ranks, Layout.of(ranks.size), link=link)
        deferred.start(net)
        query = ScheduleQuery(tuple((p.numel(),) for p in net.parameters()), ranks.size)
        said = sum(wire.bytes for wire in value.ledger(query).wire)
        engine = deferred.collectives
        return ExchangeArm(net, x, deferred, _sgd(net.parameters()), said, lambda: [engine])
    if kind == "sdp4bit":
        return _sharded_arm(ranks, own, net.bfloat16(), x.bfloat16(), bucket // 2, link)
    exchange = exchange_of(ranks, own, link)
    replicated = Replicated(ranks, Layout.of(ranks.size), bucket, exchange)
    replicated.start(net)
    said = said_to_send(own, net, ranks.size, bucket)
    return ExchangeArm(net, x, replicated, _sgd(net.parameters()), said, lambda: [exchange.wire])


def _sharded_arm(
    ranks: Ranks, fields: Fields, net: nn.Sequential, x: Tensor, bucket: int, link: Link | None
) -> ExchangeArm:
    value = SDP4Bit(ranks_per_node=1, **fields)
    links = {} if link is None else {SHARD: link, NODE: link}  # one link, whatever travels
    exchange = value.bind(ExchangeContext(ranks, links=links))
    zero = Zero(ranks, exchange=exchange, bucket_bytes=bucket)
    zero.start(net)
    widths = row_widths(trained_shapes(net), ranks.size, bucket)
    query = ExchangeQuery(tuple(widths), ranks.size, 1, copy_bytes=2)
    said = sum(wire.bytes for wire in value.ledger(query).wire)
    optimizer = _sgd(master for _, master in zero.trained(net))
    axes = exchange.axes
    return ExchangeArm(
        net, x, zero, optimizer, said, lambda: [exchange.wire(axis) for axis in axes]
    )


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=1e-3)


def curve(
    ranks: Ranks,
    *,
    arms: Mapping[str, Fields],
    model: Fields,
    rate: float = 0.0,
    latency: float = 0.0,
    steps: int = 2,
    repeats: int = 3,
) -> dict[str, Any]:
    """Seconds of an update of each arm, in interleaved blocks, and what it sends.

    Args:
        rate, latency: of a pretended link; without a rate the link that is there, which is then
            measured: `link` of the result.
        steps: updates in a block, after one that is not timed.

    Returns:
        Of each arm `seconds` (of an update, block by block), `waited` for the wire (by the main
        thread; 0 where nobody keeps a clock), `bytes`, `calls` and `ring_steps` of an update as
        metered, `said` by the ledger, `device`: bytes that eth0 sent, headers included, `payload`:
        without them, and `busy`: the part of the machine's processors in use.
    """
    link: dict[str, float] = {"latency": latency, "rate": rate}
    if not rate:
        [(measured, _)] = measure_links(ranks, SIZES).values()
        link = {"latency": measured.latency, "rate": measured.rate, "cpu": measured.cpu}
    ready: dict[str, ExchangeArm] = {}
    for label, fields in arms.items():
        pretended = Link(rate, latency) if rate else None
        ready[label] = arm_of(ranks, fields, model, pretended)
        for _ in range(2):  # connections, buffers, and the order in which layers are used
            ready[label].step()
        ready[label].strategy.flush()
        dist.barrier()
    nothing = dict.fromkeys(("device", "payload", "waited", "bytes", "calls", "ring_steps"), 0.0)
    rows: dict[str, dict[str, Any]] = {k: {"said": arm.said, **nothing} for k, arm in ready.items()}
    busy = {label: BusyCores() for label in arms}
    before, payload_before, clocked = 0, 0, 0.0

    def begin(label: str) -> None:
        nonlocal before, payload_before, clocked
        before, payload_before = sent(), payload_sent()  # nothing of the block before is on the way
        ready[label].step()
        dist.barrier()
        for wire in ready[label].wires():
            wire.meter.clear()
        clocked = ranks.clock.total(WIRE)
        busy[label].begin()

    def block(label: str) -> None:
        for _ in range(steps):
            ready[label].step()

    def end(label: str, counts: bool) -> None:
        busy[label].end()
        row, count = rows[label], steps * repeats
        row["waited"] += (ranks.clock.total(WIRE) - clocked) / count
        ready[label].strategy.flush()
        dist.barrier()
        row["device"] += (sent() - before) / ((steps + 1) * repeats)
        row["payload"] += (payload_sent() - payload_before) / ((steps + 1) * repeats)
        for key, value in ready[label].counted().items():
            row[key] += value / count

    times = in_turns({label: partial(block, label) for label in arms}, repeats, warm_up=0,
                     before=begin, after=end)  # fmt: skip
    for label, each in times.items():
        rows[label]["seconds"] = [seconds / steps for seconds in each.seconds]
        rows[label]["busy"] = busy[label].share
    return {"arms": rows, "link": link}


def coding(ranks: Ranks, *, arms: Mapping[str, Fields], model: Fields) -> dict[str, Any]:
    """Seconds in which a rank makes an update's messages, and gradients of them; the fastest of 4.

    All ranks do so at once, as in an update. What waits for the wire is left out.
    """
    found: dict[str, Any] = {}
    net = layers_of(**model)
    drawn = {name: torch.randn_like(p) for name, p in net.named_parameters()}
    for label, fields in arms.items():
        own = {key: value for key, value in fields.items() if key not in ("arm", "bucket_bytes")}
        if fields["arm"] == "sdp4bit":
            own["ranks_per_node"] = 1
            elements = sum(p.numel() for p in net.parameters())
            found[label] = coding_seconds(ranks, fields=own, elements=elements)
        elif fields["arm"] == "matrix":
            found[label] = _coded(exchange_of(ranks, own), drawn)
    return found


def _coded(exchange: MatrixExchange, drawn: Mapping[str, Tensor]) -> dict[str, float]:
    """The parts of an update of such gradients, timed in four of them."""
    spent = {"encode": 0.0, "decode": 0.0}

    def clocked(key: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = part(*arguments)
            spent[key] += time.perf_counter() - started
            return result

        return timed

    for name, key in (("encode", "encode"), ("encode_again", "encode"), ("decode", "decode")):
        setattr(exchange, name, clocked(key, getattr(exchange, name)))
    updates = []
    for _ in range(4):
        dist.barrier()
        spent |= dict.fromkeys(spent, 0.0)
        pending = exchange.begin(drawn, set(drawn))
        exchange.turn()
        for total in pending.land().values():
            assert total is not None
            clocked("decode", total.full)()
        exchange.commit()
        updates.append(dict(spent))
    return {key: min(each[key] for each in updates) for key in spent}
