"""One forward pass in which labels follow the channels of each layer from operator to operator.

What the operators tell: which parameter makes a product, what its input was, what queries, keys
and values of an attention are, and what is added to what. Values are never looked at, but by a
mixture of experts, which must choose some. Knows nothing of what a head or a block is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.map_labels import (
    NOTHING,
    Labels,
    Origin,
    Origins,
    Trail,
    along,
    by_head,
    laid,
    layers_along,
    mixed,
)
from modicum.core.torch_private import operators_shown

_KEEPS = {"clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh", "_softmax"}
_KEEPS |= {"native_dropout", "_safe_softmax", "dropout"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_MOVES = {"transpose", "t", "permute", "unsqueeze", "squeeze", "expand", "slice", "select", "split"}
_MOVES |= {"split_with_sizes", "unbind", "roll", "repeat", "flip", "index_select", "index"}
_MOVES |= {"constant_pad_nd", "numpy_T", "unsafe_split", "narrow", "chunk", "movedim"}
_REDUCES = {"mean", "sum", "amax", "amin"}
_POOLS = {"max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_avg_pool2d"}
_POOLS |= {"upsample_nearest2d", "upsample_bilinear2d", "max_pool1d", "avg_pool1d", "max_pool2d"}


@dataclass
class Product:
    """A product with a parameter: of a linear layer, or a convolution.

    Args:
        weight, bias: names of parameters.
        out_dim, in_dim: dimensions of the weight; `out_places`, `in_places` its places there.
        given: the labels of the input's channels; None where they are not known, for `lost`.
    """

    origin: Origin
    weight: str
    out_dim: int
    out_places: Tensor
    in_dim: int
    in_places: Tensor
    given: tuple[Labels, ...] | None
    lost: str = ""
    bias: str | None = None
    groups: int = 1
    convolution: bool = False


@dataclass
class NormCall:
    """A call of a module with one scale per channel; `origin` None: one per channel of a head."""

    module: str
    origin: Origin | None
    before: Origin | None
    labels: Tensor | None
    shape: torch.Size


@dataclass
class AttentionCall:
    """Softmax of queries and keys times values: labels [heads, width] of each."""

    origin: Origin
    query: tuple[Labels, ...]
    key: tuple[Labels, ...]
    value: tuple[Labels, ...]


@dataclass
class ExpertsCall:
    """A call of a module that holds stacked matrices."""

    module: str
    origin: Origin
    given: tuple[Labels, ...] | None


@dataclass
class Trace:
    """What one forward pass showed."""

    origins: Origins = field(default_factory=Origins)
    products: list[Product] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    made: list[Origin] = field(default_factory=list)  # what the model gave
    called: list[str] = field(default_factory=list)


def trace(model: nn.Module, names: Mapping[int, str], run: Callable[[], Any]) -> Trace:
    """Run the model once and follow channels.

    Args:
        names: of parameters by their id; a tensor with several names has one here.
        run: calls the model and gives its output.
    """
    follower = _Follower(model, names)
    with torch.no_grad(), ExitStack() as stack:
        for handle in follower.hooks():
            stack.callback(handle.remove)
        with operators_shown(follower.see):
            output = run()
    follower.finish(output)
    return follower.found


@dataclass
class _Weight:
    """A parameter or a view of one: for each dimension of the parameter the places there."""

    name: str
    places: tuple[Tensor, ...]


class _Follower:
    """Takes each operator, runs it, and does with the labels what it did with the values."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self.model, self.found, self.origins = model, Trace(), Origins()
        self.found.origins = self.origins
        self._trails: dict[int, tuple[Tensor, Trail]] = {}
        self._weights: dict[int, tuple[Tensor, _Weight]] = {}
        self._tables: dict[str, Trail] = {}
        self._shapes = {names[id(p)]: p.shape for p in model.parameters()}
        for parameter in model.parameters():
            shape = parameter.shape
            places = tuple(
                torch.arange(n).reshape([-1 if d == i else 1 for d in range(len(shape))])
                .expand(shape) for i, n in enumerate(shape)
            )  # fmt: skip
            name = names[id(parameter)]
            self._weights[id(parameter)] = parameter, _Weight(name, places)
        self._inside: list[str] = []  # modules whose operators are not looked at
        self._path: list[str] = []

    def hooks(self) -> Iterator[Any]:
        """Register what notes the calls of modules."""
        for name, module in self.model.named_modules():
            opaque = _kind(module)
            yield module.register_forward_pre_hook(partial(self._enter, name, opaque))
            yield module.register_forward_hook(
                partial(self._leave, name, opaque), with_kwargs=True, prepend=True
            )

    def _enter(self, name: str, opaque: str, module: nn.Module, args: Any) -> None:
        if not self._inside:
            self.found.called.append(name)
            self._path.append(name)
        if opaque or self._inside:
            self._inside.append(name)

    def _leave(
        self, name: str, opaque: str, module: nn.Module, args: Any, kwargs: Any, out: Any
    ) -> None:
        if self._inside:
            self._inside.pop()
        if self._inside:
            return
        self._path.pop()
        given = next((t for t in tensors((args, kwargs))), None)
        if opaque and given is not None and isinstance(out, Tensor):
            (self._normed if opaque == "norm" else self._chosen)(name, module, given, out)

    def _normed(self, name: str, module: nn.Module, given: Tensor, out: Tensor) -> None:
        trail, size = self.trail(given), next(module.parameters()).numel()
        if trail is None:
            return
        if out.shape != given.shape:
            self._lose([trail], f"the module {name}", out)
            return
        before = self.origins.aligned(trail, given.ndim)
        if before is not None and before[0].size == size:
            self._use([trail], "a norm")
            origin = self.origins.new("norm", name, size)
            self.origins.tie(origin, before[0])
            self._set(out, Trail((Labels(laid(origin, out.shape, before[1])),)))
            self.found.norms.append(NormCall(name, origin, before[0], None, out.shape))
            return
        labels = trail.layers[0].labels if len(trail.layers) == 1 else None
        self.found.norms.append(NormCall(name, None, None, labels, out.shape))
        self._set(out, mixed([trail], out.shape, f"norm {name}"))

    def _chosen(self, name: str, module: nn.Module, given: Tensor, out: Tensor) -> None:
        trail = self.trail(given)
        known = layers_along(trail, given.ndim - 1)
        origin = self.origins.new("experts", name, out.shape[-1])
        self.found.experts.append(ExpertsCall(name, origin, known))
        if trail is not None and not _plain(known):
            self._use([trail], "experts")
        self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))

    def see(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and follow the channels through it."""
        out = operator(*args, **kwargs)
        if not self._inside:
            given = list(tensors((args, kwargs)))
            if any(id(t) in self._trails or id(t) in self._weights for t in given):
                self._follow(operator, args, kwargs, out, given)
        return out

    def finish(self, output: Any) -> None:
        """Note which origins the model gives as they are."""
        for tensor in tensors(output):
            for layer in (self.trail(tensor) or Trail()).layers:
                origins = {self.origins.of(int(v)).number for v in layer.labels.unique() if v >= 0}
                self.found.made += [self.origins.all[number] for number in sorted(origins)]

    def trail(self, tensor: Any) -> Trail | None:
        """What is known of a tensor; of a parameter, that its last dimension are channels."""
        if id(tensor) in self._trails:
            return self._trails[id(tensor)][1]
        if id(tensor) not in self._weights:
            return None
        _, weight = self._weights[id(tensor)]
        if weight.name not in self._tables:
            size = self._shapes[weight.name][-1] if self._shapes[weight.name] else 1
            origin = self.origins.new("table", weight.name, size)
            self._tables[weight.name] = Trail((Labels(torch.tensor(origin.first)),))
        first = int(self._tables[weight.name].layers[0].labels)
        if not weight.places:
            return None
        return Trail((Labels(weight.places[-1] + first),))

    def _set(self, tensor: Tensor, trail: Trail) -> None:
        self._trails[id(tensor)] = tensor, trail

    def _use(self, trails: list[Trail], operator: str) -> None:
        """Note for the origins in order which operator changed or mixed what they gave."""
        for trail in trails:
            for layer in trail.layers:
                if (origin := self.origins.sole(layer.labels)) is not None:
                    origin.operators.add(operator)

    def _lose(self, trails: list[Trail], what: str, out: Any) -> None:
        where = f" in {self._path[-1]}" if self._path and self._path[-1] else ""
        why = f"{what}{where} cannot be followed"
        self._use(trails, what)
        for trail in trails:
            why = trail.lost or why
            for layer in trail.layers:
                for value in layer.labels.unique()[:8]:
                    if value >= 0:
                        self.origins.of(int(value)).lost = why
        for tensor in tensors(out):
            if tensor.is_floating_point():
                self._set(tensor, Trail(lost=why))

    def _follow(
        self, operator: Any, args: Any, kwargs: Any, out: Any, given: list[Tensor]
    ) -> None:
        name = str(operator.overloadpacket).removeprefix("aten.")
        name = name[:-1] if name.endswith("_") and not name.startswith("__") else name
        first = args[0] if args else None
        if isinstance(first, Tensor) and id(first) in self._weights and name in _MOVES | _KEEPS:
            self._view_of_weight(operator, name, args, kwargs, out)
        elif name in _KEEPS and isinstance(first, Tensor):
            if (trail := self.trail(first)) is not None:
                self._set(next(tensors(out)), trail)
        elif name == "copy" and isinstance(out, Tensor):
            self._set(out, self.trail(args[1]) or Trail(lost="a copy of unknown values"))
        elif name in _MOVES | _VIEWS | _REDUCES | _POOLS and isinstance(first, Tensor):
            self._moved(operator, name, args, kwargs, out)
        elif name in ("cat", "stack"):
            self._joined(operator, name, args, kwargs, out)
        elif name in ("mm", "addmm", "linear", "bmm", "baddbmm", "matmul"):
            bias = first if name in ("addmm", "baddbmm") else args[2] if len(args) > 2 else None
            left, right = args[1:3] if name in ("addmm", "baddbmm") else args[:2]
            self._product(name, left, right, bias, out)
        elif name == "convolution":
            self._convolved(args, out)
        elif name == "embedding" and id(first) in self._weights:
            origin = self.origins.new("embedding", self._weights[id(first)][1].name, out.shape[-1])
            self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))
        elif name.startswith(("_scaled_dot_product", "scaled_dot_product")):
            query, key, value = (self._heads(t, t.shape[1]) for t in args[:3])
            self._attended(query, key, value, next(tensors(out)))
        elif torch.Tag.pointwise in operator.tags or name == "gelu":
            self._pointwise(name, given, out)
        else:
            trails = [t for t in (self.trail(tensor) for tensor in given) if t is not None]
            self._lose(trails, f"the operator {name}", out)

    def _view_of_weight(self, operator: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        """Views of parameters keep the places; anything else of a parameter is forgotten."""
        places = self._weights[id(args[0])][1].places
        moved = [_do(operator, name, place, args, kwargs, out) for place in places]
        for number, tensor in enumerate(tensors(out)):
            parts = [m if isinstance(m, Tensor) else m[number] for m in moved if m is not None]
            if len(parts) == len(places):
                found = _Weight(self._weights[id(args[0])][1].name, tuple(parts))
                self._weights[id(tensor)] = tensor, found

    def _moved(self, operator: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        trail = self.trail(args[0])
        if trail is None:
            return
        moved = [_do(operator, name, x.labels, args, kwargs, out) for x in trail.layers]
        if any(m is None for m in moved):
            self._lose([trail], f"the operator {name}", out)
            return
        if name in _REDUCES | _POOLS:
            self._use([trail], name)
        for number, tensor in enumerate(tensors(out)):
            layers = []
            for part, layer in zip(moved, trail.layers, strict=True):
                labels = part if isinstance(part, Tensor) else part[number]
                layers.append(Labels(labels, layer.operators))
            self._set(tensor, Trail(tuple(layers), trail.scores, trail.lost))
            if name in _POOLS:
                break

    def _joined(self, operator: Any, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        parts = list(args[0])
        trails = [self.trail(part) or Trail() for part in parts]
        dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % out.ndim
        found = [self.origins.aligned(t, p.ndim) for t, p in zip(trails, parts, strict=True)]
        sizes = {(a[0].size, a[1]) for a in found if a is not None}
        if name == "cat" and len(sizes) == 1 and None not in found and sizes != {(0, dim)}:
            (size, channels), = sizes
            if channels != dim:
                self._summed([a[0] for a in found if a], trails, "cat", channels, out)
                return
        layers = []
        for place in range(max((len(trail.layers) for trail in trails), default=0)):
            labels = [
                t.layers[place].labels if place < len(t.layers) else torch.full(p.shape, NOTHING)
                for t, p in zip(trails, parts, strict=True)
            ]
            every = [t.layers[place].operators for t in trails if place < len(t.layers)]
            layers.append(Labels(operator(labels, *args[1:], **kwargs), frozenset().union(*every)))
        lost = next((t.lost for t in trails if t.lost), "")
        scores = next((t.scores for t in trails if t.scores), None)
        self._set(out, Trail(tuple(layers), scores, "" if layers or scores else lost))

    def _summed(
        self, origins: list[Origin], trails: list[Trail], how: str, dim: int, out: Tensor
    ) -> None:
        where = self._path[-1] if self._path else ""
        origin = self.origins.new("sum", where, origins[0].size)
        self._use(trails, how)
        for other in origins:
            self.origins.tie(other, origin)
        self._set(out, Trail((Labels(laid(origin, out.shape, dim)),)))

    def _pointwise(self, name: str, given: list[Tensor], out: Any) -> None:
        if not isinstance(out, Tensor):
            return
        known = [(t, trail) for t in given if (trail := self.trail(t)) is not None]
        known = known or []
        trails = [trail for _, trail in known if trail.layers or trail.scores or trail.lost]
        aligned = [self.origins.aligned(trail, t.ndim) for t, trail in known]
        if len(aligned) == 2 and all(aligned):
            (one, dim), (other, other_dim) = (a for a in aligned if a)
            from_end = out.ndim - known[0][0].ndim, out.ndim - known[1][0].ndim
            same = dim + from_end[0] == other_dim + from_end[1] and one.size == other.size
            kinds = (one.kind, other.kind)
            if same and one is not other and name in ("add", "sub"):
                for a, b in ((one, other), (other, one)):
                    if b.kind == "table" and a.kind == "linear" and self._bias(a, b, trails):
                        labels = laid(a, out.shape, dim + from_end[0])
                        self._set(out, Trail((Labels(labels),)))
                        return
                self._summed([one, other], trails, name, dim + from_end[0], out)
                return
            if same and one is not other and "table" in kinds:
                self.origins.tie(one, other)
                place = 1 if kinds[0] == "table" else 0
                trails = [trails[place]]
        self._use(trails, name)
        try:
            self._set(out, mixed(trails, out.shape, name))
        except RuntimeError:
            self._lose(trails, f"the operator {name}", out)

    def _bias(self, made: Origin, table: Origin, trails: list[Trail]) -> bool:
        """Whether a table of one row that is added is the bias of a product."""
        shape = self._shapes[table.name]
        product = next(p for p in self.found.products if p.origin is made)
        if len(shape) != 1 or product.bias or any(t.layers[0].operators for t in trails):
            return False
        product.bias, table.kind = table.name, "bias"
        return True

    def _product(self, name: str, left: Any, right: Any, bias: Any, out: Tensor) -> None:
        if id(right) in self._weights and id(left) not in self._weights:
            weight = self._weights[id(right)][1]
            sides = (1, 0) if name == "linear" else (0, 1)
            axes = [_varying(weight, axis) for axis in sides] if right.ndim == 2 else [None, None]
            trail = self.trail(left)
            if axes[0] is None or axes[1] is None:
                self._lose([trail] if trail else [], f"a product with a view of {weight.name}", out)
                return
            (in_dim, in_places), (out_dim, out_places) = axes[0], axes[1]
            origin = self.origins.new("linear", weight.name, out.shape[-1])
            given = layers_along(trail, left.ndim - 1)
            if trail is not None and not _plain(given):
                self._use([trail], "a product")
            lost = trail.lost if trail is not None else "its input was not followed"
            found = Product(origin, weight.name, out_dim, out_places, in_dim, in_places, given, lost)
            if id(bias) in self._weights:
                found.bias = self._weights[id(bias)][1].name
            self.found.products.append(found)
            self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))
            return
        one, other = self.trail(left), self.trail(right)
        if one is not None and one.scores is not None and other is not None and out.ndim == 3:
            value = by_head(other, right.shape[0], right.shape[2], 1)
            self._attended(*one.scores, value, out)
        elif one is not None and other is not None and one.layers and other.layers and out.ndim == 3:
            keys = Trail(tuple(Labels(x.labels.transpose(1, 2)) for x in other.layers))
            scores = (
                by_head(one, left.shape[0], left.shape[2], 1),
                by_head(keys, right.shape[0], right.shape[1], 1),
            )
            self._use([one, other], name)
            self._set(out, Trail(scores=scores))
        else:
            self._lose([t for t in (one, other) if t is not None], f"the operator {name}", out)

    def _heads(self, tensor: Tensor, heads: int) -> tuple[Labels, ...]:
        if tensor.ndim != 4 or tensor.shape[0] != 1:
            return ()
        return by_head(self.trail(tensor), heads, tensor.shape[-1], 2)

    def _attended(
        self,
        query: tuple[Labels, ...],
        key: tuple[Labels, ...],
        value: tuple[Labels, ...],
        out: Tensor,
    ) -> None:
        heads, width = out.shape[-3], out.shape[-1]
        name = self._path[-1] if self._path else ""
        origin = self.origins.new("attention", name, heads * width)
        self.found.attentions.append(AttentionCall(origin, query, key, value))
        labels = torch.arange(origin.first, origin.first + origin.size).reshape(heads, 1, width)
        self._set(out, Trail((Labels(labels.expand(out.shape)),)))

    def _convolved(self, args: Any, out: Tensor) -> None:
        given, kernel, bias, groups, transposed = args[0], args[1], args[2], args[8], args[6]
        trail = self.trail(given)
        if id(kernel) not in self._weights or transposed:
            self._lose([trail] if trail else [], "this convolution", out)
            return
        name, channels = self._weights[id(kernel)][1].name, kernel.shape[0]
        origin = self.origins.new("linear", name, channels)
        lost = trail.lost if trail is not None else "its input was not followed"
        found = Product(origin, name, 0, torch.arange(channels), 1, torch.arange(kernel.shape[1]),
                        layers_along(trail, 1), lost, groups=groups, convolution=True)  # fmt: skip
        if id(bias) in self._weights:
            found.bias = self._weights[id(bias)][1].name
        before = self.origins.aligned(trail, given.ndim)
        if groups > 1 and before is not None:
            if groups == channels == before[0].size and before[1] == 1:
                self.origins.tie(before[0], origin)
            else:
                before[0].lost = origin.lost = f"{name} is a convolution in groups"
        self.found.products.append(found)
        self._set(out, Trail((Labels(laid(origin, out.shape, 1)),)))


def tensors(value: Any) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)


def _kind(module: nn.Module) -> str:
    """Whether a module is taken as one step: a norm or a scale, a stack of experts; else ""."""
    own = list(module.parameters(recurse=False))
    if not own or any(True for child in module.children() for _ in child.parameters()):
        return ""
    if any(p.ndim == 3 for p in own) and all(p.ndim in (2, 3) for p in own):
        return "experts" if max(p.shape[0] for p in own) == min(p.shape[0] for p in own) else ""
    return "norm" if all(p.ndim == 1 for p in own) and len({p.numel() for p in own}) == 1 else ""


def _do(operator: Any, name: str, labels: Tensor, args: Any, kwargs: Any, out: Any) -> Any:
    """What a movement does, done to labels; None where it mixes labels or cannot be done."""
    shape = next(tensors(out)).shape
    if name in _KEEPS:
        return labels
    if name in _VIEWS:
        return labels.reshape(shape)
    if name in _POOLS:
        if labels.ndim != len(shape) or (row := along(labels, 1)) is None:
            return None
        return row.reshape(1, -1, *[1] * (len(shape) - 2)).expand(shape)
    try:
        if name not in _REDUCES:
            return operator(labels, *args[1:], **kwargs)
        dims = args[1] if len(args) > 1 else list(range(labels.ndim))
        keep = bool(args[2]) if len(args) > 2 else bool(kwargs.get("keepdim"))
        low, high = labels.amin(dims, keep), labels.amax(dims, keep)
        return low if torch.equal(low, high) else None
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _varying(weight: _Weight, axis: int) -> tuple[int, Tensor] | None:
    """Along which dimension of its parameter an axis of a matrix runs, and through which places."""
    found = []
    for dim, places in enumerate(weight.places):
        row = along(places, axis)
        if row is not None and (len(row) > 1 and not bool((row == row[0]).all())):
            found.append((dim, row))
    return found[0] if len(found) == 1 else None


def _plain(given: tuple[Labels, ...] | None) -> bool:
    """Whether an input is what one layer gave, as it is."""
    return given is not None and len(given) == 1 and not given[0].operators
