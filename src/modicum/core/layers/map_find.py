"""Reads all parts of a trace, has them tried, and puts them in their places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from modicum.core.layers.block_kinds import outermost_lists
from modicum.core.layers.linear_forms import form_of
from modicum.core.layers.map_calls import Trace
from modicum.core.layers.map_check import LARGEST_COPY, KeptCalls, Scaled, signature, tried
from modicum.core.layers.map_experts import StackedExperts, experts_of, stacked_units
from modicum.core.layers.map_labels import Origin
from modicum.core.layers.map_norms import norm_of
from modicum.core.layers.map_parts import (
    MappedAttention,
    MappedBlock,
    MappedConvolution,
    MappedMlp,
    MappedTable,
    ModelMap,
    Units,
)
from modicum.core.layers.map_read import Reader, Unread


class MapFinder:
    """Reads all parts of a trace, has them tried, and puts them in their places."""

    def __init__(
        self,
        model: nn.Module,
        found: Trace,
        run: Callable[[], Any],
        ties: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.model, self.trace, self.run, self.ties = model, found, run, ties
        self.reader = Reader(model, found)
        self.unknown: dict[str, str] = {}
        self.used: set[str] = set()
        self.verdicts: dict[Any, tuple[str, Units | str]] = {}

    def map(self) -> ModelMap:
        """The map of the model."""
        mixtures = {c.module: c.origin.size for c in self.trace.experts}
        claims = {name: list(experts_of(self.model, name, size)) for name, size in mixtures.items()}
        attentions, mlps = self._attentions(), self._mlps()
        parts: list[Units] = [x.heads for x in attentions] + [x.neurons for x in mlps]
        parts += [claim.mlp.neurons for found in claims.values() for claim in found]
        around = {"", *(units.name for units in parts), *(_module(name) for name in claims)}
        self.calls = KeptCalls(self.model, around, self.run)
        kept_attentions = [a for x in attentions if (a := self._tried_attention(x)) is not None]
        kept_mlps = [m for x in mlps if (m := self._tried_mlp(x)) is not None]
        for module, found in claims.items():
            kept_mlps += self._tried_experts(module, found)
        self.reader.tie_shared()
        root = self._stream_root()
        stream, width = self._stream(root)
        channels, places = self._channels(root)
        norms = [norm_of(self.model, self.trace, c, self.ties) for c in self.trace.norms]
        convolutions, tables = self._convolutions(places), self._tables(root)
        head = self._head()
        self._name_unknown()
        blocks = self._blocks()
        inside = [
            MappedBlock(name, type(self.model.get_submodule(name)).__name__, number,
                        tuple(n for n in norms if _in(n.name, name)),
                        tuple(a for a in kept_attentions if _in(a.name, name)),
                        tuple(m for m in kept_mlps if _in(m.name, name)))
            for number, name in enumerate(blocks)
        ]  # fmt: skip

        def outside(parts: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(p for p in parts if not any(_in(p.name, block) for block in blocks))

        return ModelMap(
            width, stream, tuple(inside), outside(norms), outside(kept_attentions),
            outside(kept_mlps), tuple(channels), convolutions, tables, head,
            tuple(self.ties.values()), self.unknown,
        )  # fmt: skip

    def _attentions(self) -> list[MappedAttention]:
        found = []
        for call in self.trace.attentions:
            try:
                found.append(self.reader.attention(call))
            except Unread as why:
                self.unknown[call.origin.name] = f"an attention, but {why}"
        return found

    def _mlps(self) -> list[MappedMlp]:
        found = []
        for product in self.trace.products:
            try:
                if (mlp := self.reader.mlp(product)) is not None:
                    found.append(mlp)
            except Unread as why:
                self.unknown[_module(product.weight)] = f"the end of an MLP, but {why}"
        return found

    def _verdict(self, units: Units, scaled: Scaled = ()) -> Units | str:
        """The units as tried, or those of another block of the same kind."""
        key = signature(self.model, units)
        if key not in self.verdicts:
            self.verdicts[key] = units.name, tried(self.calls, units, scaled)
        name, found = self.verdicts[key]
        if isinstance(found, str):
            return found.replace(name, units.name) if name else found
        return replace(
            units, order_matters=found.order_matters, needed=found.needed, checked=found.checked
        )

    def _accept(self, units: Units, scaled: Scaled = ()) -> Units | None:
        found = self._verdict(units, scaled)
        if isinstance(found, Units):
            self.used |= {piece.tensor for piece in found.slices}
            return found
        for piece in units.slices:
            self.unknown[_module(piece.tensor)] = found
        return None

    def _tried_attention(self, part: MappedAttention) -> MappedAttention | None:
        pairs: Scaled = ((part.query, part.key), (part.value, (part.output,)))
        normed = part.query_norm or part.key_norm
        heads = self._accept(part.heads, () if normed else pairs)
        groups = None if heads is None else self._accept(part.groups, () if normed else pairs)
        if heads is None or groups is None:
            return None
        return replace(part, heads=heads, groups=groups)

    def _tried_mlp(self, part: MappedMlp) -> MappedMlp | None:
        neurons = self._accept(part.neurons)
        return None if neurons is None else replace(part, neurons=neurons)

    def _tried_experts(self, module: str, claims: list[StackedExperts]) -> list[MappedMlp]:
        why = "names and shapes fit none"
        for claim in claims:
            neurons = self._verdict(claim.mlp.neurons)
            if isinstance(neurons, Units):
                self.used |= {s.tensor for s in (*neurons.slices, *claim.given, *claim.made)}
                self.reader.experts[module] = claim
                return [replace(claim.mlp, neurons=neurons, stacked=self._stacked(claim.mlp))]
            why = neurons
        self.unknown[module] = f"stacked matrices, in no order that is known: {why}"
        return []

    def _stacked(self, mlp: MappedMlp) -> Units | None:
        """The experts as units; None where the router is not known, or it does not hold."""
        claim = stacked_units(self.model, mlp, self.trace.products)
        found = claim if isinstance(claim, str) else self._verdict(claim)
        if isinstance(found, Units):
            self.used |= {piece.tensor for piece in found.slices}
            return found
        self.unknown[f"experts of {mlp.name}"] = found
        return None

    def _stream_root(self) -> int | None:
        """The class of origins that the residual sums of blocks tie; None where there are none."""
        origins = self.trace.origins
        sums = [origins.root(o) for o in origins.all if o.kind == "sum"]
        tables = [origins.root(o) for o in origins.all if o.kind == "embedding"]
        if not (self.trace.attentions or tables) or not sums + tables:
            return None
        return max(sums or tables, key=(sums or tables).count)

    def _members(self, root: int) -> list[Origin]:
        return [o for o in self.trace.origins.all if self.trace.origins.root(o) == root]

    def _stream(self, root: int | None) -> tuple[Units | None, int]:
        if root is None:
            return None, 0
        members = self._members(root)
        try:
            return self._accept_all(self.reader.channels(members, "stream", "")), members[0].size
        except Unread as why:
            self.unknown["residual stream"] = str(why)
            return None, members[0].size

    def _accept_all(self, units: Units) -> Units | None:
        """Units of the full model are tried where a copy of it is not too large."""
        if sum(p.numel() for p in self.model.parameters()) > LARGEST_COPY:
            return units
        if units.order_matters:
            return units
        found = tried(self.calls, units)
        if isinstance(found, str):
            self.unknown[f"{units.kind} of {_module(units.makers[0].tensor)}"] = found
            return None
        return found

    def _channels(self, stream: int | None) -> tuple[list[Units], dict[int, int]]:
        """The channels of convolutions, and of which class of origins each is."""
        found: list[Units] = []
        places: dict[int, int] = {}
        origins = self.trace.origins
        roots = [origins.root(p.origin) for p in self.trace.products if p.convolution]
        for root in dict.fromkeys(roots):
            if root == stream:
                continue
            members = self._members(root)
            try:
                units = self._accept_all(self.reader.channels(members, "channels", ""))
            except Unread as why:
                name = next(o.name for o in members if o.kind == "linear")
                self.unknown[f"channels of {_module(name)}"] = str(why)
                continue
            if units is not None:
                places[root] = len(found)
                found.append(units)
                self.used |= {piece.tensor for piece in units.slices}
        return found, places

    def _convolutions(self, places: dict[int, int]) -> tuple[MappedConvolution, ...]:
        found = []
        for product in self.trace.products:
            if product.convolution:
                norm = next(
                    (n.module for n in self.trace.norms if n.before is product.origin), None
                )
                place = places.get(self.trace.origins.root(product.origin))
                found.append(MappedConvolution(_module(product.weight), norm, place))
                self.used.add(product.weight)
        return tuple(found)

    def _tables(self, stream: int | None) -> tuple[MappedTable, ...]:
        origins = self.trace.origins
        found = {}
        for o in origins.all:
            if o.kind in ("embedding", "table") and origins.root(o) == stream:
                tokens = self._is_token_table(o.name)
                found[o.name] = MappedTable(o.name, "tokens" if tokens else "other",
                                            self.ties.get(o.name, ()))  # fmt: skip
        self.used |= set(found)
        return tuple(found.values())

    def _is_token_table(self, name: str) -> bool:
        getter = getattr(self.model, "get_input_embeddings", None)
        weight = getattr(getter(), "weight", None) if callable(getter) else None
        first = next((o.name for o in self.trace.origins.all if o.kind == "embedding"), None)
        return self.model.get_parameter(name) is weight if weight is not None else name == first

    def _head(self) -> str | None:
        made = [p.weight for p in self.trace.products if p.origin in self.trace.made]
        head = made[-1] if made else None
        self.used |= {head} if head else set()
        return head

    def _name_unknown(self) -> None:
        """Name each module whose tensors are in no part."""
        self.used |= {
            f"{n.module}.{leaf}"
            for n in self.trace.norms
            for leaf, _ in self.model.get_submodule(n.module).named_parameters()
        }
        self.used |= {p.bias for p in self.trace.products if p.bias and p.weight in self.used}
        products = {p.weight: p for p in self.trace.products}
        tables = {o.name for o in self.trace.origins.all if o.kind in ("embedding", "table")}
        for name, _ in self.model.named_parameters():
            path = _module(name)
            if name in self.used or path in self.unknown:
                continue
            if name in products:
                lost = products[name].lost
                why = lost or "a linear layer that is no part of an attention or an MLP"
            elif (form := form_of(self.model.get_submodule(path))) and not form.trains:
                why = f"its weight is held as {form.name}"
            elif name in tables:
                why = f"{_leaf(name)} is not added to the residual stream"
            elif path in self.trace.called:
                why = "it holds parameters that no known operator reads"
            else:
                why = "it was not called, or read without a call"
            self.unknown.setdefault(path or name, why)

    def _blocks(self) -> list[str]:
        """The blocks of the model's lists, in the order in which they were called."""
        blocks = {
            f"{name}.{own}".lstrip("."): block
            for name, each in outermost_lists(self.model).items()
            for own, block in each.named_children()
        }
        found = (name for name in self.trace.called if name in blocks)
        return [name for name in dict.fromkeys(found) if any(True for _ in blocks[name].children())]


def _in(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _leaf(tensor: str) -> str:
    return tensor.rpartition(".")[2]
