"""Heads, neurons and channels, read off a trace. What is read is a claim; `map_check` tries it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from modicum.core.layers.map_calls import AttentionCall, Product, Trace
from modicum.core.layers.map_experts import StackedExperts
from modicum.core.layers.map_labels import Labels, Origin, own_labels
from modicum.core.layers.map_norms import BATCH_NORMS
from modicum.core.layers.map_parts import (
    MappedAttention,
    MappedMlp,
    MappedSlice,
    RotaryPairs,
    Units,
    fitted,
)

Slices = tuple[MappedSlice, ...]
# Operators that say nothing of an activation.
_LINEAR = {"add", "mul", "sub", "div", "neg", "rsub", "addcmul", "index_add"}


class Unread(Exception):
    """A part of a trace is not of a form that is known; the text says why."""


class Reader:
    """Reads parts off a trace of `model`."""

    def __init__(self, model: nn.Module, trace: Trace) -> None:
        self.model, self.trace, self.origins = model, trace, trace.origins
        self.products = {p.origin.number: p for p in trace.products}
        self.norms = {n.origin.number: n for n in trace.norms if n.origin is not None}
        self.called = set(trace.called)
        self.experts: dict[str, StackedExperts] = {}  # those whose claim held

    def tie_shared(self) -> None:
        """Note that channels are the same where two uses of one tensor give or read them."""
        users: dict[tuple[str, int], list[Origin]] = {}
        for origin in self.origins.all:
            if origin.kind in ("embedding", "table"):
                dim = self.model.get_parameter(origin.name).ndim - 1
                users.setdefault((origin.name, dim), []).append(origin)
        for number, call in self.norms.items():
            users.setdefault((call.module, 0), []).append(self.origins.all[number])
        for product in self.trace.products:
            users.setdefault((product.weight, product.out_dim), []).append(product.origin)
            for given in (product.given or ())[:1]:
                read = self.origins.sole(given.labels)
                if read is not None and torch.equal(given.labels, own_labels(read)):
                    users.setdefault((product.weight, product.in_dim), []).append(read)
        for group in users.values():
            for origin in group[1:]:
                if origin.size == group[0].size:
                    self.origins.tie(group[0], origin)

    def makers(self, labels: Tensor) -> Slices:
        """The slices of weights, biases and norms that make channels, on the grid of `labels`.

        Raises:
            Unread: several layers make them, or none that is known, or no grid.
        """
        origin = self.origins.sole(labels)
        if origin is None:
            raise Unread("several layers make its channels")
        places = labels - origin.first
        if origin.number in self.products:
            product = self.products[origin.number]
            found = [self._slice(product.weight, product.out_dim, product.out_places[places])]
            if product.bias:
                found.append(self._slice(product.bias, 0, product.out_places[places]))
            return tuple(found)
        if origin.number in self.norms:
            call = self.norms[origin.number]
            assert call.before is not None
            own = self._vectors(call.module, places)
            return (*self.makers(places + call.before.first), *own)
        raise Unread(f"its channels come of {origin.kind} {origin.name}".rstrip())

    def _vectors(self, module: str, places: Tensor) -> Slices:
        """The slices of what a norm has per channel, its running statistics too."""
        layer = self.model.get_submodule(module)
        named = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
        return tuple(self._slice(f"{module}.{n}", 0, places) for n, t in named if t.ndim == 1)

    def _slice(self, tensor: str, dim: int, places: Tensor) -> MappedSlice:
        found = fitted(tensor, dim, places)
        if found is None:
            raise Unread(f"its places in {tensor} are no regular grid")
        return found

    def readers(self, origin: Origin) -> list[Product]:
        """The products that read channels of an origin, or a mixture of them with others."""
        last = origin.first + origin.size
        return [
            p for p in self.trace.products
            if p.given and any(
                bool(((x.labels >= origin.first) & (x.labels < last)).any()) for x in p.given
            )
        ]  # fmt: skip

    def around(self, slices: Slices) -> str:
        """The smallest module that was called and holds all these tensors."""
        paths = [piece.tensor.split(".")[:-1] for piece in slices]
        shared = paths[0]
        for path in paths[1:]:
            equal = [a == b for a, b in zip(shared, path, strict=False)]
            shared = shared[: equal.index(False) if False in equal else len(equal)]
        while shared and ".".join(shared) not in self.called:
            shared = shared[:-1]
        return ".".join(shared)

    def attention(self, call: AttentionCall) -> MappedAttention:
        """The attention of a call.

        Raises:
            Unread: something of it is not of a known form.
        """
        if not (call.query and call.key and call.value):
            raise Unread("its queries, keys or values could not be followed")
        query, key, value = call.query[0].labels, call.key[0].labels, call.value[0].labels
        heads, width = query.shape
        each = _repeats(key, heads)
        if each is None or _repeats(value, heads) != each or len(call.value) != 1:
            raise Unread("keys and values are not shared by runs of heads")
        step = each if len(key) == heads else 1
        kv_heads = heads // each
        queries = self.makers(query.reshape(kv_heads, each, width))
        keys = self.makers(key[::step].reshape(kv_heads, 1, width))
        step = each if len(value) == heads else 1
        values = self.makers(value[::step].reshape(kv_heads, 1, -1))
        output = self._output(call.origin, kv_heads, each)
        everything = (*queries, *keys, *values, output)
        name = self.around(everything)
        makers = everything[:-1] if each == 1 else queries
        within = each if 1 < kv_heads < heads else heads
        groups = Units("groups", name, kv_heads, everything[:-1], (output,))
        return MappedAttention(
            name, width, value.shape[1], kv_heads, queries, keys, values, output,
            _rotary(call.query), _norm_of(call.query), _norm_of(call.key),
            Units("heads", name, heads, makers, (output,), within), groups,
        )  # fmt: skip

    def _output(self, origin: Origin, kv_heads: int, each: int) -> MappedSlice:
        found = self.readers(origin)
        if len(found) != 1 or origin.operators:
            raise Unread("not one linear layer alone reads what its heads give")
        (product,) = found
        given = product.given or ()
        if len(given) != 1 or not torch.equal(given[0].labels.sort().values, own_labels(origin)):
            raise Unread(f"{product.weight} reads more than what its heads give")
        places = product.in_places[given[0].labels.argsort()]
        return self._slice(product.weight, product.in_dim, places.reshape(kv_heads, each, -1))

    def mlp(self, down: Product) -> MappedMlp | None:
        """The MLP that ends with a product; None where that reads no hidden layer of one."""
        given = down.given or ()
        sources = [self.origins.sole(x.labels) for x in given]
        if down.convolution or not sources or None in sources:
            return None
        made = [self._linear(origin) for origin in sources if origin is not None]
        if not all(made) or any(p.convolution for p in made if p is not None):
            return None
        if all(not x.operators for x in given) and len(given) == 1:
            return None  # one linear layer after another, as a projection of the stream is
        try:
            sides = [self.makers(x.labels[:, None]) for x in given]
        except Unread as why:
            raise Unread(f"before {down.weight}: {why}") from None
        for origin in sources:
            assert origin is not None
            if self.readers(origin) != [down] or origin in self.trace.made or origin.lost:
                raise Unread(f"something else than {down.weight} reads its hidden layer")
        piece = self._slice(down.weight, down.in_dim, down.in_places[:, None])
        if len({(s.tensor, s.dim, s.start, s.strides) for side in sides for s in side}) < sum(
            map(len, sides)
        ):
            raise Unread("its hidden layer mixes neurons")
        makers = tuple(s for side in sides for s in side)
        name = self.around((*makers, piece))
        units = Units("neurons", name, len(down.in_places), makers, (piece,))
        used = [x.operators - _LINEAR for x in given]
        gates = [i for i, operators in enumerate(used) if operators]
        gate = gates[0] if len(sides) == 2 and gates else None
        ups = [side for i, side in enumerate(sides) if i != gate]
        return MappedMlp(
            name, tuple(s for side in ups for s in side), () if gate is None else sides[gate],
            piece, units, tuple(sorted(set().union(*used))),
        )  # fmt: skip

    def _linear(self, origin: Origin) -> Product | None:
        """The product that makes an origin, through norms."""
        while origin.number in self.norms:
            before = self.norms[origin.number].before
            if before is None:
                return None
            origin = before
        return self.products.get(origin.number)

    def channels(self, members: list[Origin], kind: str, name: str) -> Units:
        """The channels that all `members` have, which sums and norms tie.

        Raises:
            Unread: something uses them in a way that is not known.
        """
        size = members[0].size
        makers: list[MappedSlice] = []
        readers: list[MappedSlice] = []
        matters, needed, runs = "", "", size
        for origin in members:
            if origin.lost:
                raise Unread(origin.lost)
            if origin in self.trace.made:
                matters = needed = "the model gives these channels"
            makers += self._making(origin)
            readers += self._reading(origin)
            if origin.number in self.norms:
                layer = self.model.get_submodule(self.norms[origin.number].module)
                if isinstance(layer, nn.GroupNorm):
                    runs = min(runs, layer.num_groups)
                elif not isinstance(layer, BATCH_NORMS):
                    needed = needed or "norms take the mean over all channels"
        for call in self.trace.experts:
            if call.given and any(self.origins.sole(x.labels) in members for x in call.given):
                readers += self._of_experts(call.module, given=True)
        slices = [
            tuple(replace(_grouped(s, runs)) for s in dict.fromkeys(side))
            for side in (makers, readers)
        ]
        assert kind in ("stream", "channels")
        return Units(
            "stream" if kind == "stream" else "channels", name, runs, slices[0], slices[1],
            order_matters=matters, needed=needed,
        )  # fmt: skip

    def _making(self, origin: Origin) -> Slices:
        """The slices that make the channels of an origin."""
        column = torch.arange(origin.size)[:, None]
        if origin.number in self.products:
            return self.makers(own_labels(origin)[:, None])
        if origin.number in self.norms:
            return self._vectors(self.norms[origin.number].module, column)
        if origin.kind in ("embedding", "table"):
            dim = self.model.get_parameter(origin.name).ndim - 1
            return (self._slice(origin.name, dim, column),)
        if origin.kind == "experts":
            return tuple(self._of_experts(origin.name, given=False))
        if origin.kind not in ("sum", "bias"):
            raise Unread(f"its channels come of {origin.kind} {origin.name}")
        return ()

    def _reading(self, origin: Origin) -> list[MappedSlice]:
        """The slices of products that read an origin."""
        found = []
        for product in self.readers(origin):
            given = product.given or ()
            if len(given) != 1 or self.origins.sole(given[0].labels) is not origin:
                raise Unread(f"{product.weight} reads its channels mixed with others")
            labels = given[0].labels
            if product.groups > 1:
                continue  # one kernel per channel, which makes channels with the same order
            if len(labels) % origin.size:
                raise Unread(f"{product.weight} reads a part of its channels")
            order = labels.argsort(stable=True).reshape(origin.size, -1)
            if not bool((labels[order] == own_labels(origin)[:, None]).all()):
                raise Unread(f"{product.weight} reads a part of its channels")
            found.append(self._slice(product.weight, product.in_dim, product.in_places[order]))
        return found

    def _of_experts(self, module: str, given: bool) -> list[MappedSlice]:
        if module not in self.experts:
            raise Unread(f"how the experts of {module} lie in their tensors is not known")
        claim = self.experts[module]
        return list(claim.given if given else claim.made)


def _grouped(piece: MappedSlice, runs: int) -> MappedSlice:
    """The slice with its first dimension split into runs, where channels move in groups."""
    if piece.shape[0] == runs:
        return piece
    each, stride = piece.shape[0] // runs, piece.strides[0]
    return replace(
        piece,
        shape=(runs, each, *piece.shape[1:]),
        strides=(each * stride, stride, *piece.strides[1:]),
    )


def _repeats(rows: Tensor, heads: int) -> int | None:
    """How many consecutive heads share each row [heads or kv_heads, width]; None: it varies."""
    if heads % len(rows):
        return None
    each = heads // len(rows)
    if len(rows) < heads:
        return each
    same = (rows == rows[:1]).all(1).long()
    each = int(same.cumprod(0).sum())
    if heads % each:
        return None
    first = rows[torch.arange(heads) // each * each]
    return each if torch.equal(first, rows) else None


def _norm_of(layers: tuple[Labels, ...]) -> str | None:
    """The norm among the operators that queries or keys went through."""
    norms = [o.removeprefix("norm ") for o in layers[0].operators if o.startswith("norm ")]
    return norms[0] if norms else None


def _rotary(query: tuple[Labels, ...]) -> RotaryPairs | None:
    """How the channels of a head are paired, from the labels of two layers.

    Raises:
        Unread: they are mixed in another way.
    """
    if len(query) == 1:
        return None
    own, other = query[0].labels, query[1].labels
    turned = int((other[0] >= 0).sum())
    place = torch.arange(turned)
    patterns = {"halves": (place + turned // 2) % max(turned, 1), "neighbours": place ^ 1}
    for layout, partner in patterns.items():
        if len(query) == 2 and torch.equal(other[:, :turned], own[:, partner]):
            return RotaryPairs("halves" if layout == "halves" else "neighbours", turned)
    raise Unread("the channels of its heads are mixed in a way that is no rotation of pairs")
