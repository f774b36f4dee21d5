"""The blocks of the decoder and what each keeps and computes: bytes and FLOPs, by arithmetic.

What a layer keeps depends on what learns: a frozen one keeps its input only for an adapter, and a
block before all that learns keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.layers.linear_forms import LinearForm, linear_form
from modicum.core.machine.kernels import ProductScratch, product_scratch
from modicum.models.config import ModelConfig


@dataclass(frozen=True)
class AdapterActivations:
    """What adapters on the frozen decoder keep for the backward pass.

    Args:
        sites: bytes that the adapter of each layer or block keeps, by its full name.
        inputs: of those layers, the ones whose input is kept for their adapter.
    """

    sites: Mapping[str, int] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()


@dataclass(frozen=True)
class DecoderPart:
    """A part of the decoder: which of its layers learn, and what is differentiated in it.

    Args:
        prefix: what the names of its layers begin with.
        flows: whether its input takes a gradient.
    """

    config: ModelConfig
    shape: ModelQuery
    adapted: AdapterActivations | None
    prefix: str
    flows: bool

    @property
    def trained(self) -> bool:
        """Whether all weights are."""
        return self.adapted is None

    @property
    def half(self) -> bool:
        """Whether weights that are trained in fp32 compute as bf16 copies."""
        return self.trained and self.shape.compute_bytes < 4

    @property
    def stream(self) -> int:
        """Bytes of the residual stream between blocks."""
        return self.shape.positions * self.config.width * self.shape.residual_bytes

    def learns(self, *layers: str) -> bool:
        """Whether the output of one of these linear layers depends on something trained in it."""
        return self.adapted is None or any(self.prefix + n in self.adapted.sites for n in layers)

    def inputs(self, *layers: str) -> int:
        """How many copies are kept of the one tensor that these linear layers read."""
        if self.adapted is None:
            return len(layers) if self.half else 1  # autocast makes each layer a copy of its own
        return int(any(self.prefix + name in self.adapted.inputs for name in layers))

    def scratch(self, inputs: int, outputs: int) -> ProductScratch:
        """What the products of a linear layer of these features work in."""
        half = self.shape.compute_bytes < 4
        return product_scratch(self.shape.positions, inputs, outputs, half=half)

    def gradient_of(self, elements: int, scratch: int) -> int:
        """Bytes of a weight's gradient as it is made.

        In bf16 the product's scratch comes first, then the fp32 copy.
        """
        if not self.trained:
            return 0
        if not self.half:
            return 4 * elements
        return 2 * elements + max(4 * elements, scratch)

    @property
    def norm(self) -> int:
        """Bytes that a norm keeps a position: fp32 input and scale, and if trained its output."""
        return 4 * (self.config.width + 1) + (4 * self.config.width if self.trained else 0)

    @property
    def adapters(self) -> int:
        """Bytes that adapters keep here beyond the inputs."""
        sites = self.adapted.sites if self.adapted else {}
        return sum(size for name, size in sites.items() if f"{name}.".startswith(self.prefix))


@dataclass(frozen=True)
class DecoderBlock(DecoderPart):
    """A block's bytes and work.

    Args:
        layer: its number.
        mlp_flows: whether what its MLP reads takes a gradient.
        twin: whether its MLP reads the stream that its mixer does.
        shared: how many of its branches read a stream that a block before reads too.
        entering: streams that come in and into no block before.
        saves_entering: of the streams that come in, those that its norms keep.
        held: streams there while its MLP runs.
        flowing: streams whose gradients are there, at most.
    """

    layer: int
    mlp_flows: bool = False
    twin: bool = False
    shared: int = 0
    entering: int = 1
    saves_entering: int = 1
    held: int = 2
    flowing: int = 1

    @property
    def mlp_width(self) -> int:
        """The inner width of its MLP."""
        return self.config.mlp_width_of(self.layer)

    @property
    def heads(self) -> int:
        """Of its attention."""
        return self.config.heads_of(self.layer)

    @property
    def queries(self) -> int:
        return self.heads * self.config.head_width

    @property
    def keys(self) -> int:
        return self.config.kv_heads_of(self.layer) * self.config.head_width

    def larger(self, other: DecoderBlock) -> bool:
        """Whether it has more heads or a wider MLP than another block."""
        widths = zip(*((b.mlp_width, b.heads, b.keys) for b in (self, other)), strict=True)
        return any(own > others for own, others in widths)

    @property
    def mixes(self) -> bool:
        """Whether attention is differentiated."""
        return self.flows or self.learns("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    @property
    def mixed(self) -> bool:
        """Whether what its mixer adds takes a gradient."""
        return self.mixes or self.learns("self_attn.o_proj")

    @property
    def gate(self) -> bool:
        return self.mlp_flows or self.learns("mlp.gate_proj")

    @property
    def up(self) -> bool:
        return self.mlp_flows or self.learns("mlp.up_proj")

    @property
    def flows_on(self) -> bool:
        """Whether its output takes a gradient."""
        return self.mixed or self.added

    @property
    def added(self) -> bool:
        """Whether what its MLP adds takes a gradient, or an adapter behind it."""
        behind = self.adapted is not None and self.prefix.removesuffix(".") in self.adapted.sites
        return self.gate or self.up or self.learns("mlp.down_proj") or behind

    @property
    def entered(self) -> int:
        """Bytes of what comes in and into no block before."""
        return self.entering * self.stream

    @property
    def saved(self) -> int:
        """Bytes that autograd keeps and not for a block before, weights' copies aside."""
        common = self.shared if self.shape.residual_bytes == 4 else 0  # else norms keep copies
        return self.saved_alone - common * 4 * self.config.width * self.shape.positions

    @cached_property
    def saved_alone(self) -> int:
        """Bytes that autograd keeps of it alone, weights' copies aside."""
        compute, width = self.shape.compute_bytes, self.config.width
        each = self.norm * (self.flows + self.mlp_flows)
        if self.twin and self.flows and self.mlp_flows and self.shape.residual_bytes == 4:
            each -= 4 * width
        mixer_inputs = self.inputs("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        each += width * compute * (mixer_inputs + self.inputs("mlp.gate_proj", "mlp.up_proj"))
        if self.mixes:
            # Rotated q and k, v, the output, which is also o_proj's input, and the log-sum-exp.
            each += 2 * (self.queries + self.keys) * compute + 4 * self.heads
        else:
            each += self.queries * compute * self.inputs("self_attn.o_proj")
        # silu keeps gate, the product up for gate's sake and silu(gate) for up's.
        inner = 2 * self.gate + self.up + self.inputs("mlp.down_proj")
        each += self.mlp_width * compute * inner
        if self.trained:  # what lies between factors
            each += sum(self.between.values()) * compute
        return each * self.shape.positions + self.adapters

    @property
    def rerun(self) -> int:
        """Bytes that are there when it has run again, beyond the inputs of blocks before it."""
        # Its norms save some of the very tensors that came in.
        same = self.saves_entering if self.shape.residual_bytes == 4 else 0
        return self.saved_alone + self.casts + self.entered - same * self.stream

    @property
    def run_again(self) -> int:
        """Bytes that running it again adds to its input, weights' copies among them."""
        return self.rerun - self.entered

    @property
    def inner(self) -> int:
        """Bytes of what the forward pass holds at a time when nothing is kept."""
        # The block's input, that with attention's output added, and its norm; and that output.
        mixed = self.config.width * self.shape.compute_bytes * self.shape.positions
        # Both factors and their product; or both factors as the second one is made.
        cast = mixed if self.half else 0  # of what the second one is made of
        workspace = cast + self.workspace(max(each.forward for each in self.products))
        streams = (1 + self.held) * self.stream
        return streams + mixed + max(3 * self.factor, 2 * self.factor + workspace)

    @property
    def work(self) -> int:
        """Bytes of gradients in its backward pass, at most: as the MLP's product is undone."""
        if not self.flows_on:
            return 0
        # down_proj's input is given free as its gradient comes; then come those of both factors.
        made = 3 - self.inputs("mlp.down_proj")
        workspace = self.workspace(max(each.inputs for each in self.products))
        return self.flowing * self.stream + max(
            made * self.factor + self._down_held,
            (made - 1) * self.factor + workspace,
            self._down_made if self.trained else 0,
        )

    @property
    def _down_held(self) -> int:
        """Bytes that down_proj's weight leaves: its gradient comes, and its bf16 copy goes."""
        if not self.trained:
            return 0
        waits = 4 if self.shape.micro_batches == 1 else 0  # else it was added to the one before
        return (waits - 2 * self.half) * self.linears["mlp.down_proj"]

    @property
    def _down_made(self) -> int:
        """Bytes that down_proj's own backward pass works in: its gradients, and scratch."""
        elements, (_, down) = self.linears["mlp.down_proj"], self.products
        if not self.half:
            return 4 * elements + self.factor
        # In bf16 it begins with a copy of its output's gradient, and ends with one of its own.
        copy = self.config.width * self.shape.compute_bytes * self.shape.positions
        scratch = max(down.weight, self.factor + down.inputs)
        return max(copy + 2 * elements + scratch, 4 * elements)

    @property
    def factor(self) -> int:
        """Bytes of one factor of the MLP's product."""
        return self.mlp_width * self.shape.compute_bytes * self.shape.positions

    @property
    def products(self) -> tuple[ProductScratch, ProductScratch]:
        """What the products of the MLP's layers work in: of gate and up, and of down."""
        width, inner = self.config.width, self.mlp_width
        return self.scratch(width, inner), self.scratch(inner, width)

    def workspace(self, scratch: int) -> int:
        """Bytes that one of the MLP's layers takes for its product, such as its dense weight."""
        compute, each = self.shape.compute_bytes, []
        for name in ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            form, asked = self.forms[name]
            # A weight that is made for the product lies next to the product's scratch.
            dense = 0 if form.trains else form.elements(**asked) * compute
            each.append(max(form.workspace(item_bytes=compute, **asked), dense + scratch))
        return max(each)

    @cached_property
    def forms(self) -> dict[str, tuple[LinearForm, Mapping[str, Any]]]:
        """The form of each linear layer, and what it is asked with: sizes and arguments."""
        found: dict[str, tuple[LinearForm, Mapping[str, Any]]] = {}
        for name, (rows, columns, _) in self.config.projections(self.layer).items():
            planned = self.config.forms.of(self.prefix + name)
            sizes = {"in_features": columns, "out_features": rows}
            found[name] = linear_form(planned.name), {**sizes, **planned.arguments}
        return found

    @cached_property
    def linears(self) -> dict[str, int]:
        """Elements of the linear layers' weights, or of the factors that represent one."""
        return {name: form.elements(**asked) for name, (form, asked) in self.forms.items()}

    @cached_property
    def between(self) -> dict[str, int]:
        """Elements a position that lie between the factors of a layer."""
        return {name: form.between(**asked) for name, (form, asked) in self.forms.items()}

    @property
    def casts(self) -> int:
        """Bytes of the weights' bf16 copies, from their first use until backward is past them."""
        return 2 * sum(self.linears.values()) if self.half else 0

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
        elements = sum(size * (takes[n] + self.trained) for n, size in self.linears.items())
        return 2 * self.shape.positions * elements + 2 * self._attention * self.mixes

    @property
    def again(self) -> int:
        """FLOPs of running it again: down to the last thing that was kept, down_proj's input."""
        # An adapter of its own keeps something when the product is made.
        adapted = not self.trained and self.learns("mlp.down_proj")
        last = 0 if adapted else self.linears["mlp.down_proj"]
        if self.trained and (between := self.between["mlp.down_proj"]):
            last = between * self.config.width  # what is kept last lies between the two factors
        return self.forward - 2 * self.shape.positions * last

    @property
    def _attention(self) -> int:
        # Every score, as PyTorch counts; the kernels leave out what causality hides.
        return 4 * self.shape.positions * self.shape.tokens * self.queries
