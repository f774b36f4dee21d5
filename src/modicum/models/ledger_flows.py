"""What of a block of the decoder learns, where gradients flow in it, and its linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from modicum.core.layers.linear_forms import LinearForm, linear_form
from modicum.models.ledger_parts import DecoderPart


@dataclass(frozen=True)
class BlockFlows(DecoderPart):
    """A block of the decoder: which of its tensors take a gradient.

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

    def larger(self, other: BlockFlows) -> bool:
        """Whether it has more heads or a wider MLP than another block."""
        widths = zip(*((b.mlp_width, b.heads, b.keys) for b in (self, other)), strict=True)
        return any(own > others for own, others in widths)

    @property
    def mixes(self) -> bool:
        """Whether attention is differentiated."""
        return self.flows or self.learns("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

    @property
    def mixed(self) -> bool:
        """Whether what its mixer adds takes a gradient; an adapter may be behind that."""
        return self.mixes or self.learns("self_attn.o_proj", "self_attn")

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
        return self.gate or self.up or self.learns("mlp.down_proj", "mlp") or behind

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
    def learned(self) -> dict[str, int]:
        """Elements of the linear layers that take gradients by a product."""
        each = {name: form.learned(**asked) for name, (form, asked) in self.forms.items()}
        return {name: self.linears[name] if one is None else one for name, one in each.items()}

    @cached_property
    def between(self) -> dict[str, int]:
        """Elements a position that lie between the factors of a layer."""
        return {name: form.between(**asked) for name, (form, asked) in self.forms.items()}
