"""What rooms ask of single layers: which there are, how each stores its weight, who else uses it.

One value describes a layer to all rooms: a `Site`. Knows no adapter, no compression and no policy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from modicum.core.layers.full_model import LayerPart, part_of, parts_of_full
from modicum.core.layers.linear_forms import form_of
from modicum.core.layers.map_parts import MappedSlice
from modicum.core.layers.plain_layers import plain_type, why_not_plain

SiteKind = Literal["linear", "embedding", "convolution", "block", "module"]
LAYERS: tuple[SiteKind, ...] = ("linear", "embedding", "convolution")
# Embeddings of transformers that multiply the row by a number, `embed_scale`.
_SCALED = re.compile(r"ScaledWordEmbedding$")
# Linear layers of transformers that compute what `nn.Linear` does, by its weight and bias.
_LINEAR = {"FalconLinear"}


@dataclass(frozen=True)
class Site:
    """A layer that a method may change: W is [out_features, in_features].

    Args:
        name: in the model.
        kind: what the layer does with W. A `block` is no map of one weight: its features are the
            residual stream's. Those of a `convolution` are its channels. Of a `module` nothing is
            known but its parameters.
        transposed: whether it stores W^T, as the `Conv1D` of GPT-2 does, and an embedding, whose
            table [entries, width] is the transpose of the linear map from one-hot rows.
        dtype: of an adapter's factors there: fp32, or fp64 like W.
        prepared: what an adapter's method found out about the layer from data, as JSON; empty
            before.
        dense: whether W is one matrix of a layer that is exactly of its type, so that another form
            can replace it. A subclass may use its weight in a way of its own, so it does not count.
        names: all names that the model has for it, where a block is used more than once.
        rows: of a slice of a fused layer, which of that layer's rows it has; `name` is the fused
            layer's with one part more, and `transposed` how that stores its weight.
        part: of a layer that lost rows or columns, what it is of the full model's.
    """

    name: str
    kind: SiteKind
    in_features: int
    out_features: int
    transposed: bool = False
    dtype: torch.dtype = torch.float32
    prepared: Mapping[str, Any] = field(default_factory=dict, hash=False)
    dense: bool = field(default=False, compare=False)  # the same layer, adapted, is not
    names: tuple[str, ...] = ()
    rows: MappedSlice | None = None
    part: LayerPart | None = field(default=None, compare=False, repr=False)

    @property
    def elements(self) -> int:
        """Of W, as a matrix."""
        return self.in_features * self.out_features

    @property
    def suffix(self) -> str:
        """The last part of the name, by which recipes and PEFT files choose layers."""
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Survey:
    """The layers of a model, and why some of them may compute something else than they seem to."""

    every: dict[str, Site]
    refused: dict[str, str]

    @property
    def sites(self) -> dict[str, Site]:
        """Those that are not refused."""
        return {name: site for name, site in self.every.items() if name not in self.refused}

    @property
    def linear(self) -> list[str]:
        """The names of the linear layers that are not refused."""
        return [site.name for site in self.sites.values() if site.kind == "linear"]


def survey(
    model: nn.Module,
    kinds: Collection[SiteKind] = LAYERS,
    skip: Callable[[str], bool] = lambda name: False,
) -> Survey:
    """Look at every layer of a model. Nothing is read but shapes.

    Args:
        kinds: of layers that are asked for.
        skip: says of a module's name whether it is no layer of the model's own.

    >>> survey(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.MultiheadAttention(2, 1)})).refused
    {'b.out_proj': 'MultiheadAttention uses its weight without calling the layer'}
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    every, refused, fuller = {}, {}, parts_of_full(model)
    for name, module in model.named_modules():
        if not name or skip(name):
            continue
        site, kind = _site_of(name, module, tuple(names[id(module)]))
        if site is None or site.kind not in kinds:
            continue
        part = part_of(fuller, name, transposed=site.transposed) if fuller else None
        every[name] = replace(site, part=part) if part is not None else site
        if (why := _why_not(model, name, module, kind)) is not None:
            refused[name] = why
    return Survey(every, refused)


def _site_of(
    name: str, module: nn.Module, names: tuple[str, ...]
) -> tuple[Site | None, type[nn.Module] | None]:
    """The site that a module is, or None, and the class whose `forward` it must have.

    Every linear form is a site, a quantized one too, if it says its `in_features` and
    `out_features` as `nn.Linear` does.
    """
    own, dtype = plain_type(module), _dtype(module)
    if isinstance(module, nn.Embedding):
        sizes = module.num_embeddings, module.embedding_dim
        like = own if _SCALED.search(own.__name__) else nn.Embedding
        return Site(name, "embedding", *sizes, True, dtype, names=names), like
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        sizes = module.in_channels, module.out_channels
        return Site(name, "convolution", *sizes, False, dtype, names=names), None
    if (found := transposed_sizes(module, own)) is not None:
        dense = own is type(module)
        return Site(name, "linear", *found, True, dtype, dense=dense, names=names), own
    form = form_of(module)
    ins, outs = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if form is None or not (isinstance(ins, int) and isinstance(outs, int)):
        return None, None
    dense, like = type(module) is nn.Linear, own if own.__name__ in _LINEAR else form.kind
    return Site(name, "linear", ins, outs, False, dtype, dense=dense, names=names), like


def _why_not(
    model: nn.Module, name: str, module: nn.Module, kind: type[nn.Module] | None
) -> str | None:
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "it shortens its rows as it reads them (max_norm)"
    return None if kind is None else why_not_plain(model, name, kind)


def _dtype(module: nn.Module) -> torch.dtype:
    kinds = {parameter.dtype for parameter in module.parameters(recurse=False)}
    return torch.float64 if torch.float64 in kinds else torch.float32


def other_users(model: nn.Module, sites: Iterable[Site]) -> Iterator[tuple[Site, list[str]]]:
    """Each site with all other names under which the model holds what it keeps its weight in.

    Among them are other names of the layer itself. Biases do not count.

    >>> one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> other.weight = one.weight
    >>> model = nn.Sequential(one, other)
    >>> [(site.name, names) for site, names in other_users(model, survey(model).sites.values())]
    [('0', ['1']), ('1', ['0'])]
    """
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    for site in sites:
        # One matrix, or codes and scales.
        own = model.get_submodule(site.name).named_parameters(recurse=False)
        weights = [id(parameter) for name, parameter in own if name != "bias"]
        yield site, [name for weight in weights for name in users[weight] if name != site.name]


def transposed_sizes(
    module: nn.Module, kind: type[nn.Module] | None = None
) -> tuple[int, int] | None:
    """Inputs and outputs of a layer that stores W^T, the `Conv1D` of GPT-2; None for any other.

    Args:
        kind: the class that the layer counts as; its own by default.

    >>> transposed_sizes(nn.Linear(2, 3))
    """
    if (kind or type(module)).__name__ != "Conv1D" or not isinstance(
        getattr(module, "nf", None), int
    ):
        return None
    rows, columns = module.get_parameter("weight").shape
    return rows, columns
