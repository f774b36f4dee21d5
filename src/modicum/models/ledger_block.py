"""A block of the decoder: what it keeps and computes, by arithmetic, in bytes and FLOPs.

What a layer keeps depends on what learns: a frozen one keeps its input only for an adapter, and a
block before all that learns keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from modicum.core.machine.kernels import ProductScratch
from modicum.models.ledger_flows import BlockFlows

_OF_ALL = ("forms", "linears", "learned", "between", "keeps")


class DecoderBlock(BlockFlows):
    """A block's bytes and work."""

    @cached_property
    def keeps(self) -> bool:
        """Whether autograd keeps anything of it, counted or not."""
        return bool(self.saved)

    def counting(self, counts: Callable[[int], bool]) -> DecoderBlock:
        """The same, of which other tensors count than all."""
        made = replace(self, counts=counts)
        # What is no tensor's bytes takes most of the time, and stays.
        vars(made).update({name: getattr(self, name) for name in _OF_ALL})
        return made

    @property
    def entered(self) -> int:
        """Bytes of what comes in and into no block before."""
        return self.entering * self.stream

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps and not for a block before, weights' copies aside."""
        common = self.shared if self.keeps_stream else 0
        return self.saved_alone - common * self.norm_input * self.shape.positions

    @cached_property
    def saved_alone(self) -> int:
        """Bytes that autograd keeps of it alone, weights' copies aside."""
        compute, width = self.shape.compute_bytes, self.config.width
        each = self.norm * (self.flows + self.mlp_flows)
        if self.twin and self.flows and self.mlp_flows and self.keeps_stream:
            each -= self.norm_input
        readers = "mlp.gate_proj", "mlp.up_proj"
        each += self.each(width * compute) * self.inputs(*readers) + self.sums(width, *readers)
        # silu keeps gate, the product up for gate's sake and silu(gate) for up's.
        inner = 2 * self.gate + self.up + self.inputs("mlp.down_proj")
        each += self.each(self.mlp_width * compute) * inner
        each += self.sums(self.mlp_width, "mlp.down_proj")
        if self.trained:  # what lies between factors
            each += sum(self.each(numbers * compute) for numbers in self.between.values())
        return each * self.shape.positions + self.attending + self.adapters

    @property
    def attending(self) -> int:
        """Bytes that its attention keeps."""
        compute, width = self.shape.compute_bytes, self.config.width
        readers = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
        each = self.each(width * compute) * self.inputs(*readers) + self.sums(width, *readers)
        each += self.sums(self.queries, "self_attn.o_proj")
        queries = self.each(self.queries * compute)
        if self.mixes:
            # Rotated q and k, v, the output, which is also o_proj's input, and the log-sum-exp.
            each += 2 * (queries + self.each(self.keys * compute)) + self.each(4 * self.heads)
        else:
            each += queries * self.inputs("self_attn.o_proj")
        return each * self.shape.positions

    @property
    def rerun(self) -> int:
        """Bytes that are there when it has run again, beyond the inputs of blocks before it."""
        # Its norms save some of the very tensors that came in.
        same = self.saves_entering if self.keeps_stream else 0
        return self.saved_alone + self.casts + self.entered - same * self.stream

    @property
    def inner(self) -> int:
        """Bytes of what the forward pass holds at a time when nothing is kept."""
        # The block's input, that with attention's output added, and its norm; and that output.
        mixed = self.tensor(self.config.width * self.shape.compute_bytes * self.shape.positions)
        # Both factors and their product; or both factors as the second one is made.
        cast = mixed if self.half else 0  # of what the second one is made of
        workspace = cast + self.workspace(max(each.forward for each in self.products))
        streams = (1 + self.held) * self.stream
        return streams + mixed + max(3 * self.factor, 2 * self.factor + workspace)

    @property
    def running(self) -> int:
        """Bytes of what the forward pass holds at a time when it keeps what backward needs."""
        out = self.tensor(self.config.width * self.shape.compute_bytes * self.shape.positions)
        # As down_proj makes its output, only what is kept is left of both factors.
        last = (2 * self.gate + self.up - 2) * self.factor + out + self.products[1].forward
        return self._holding + max(self.gate * self.factor, last)

    @property
    def _holding(self) -> int:
        """Bytes that are there when its MLP runs, beyond what that keeps of its own."""
        copies = self.norm - (self.norm_input if self.keeps_stream else 0)
        norms = copies * (self.flows + self.mlp_flows) * self.shape.positions
        return self.inner + self.attending + norms

    def undoing(self, *, again: bool) -> int:
        """Bytes that are there in its backward pass at most, beyond what other blocks keep.

        Args:
            again: whether it keeps its input alone and runs again.
        """
        if not self.keeps:
            return 0
        if not again:
            return self.saved + self.casts + self.work
        # Where little in it learns it holds more while it runs than when it is undone.
        running = self._holding + self.gate * self.factor + self.casts
        return max(self.rerun + self.work, self.flowing * self.stream + running)

    @property
    def work(self) -> int:
        """Bytes of gradients in its backward pass, at most: as the MLP's product is undone."""
        if not self.flows_on:
            return 0
        gradients = self.flowing * self.stream
        factors = self.gate + self.up  # those that take a gradient
        if not factors:
            return gradients
        # Where nothing learns before its MLP, down_proj is the last to read its output's gradient.
        left = gradients if self.flows or self.mixed else 0
        # down_proj's input is given free as its gradient comes; then come those of the factors.
        made = 1 + factors - self.inputs("mlp.down_proj")
        workspace = self.workspace(max(each.inputs for each in self.products))
        return max(
            left
            + made * self.factor
            + self._down_held
            + self.mask("mlp.down_proj", self.mlp_width),
            left + (made - 1) * self.factor + workspace * self.mlp_flows,
            gradients + self.factor + workspace,
            gradients + (self._down_made if self.trained else 0),
        )

    @property
    def _down_held(self) -> int:
        """Bytes that down_proj's weight leaves: its gradient comes, and its bf16 copy goes."""
        if not self.trained:
            return 0
        elements = self.linears["mlp.down_proj"]
        waits = 4 if self.shape.micro_batches == 1 else 0  # else it was added to the one before
        return self.tensor(waits * elements) - self.tensor(2 * self.half * elements)

    @property
    def _down_made(self) -> int:
        """Bytes that down_proj's own backward pass works in: its gradients, and scratch."""
        elements, (_, down) = self.linears["mlp.down_proj"], self.products
        if not self.half:
            return self.tensor(4 * elements) + self.factor
        # In bf16 it begins with a copy of its output's gradient, and ends with one of its own.
        copy = self.tensor(self.config.width * self.shape.compute_bytes * self.shape.positions)
        scratch = max(down.weight, self.factor + down.inputs)
        return max(copy + self.tensor(2 * elements) + scratch, self.tensor(4 * elements))

    @property
    def factor(self) -> int:
        """Bytes of one factor of the MLP's product."""
        return self.tensor(self.mlp_width * self.shape.compute_bytes * self.shape.positions)

    @property
    def products(self) -> tuple[ProductScratch, ProductScratch]:
        """What the products of the MLP's layers work in: of gate and up, and of down."""
        width, inner = self.config.width, self.mlp_width
        return self.scratch(width, inner), self.scratch(inner, width)

    def workspace(self, scratch: int) -> int:
        """Bytes that one of the MLP's layers takes for its product, such as its dense weight."""
        compute, device, each = self.shape.compute_bytes, self.shape.device, []
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            form, asked = self.forms[name]
            # A weight that is made for the product lies next to the product's scratch.
            dense = 0 if form.trains else self.tensor(form.elements(**asked) * compute)
            own = form.workspace(item_bytes=compute, device=device, **asked)
            each.append(max(self.tensor(own), dense + scratch))
        return max(each)

    @property
    def casts(self) -> int:
        """Bytes of the weights' bf16 copies, from their first use until backward is past them."""
        return sum(self.tensor(2 * size) for size in self.linears.values()) if self.half else 0

    @property
    def forward(self) -> int:
        """FLOPs of the matrix products."""
        return 2 * self.shape.positions * sum(self.linears.values()) + self._attention

    @property
    def backward(self) -> int:
        """FLOPs of the matrix products that give gradients of inputs and of trained weights."""
        takes = {
            **{f"self_attn.{name}_proj": self.flows for name in "qkv"},
            "self_attn.o_proj": self.mixes,
            "mlp.gate_proj": self.mlp_flows,
            "mlp.up_proj": self.mlp_flows,
            "mlp.down_proj": self.gate or self.up,
        }
        elements = sum(size * takes[n] for n, size in self.linears.items())
        elements += self.trained * sum(self.learned.values())
        return 2 * self.shape.positions * elements + 2 * self._attention * self.mixes

    @property
    def again(self) -> int:
        """FLOPs of running it again: down to the last thing that was kept, down_proj's input."""
        # An adapter of its own keeps something when the product is made.
        adapted = not self.trained and self.learns("mlp.down_proj")
        form, asked = self.forms["mlp.down_proj"]
        last = 0 if adapted else self.linears["mlp.down_proj"]
        if self.trained:  # what is kept last may lie between two factors
            last = form.final(**asked)
        return self.forward - 2 * self.shape.positions * last

    @property
    def _attention(self) -> int:
        # Every score, as PyTorch counts; the kernels leave out what causality hides.
        return 4 * self.shape.positions * self.shape.tokens * self.queries
