"""The values of a map of a model: slices of tensors, units that move together, blocks, norms.

They name tensors and hold none. Knows nothing of how they were found or what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class MappedSlice:
    """Places along one dimension of a tensor, as a grid: sum of index times stride, plus a start.

    Args:
        tensor: the name of a parameter or buffer of the model.
        dim: the dimension along which the places lie.
        start: the first place.
        shape: of the grid, its outer dimensions first: `(kv_heads, heads per group, head_width)`
            for queries, `(neurons, 1)` for neurons.
        strides: how far apart neighbours of each dimension are. Parts of fused tensors that are
            interleaved by head or by neuron have strides larger than their width.

    >>> MappedSlice("qkv.weight", 0, 4, (2, 1, 2), (6, 2, 1)).places().tolist()
    [[[4, 5]], [[10, 11]]]
    """

    tensor: str
    dim: int
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many places there are."""
        return int(torch.Size(self.shape).numel())

    def places(self) -> Tensor:
        """The places, int64 of the grid's shape."""
        total = torch.full(self.shape, self.start)
        for dim, (size, stride) in enumerate(zip(self.shape, self.strides, strict=True)):
            steps = torch.arange(size) * stride
            total = total + steps.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        return total


def fitted(tensor: str, dim: int, places: Tensor) -> MappedSlice | None:
    """The slice that has these places, int64 of the grid's shape; None where they are no grid.

    >>> fitted("w", 0, torch.tensor([[0, 1], [4, 5]])).strides
    (4, 1)
    """
    if not places.numel():
        return None
    first = places[(0,) * places.ndim]
    strides = []
    for axis, size in enumerate(places.shape):
        second = (
            places[tuple(int(axis == other) for other in range(places.ndim))] if size > 1 else 0
        )
        strides.append(int(second - first) if size > 1 else 0)
    found = MappedSlice(tensor, dim, int(first), tuple(places.shape), tuple(strides))
    return found if torch.equal(found.places(), places) else None


@dataclass(frozen=True)
class Units:
    """Equal units of a model that can be exchanged or removed: heads, kv groups, neurons, channels.

    Unit u is row u of every slice's places, reshaped to `[count, places of a unit]`.

    Args:
        kind: what a unit is; `experts` are those of a mixture, with their rows of the router.
        name: the smallest module that holds all slices and computes with them; "" is the model.
        count: how many units there are.
        makers: the slices that make what a unit gives, with biases and the norms in between.
        readers: the slices that read it. Where they are zero, the units do nothing.
        within: units can be exchanged within runs of so many, and each run must keep as many; the
            query heads of a kv group. `count` where there is no such limit.
        order_matters: why units cannot be exchanged, or "".
        needed: why units cannot be removed, or "".
        checked: whether exchanging and removing were tried on a copy, in float64.
    """

    kind: Literal["heads", "groups", "neurons", "experts", "channels", "stream"]
    name: str
    count: int
    makers: tuple[MappedSlice, ...]
    readers: tuple[MappedSlice, ...]
    within: int = 0
    order_matters: str = ""
    needed: str = ""
    checked: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "within", self.within or self.count)

    @property
    def slices(self) -> tuple[MappedSlice, ...]:
        """Makers and readers."""
        return self.makers + self.readers


@dataclass(frozen=True)
class RotaryPairs:
    """Which channels of a head turn together: the first `width`, in pairs.

    `halves` pairs channel i with i + width / 2, as Llama does; `neighbours` 2i with 2i + 1.
    """

    layout: Literal["halves", "neighbours"]
    width: int


@dataclass(frozen=True)
class MappedNorm:
    """A norm, or a scale per channel, and who reads it.

    Args:
        name: of the module.
        kind: what it computes, tried on numbers; "unknown" is none of these.
        weight, bias: names of its tensors, or None.
        offset: what is added to the weight before it scales: 1 in Gemma, else 0.
        readers: the tensors of the linear layers that read what it gives, as it is.
        kept: why scale and bias cannot be folded into the readers, or "".
        writer: the weight of the layer that makes what is normalised, if nothing else uses that:
            a batch norm with fixed statistics, or a scale, can be folded into it.
    """

    name: str
    kind: Literal["layer", "rms", "batch", "group", "scale", "unknown"]
    weight: str | None
    bias: str | None
    offset: int = 0
    readers: tuple[str, ...] = ()
    kept: str = ""
    writer: str | None = None


@dataclass(frozen=True)
class MappedAttention:
    """An attention: its slices [kv_heads, heads per group, head_width] and what moves together.

    Args:
        query, key, value: the rows that make them; several slices with biases or norms between.
        output: the columns that read what the heads give.
        query_norm, key_norm: the norms between projection and scores, or None.
        heads, groups: query heads; groups of them with their keys and values.
    """

    name: str
    head_width: int
    value_width: int
    kv_heads: int
    query: tuple[MappedSlice, ...]
    key: tuple[MappedSlice, ...]
    value: tuple[MappedSlice, ...]
    output: MappedSlice
    rotary: RotaryPairs | None
    query_norm: str | None
    key_norm: str | None
    heads: Units
    groups: Units


@dataclass(frozen=True)
class MappedMlp:
    """Up, or gate and up, an activation, and down; each gives slices of weights and biases.

    Args:
        gate: the slices whose result goes through the activation, where another multiplies it; of
            stacked experts those that come first, as names such as `gate_up_proj` say.
        experts: how many experts there are, in dimension 0 of every tensor; 0 where it is no
            mixture of experts.
        activation: the operators between up and down but sums and products; of experts unknown.
        stacked: the experts as units, where their router is known: they can be exchanged. They
            cannot be removed, since the router would give their tokens to others.
    """

    name: str
    up: tuple[MappedSlice, ...]
    gate: tuple[MappedSlice, ...]
    down: MappedSlice
    neurons: Units
    activation: tuple[str, ...] = ()
    experts: int = 0
    stacked: Units | None = None


@dataclass(frozen=True)
class MappedConvolution:
    """A convolution, the norm that reads it, and whose channels its output's are.

    `channels` is a place in the map's `channels`; None where they cannot be exchanged.
    """

    name: str
    norm: str | None
    channels: int | None


@dataclass(frozen=True)
class MappedTable:
    """A table whose rows are added to the stream: of tokens, of positions, or one learned row."""

    tensor: str
    role: Literal["tokens", "other"]
    ties: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappedBlock:
    """One of the repeated blocks, with the parts that lie in it."""

    name: str
    kind: str
    index: int
    norms: tuple[MappedNorm, ...]
    attentions: tuple[MappedAttention, ...]
    mlps: tuple[MappedMlp, ...]


@dataclass(frozen=True)
class ModelMap:
    """How a model is built, in names and places.

    Args:
        width: of the residual stream; 0 where no stream was found.
        stream: the channels of the residual stream, if they are the same everywhere.
        blocks: in the order in which they ran.
        norms, attentions, mlps: those outside of blocks.
        channels: of convolutions; the groups that residual sums make move together.
        tables: embeddings, tables of positions and the like.
        head: the tensor that makes the model's output of the stream, or None.
        ties: names of one tensor, where it has several.
        unknown: modules with parameters, or tensors, that are in no part, with the reason.
    """

    width: int
    stream: Units | None
    blocks: tuple[MappedBlock, ...]
    norms: tuple[MappedNorm, ...] = ()
    attentions: tuple[MappedAttention, ...] = ()
    mlps: tuple[MappedMlp, ...] = ()
    channels: tuple[Units, ...] = ()
    convolutions: tuple[MappedConvolution, ...] = ()
    tables: tuple[MappedTable, ...] = ()
    head: str | None = None
    ties: tuple[tuple[str, ...], ...] = ()
    unknown: dict[str, str] = field(default_factory=dict, hash=False)

    def all_attentions(self) -> list[MappedAttention]:
        """Those in blocks and outside of them."""
        return [a for block in self.blocks for a in block.attentions] + list(self.attentions)

    def all_mlps(self) -> list[MappedMlp]:
        """Those in blocks and outside of them."""
        return [m for block in self.blocks for m in block.mlps] + list(self.mlps)

    def all_norms(self) -> list[MappedNorm]:
        """Those in blocks and outside of them."""
        return [n for block in self.blocks for n in block.norms] + list(self.norms)
