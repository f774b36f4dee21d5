"""Where adapters go: linear layers of any form, embeddings, and how names choose among them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers import targets as targeting
from modicum.core.layers.layer_sites import transposed_sizes, weight_users
from modicum.core.layers.linear_forms import form_of
from modicum.core.layers.plain_layers import plain_type, why_not_plain

# Embeddings of transformers that multiply the row by a number, `embed_scale`.
_SCALED = re.compile(r"ScaledWordEmbedding$")
# Linear layers of transformers that compute what `nn.Linear` does, by its weight and bias.
_LINEAR = {"FalconLinear"}


@dataclass(frozen=True)
class Site:
    """A layer that can be adapted: W is [out_features, in_features].

    `kind` is what the layer does with W; `transposed` says that it stores W^T, as the `Conv1D`
    of GPT-2 does, and an embedding, whose table [entries, width] is the transpose of the linear
    map from one-hot rows. A `block` is no map of one weight: its features are the residual
    stream's. `dtype` is what an adapter's factors have there: fp32, or fp64 like W. `prepared` is
    what a method found out about the layer from data, as JSON; empty before.
    """

    name: str
    kind: Literal["linear", "embedding", "block"]
    in_features: int
    out_features: int
    transposed: bool = False
    dtype: torch.dtype = torch.float32
    prepared: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def suffix(self) -> str:
        """The last part of the name, by which recipes and PEFT files choose layers."""
        return self.name.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Survey:
    """What of a model can be adapted, and what looks alike and cannot, with the reason."""

    sites: dict[str, Site]
    refused: dict[str, str]

    @property
    def linear(self) -> list[str]:
        """The names of the linear layers that can be adapted."""
        return [site.name for site in self.sites.values() if site.kind == "linear"]


def survey(model: nn.Module) -> Survey:
    """Look at every layer of a model.

    >>> survey(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.MultiheadAttention(2, 1)})).refused
    {'b.out_proj': 'MultiheadAttention uses its weight without calling the layer'}
    """
    sites, refused = {}, {}
    for name, module in model.named_modules():
        if not name or _of_adapters(name):
            continue
        found = _site_of(model, name, module)
        if isinstance(found, Site):
            sites[name] = found
        elif found is not None:
            refused[name] = found
    return Survey(sites, refused)


def _site_of(model: nn.Module, name: str, module: nn.Module) -> Site | str | None:
    """The site that a module is, or why it is none; None when it is no layer of that sort.

    Every linear form is a site, a quantized one too, if it says its `in_features` and
    `out_features` as `nn.Linear` does.
    """
    kind = plain_type(module).__name__
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            return "it shortens its rows as it reads them (max_norm)"
        like = plain_type(module) if _SCALED.search(kind) else nn.Embedding
        why = why_not_plain(model, name, like)
        rows, width = module.num_embeddings, module.embedding_dim
        return why or Site(name, "embedding", rows, width, True, _dtype(module))
    sides = transposed_sizes(module, plain_type(module))
    if sides is not None:
        why = why_not_plain(model, name, plain_type(module))
        return why or Site(name, "linear", *sides, True, _dtype(module))
    form = form_of(module)
    if form is None:
        return None
    sizes = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if not (isinstance(sizes[0], int) and isinstance(sizes[1], int)):
        return None
    why = why_not_plain(model, name, plain_type(module) if kind in _LINEAR else form.kind)
    return why or Site(name, "linear", sizes[0], sizes[1], False, _dtype(module))


def shared_name(name: str) -> str:
    """Under which name a model owns what the sites of the adapter `name` share."""
    return f"shared_by_{name}"


def _of_adapters(path: str) -> bool:
    """Whether a module is a part of an adapter."""
    return ".layers_by_adapter." in f".{path}." or path.startswith(shared_name(""))


def _dtype(module: nn.Module) -> torch.dtype:
    kinds = {parameter.dtype for parameter in module.parameters(recurse=False)}
    return torch.float64 if torch.float64 in kinds else torch.float32


def all_sites(model: nn.Module) -> list[Site]:
    """Every adaptable layer of a model, those that have adapters too."""
    return list(survey(model).sites.values())


def choose(model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()) -> list[Site]:
    """The sites that `targets` name: a full name, its last parts, a pattern, or `all-linear`.

    `all-linear` is every linear layer but the output head, as in PEFT, that computes what its type
    says; `left_out` names the others.

    Raises:
        InputError: a target matches no layer; or one that may compute something else than its type
            says; or one whose weight another layer uses too (tied embeddings), where an adapter
            would change one use and a merge both.
    """
    found = survey(model)
    known = found.sites.keys() | found.refused.keys()
    layers = [name for name, _ in model.named_modules() if name in known]
    if not found.linear and found.refused and targeting.ALL_LINEAR in targets:
        raise _refusal(*next(iter(found.refused.items())))
    names = targeting.choose(model, layers, targets, exclude, linear=found.linear)
    for name in names:
        if name in found.refused:
            raise _refusal(name, found.refused[name])
    kept = [found.sites[name] for name in names]
    _refuse_shared(model, kept)
    return kept


def left_out(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, str]:
    """What `all-linear` does not mean though it holds matrices, by name, with the reason.

    >>> left_out(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), ["all-linear"])["1.weight_ih_l0"]
    'a matrix that is no linear layer'
    """
    if targeting.ALL_LINEAR not in targets:
        return {}
    found = survey(model)
    reasons = {
        name: why
        for name, why in found.refused.items()
        if not isinstance(model.get_submodule(name), nn.Embedding)
    }
    for path, module in model.named_modules():
        known = path in found.sites or path in found.refused or _of_adapters(path)
        if known or isinstance(module, _NO_MATRICES):
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim in (2, 3) and min(parameter.shape) > 1:
                what = "a matrix that is" if parameter.ndim == 2 else "stacked matrices that are"
                name = f"{path}.{leaf}" if path else leaf
                reasons[name] = f"{what} no linear layer"
    return {n: why for n, why in reasons.items() if not targeting.named(n, exclude)}


# What they hold are kernels and tables.
_NO_MATRICES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.EmbeddingBag,
)


def _refusal(name: str, why: str) -> InputError:
    problem = f"{why}, so an adapter on it could have another effect; leave it out with `exclude`"
    return InputError(problem, field="targets", value=name)


def _refuse_shared(model: nn.Module, sites: Iterable[Site]) -> None:
    users = weight_users(model)
    for site in sites:
        own = _weights(model.get_submodule(site.name))
        others = [n for weight in own for n, _ in users[id(weight)] if n != site.name]
        if others:
            raise InputError(
                f"its weight is shared with {others[0]}, so an adapter would change one use and a "
                "merge both; untie the weights, or leave this layer out of `targets`",
                field="targets",
                value=site.name,
            )


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """What a layer itself keeps its weight in: one matrix, or codes and scales."""
    named = module.named_parameters(recurse=False)
    return [parameter for name, parameter in named if name != "bias"]


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where the layer `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
