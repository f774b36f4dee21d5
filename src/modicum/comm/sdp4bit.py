"""SDP4Bit: weight differences and gradients of sharded data parallelism in about four bits."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NoReturn

import torch
from pydantic import Field
from torch import Tensor, nn

from modicum.comm.base import HooklessMethod
from modicum.core.codecs.elements import (
    HADAMARD,
    ElementCodec,
    GroupQuantizer,
    codec,
    hadamard,
    padded,
)
from modicum.core.contracts.ledger import Ledger
from modicum.core.contracts.method import Against, Info, PositiveInt
from modicum.core.errors import InputError
from modicum.core.ranks import exchange
from modicum.core.ranks.exchange import ExchangeContext, Nodes, Pending, ShardExchange
from modicum.core.ranks.exchange_ledgers import coded_ledger


class SDP4BitExchange(ShardExchange):
    """Quantized weight differences to everybody; gradients in two hops, each quantized."""

    def __init__(self, method: SDP4Bit, context: ExchangeContext) -> None:
        super().__init__(context, method.nodes(context.ranks.size, context.ranks.local_size))
        self.method = self.value = method
        self.weights = method.weight_codec
        self.incremental = self.weights is not None
        self.stateful = True  # which draw is the next, also where weights are sent exactly
        self.axes = (exchange.SHARD, *self.nodes.hops())
        self._block, self._transforms = method.block(self.nodes), method.transforms(self.nodes)

    def refresh(self, copy: Tensor, shard: Tensor, name: str) -> Pending:
        if self.weights is None:
            return super().refresh(copy, shard, name)
        # The copy is taken off while the weights are fp32: a difference that the model's dtype
        # cannot show is not lost, but comes again.
        difference = (shard.float() - copy[self.ranks.rank])[None]
        message = self.weights.encode(difference, self.stream(f"{name}/weights"))
        handle, decode = self.wire(exchange.SHARD).all_gather(message[0]), self.weights.decode

        def finish() -> Tensor:
            for row, coded in zip(copy, handle.wait().view(len(copy), 1, -1), strict=True):
                row.add_(decode(coded, len(row))[0])  # also to the owner's, else copies drift apart
            return copy

        return finish

    def reduce_scatter(self, rows: Tensor, name: str) -> Pending:
        hops, width = self.nodes.hops(), rows.shape[1]
        if not hops:
            return super().reduce_scatter(rows, name)
        # Rows of one place in their host come together: [local][node].
        rows = rows.view(self.nodes.count, self.nodes.local, width).transpose(0, 1)
        rows = padded(rows, self._block).view(self.ranks.size, -1)
        if self._transforms:
            rows = hadamard(rows)
        pending = self._hop(rows, hops[0], name)

        def finish() -> Tensor:
            total = pending()
            for axis in hops[1:]:
                total = self._hop(total, axis, name)()
            if self._transforms:  # once: sums of transforms are transforms of sums
                total = hadamard(total) / HADAMARD
            return total[0, :width]

        return finish

    def _hop(self, rows: Tensor, axis: str, name: str) -> Pending:
        code, stream = self.method.gradient_codec(axis), self.stream(f"{name}/{axis}")
        return exchange.coded_sum(self.wire(axis), rows, code, stream)


class SDP4Bit(HooklessMethod):
    """Four-bit weight differences and gradients between ranks that share the optimizer's state.

    Of a weight travels the difference between its owner's fp32 master and the copy that every rank
    computes with; what rounding leaves is part of the next difference. Of gradients, ranks of one
    host exchange 8 bits, hosts 4, after a Hadamard transform that spreads outliers. Prefer it where
    the link between hosts is what a step waits for; inside one host it saves nothing.

    Runs on `modicum.parallel.zero.Zero`, and on FSDP2 (`Sharded`) where blocks stay gathered from
    the forward to the backward pass. Loops of other libraries wrap models themselves, so under
    `transformers.Trainer` it does not run.

    Args:
        weight_bits: of weight differences; 32 sends the weights themselves, in the model's dtype.
        weight_group: elements that share a scale.
        gradient_bits: of gradients between hosts; 16 is bfloat16, 32 exact.
        inner_bits: the same inside a host.
        gradient_group: elements that share a scale, in both.
        hadamard: whether gradients are transformed, in blocks of 32, before they are quantized.
        ranks_per_node: ranks on a host; None: as the environment tells (LOCAL_WORLD_SIZE).

    Source: Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data
    Parallelism for LLM Training", arXiv 2410.15526, sections 3.1 to 3.3; order of operations and
    group sizes as in the authors' code. Theirs subtracts bfloat16 from bfloat16; here the
    difference is taken in fp32. The hops of one buffer are not split into chunks that overlap:
    buffers do, the first hop of one with the backward pass that fills the next.

    Started by `torchrun`, by `joined` (or alone, as here):

    >>> import torch
    >>> from modicum.comm import SDP4Bit
    >>> from modicum.core.ranks.exchange import ExchangeContext
    >>> from modicum.core.ranks.ranks import Ranks
    >>> from modicum.parallel.zero import Zero
    >>> ranks, model = Ranks(), torch.nn.Linear(16, 1)
    >>> strategy = Zero(ranks, exchange=SDP4Bit().bind(ExchangeContext(ranks)))
    >>> strategy.start(model)
    >>> optimizer = torch.optim.AdamW([master for _, master in strategy.trained(model)], lr=0.1)
    >>> for _ in range(10):
    ...     loss = model(torch.ones(4, 16)).square().sum() / 4  # over the samples of all ranks
    ...     strategy.before_backward(last=True)
    ...     loss.backward()
    ...     strategy.after_backward()
    ...     strategy.update(optimizer)
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="sdp4bit",
        title="SDP4Bit: 4-bit weight differences and gradients of sharded data parallelism",
        room="comm",
        paper="SDP4Bit: Toward 4-bit Communication Quantization in Sharded Data Parallelism for "
        "LLM Training, arXiv 2410.15526",
        claim="nearly 4-bit communication, up to 4.08 times the throughput on 128 GPUs with slow "
        "links between hosts, at the loss of bfloat16",
        traits=("crosses_wire", "codes_cut_weights", "exact_resume", "compiles"),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("better", "4-bit weights themselves"),
    )

    why_no_hook: ClassVar[str] = (
        "it sends weights too, and a hook of DistributedDataParallel, in which "
        "transformers.Trainer wraps its model, sums gradients alone; in a loop of your own give "
        "what bind returns to modicum.parallel.Zero, or take DenseSums, PowerSGD or ACPSGD, which "
        "have hooks"
    )

    weight_bits: Literal[4, 8, 32] = 4
    weight_group: Annotated[int, Field(ge=32, multiple_of=32)] = 2048
    gradient_bits: Literal[4, 8, 16, 32] = 4
    inner_bits: Literal[4, 8, 16, 32] = 8
    gradient_group: Annotated[int, Field(ge=32, multiple_of=32)] = 128
    hadamard: bool = True
    ranks_per_node: PositiveInt | None = None

    @property
    def weight_codec(self) -> ElementCodec | None:
        """Of weight differences; None where weights themselves are sent."""
        return None if self.weight_bits == 32 else codec(self.weight_bits, self.weight_group)

    def gradient_codec(self, axis: str) -> ElementCodec:
        """Of gradients along an axis."""
        bits = self.inner_bits if axis == exchange.LOCAL else self.gradient_bits
        return codec(bits, self.gradient_group)

    def block(self, nodes: Nodes) -> int:
        """Rows of gradients are filled up to a multiple of it: of groups, where there are any."""
        codes = (self.gradient_codec(axis) for axis in nodes.hops())
        return self.gradient_group if any(isinstance(c, GroupQuantizer) for c in codes) else 1

    def transforms(self, nodes: Nodes) -> bool:
        """Whether gradients are transformed: where some hop rounds them in groups."""
        return self.hadamard and self.block(nodes) > 1

    def nodes(self, ranks: int, local: int) -> Nodes:
        """The hosts of so many ranks, where the environment tells of `local` to a host.

        Raises:
            InputError: hosts would not have equally many.
        """
        return Nodes.of(ranks, self.ranks_per_node or local)

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer, **_: object) -> NoReturn:
        """Refuse it.

        Raises:
            InputError: always.
        """
        raise InputError(
            "wrap trains replicas by an optimizer of the model's own parameters, and here ranks "
            "share its state; in a loop of your own give what bind returns to "
            "modicum.parallel.Zero, or take DenseSums, PowerSGD or ACPSGD",
            value=self.info.name,
        )

    def bind(self, context: ExchangeContext) -> SDP4BitExchange:
        """The exchange among these ranks; all of them call this."""
        return SDP4BitExchange(self, context)

    def ledger(self, at: exchange.ExchangeQuery) -> Ledger:
        """Bytes that a rank sends in an update, and the buffers that stand on the way."""
        nodes = self.nodes(at.ranks, at.ranks_per_node)
        codes = {axis: self.gradient_codec(axis) for axis in nodes.hops()}
        return coded_ledger(
            at,
            nodes,
            gradients=codes,
            weights=self.weight_codec,
            block=self.block(nodes),
            transforms=self.transforms(nodes),
        )
