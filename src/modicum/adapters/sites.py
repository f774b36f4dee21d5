"""Where adapters go: linear layers of any form, embeddings, and how names choose among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from modicum.core import targets as targeting
from modicum.core.errors import InputError
from modicum.core.linear_forms import form_of


@dataclass(frozen=True)
class Site:
    """A layer that can be adapted: W is [out_features, in_features].

    `kind` is what the layer does with W; `transposed` says that it stores W^T, as the `Conv1D`
    of GPT-2 does, and an embedding, whose table [entries, width] is the transpose of the linear
    map from one-hot rows.
    """

    name: str
    kind: Literal["linear", "embedding"]
    in_features: int
    out_features: int
    transposed: bool = False

    @property
    def suffix(self) -> str:
        """The last part of the name, by which recipes and PEFT files choose layers."""
        return self.name.rsplit(".", 1)[-1]


def site_of(name: str, module: nn.Module) -> Site | None:
    """The site that a module is, or None when it is no layer that can be adapted.

    Every linear form is a site, a quantized one too, if it says its `in_features` and
    `out_features` as `nn.Linear` does.
    """
    if form_of(module) is not None:
        inputs, outputs = (
            getattr(module, "in_features", None),
            getattr(module, "out_features", None),
        )
        if isinstance(inputs, int) and isinstance(outputs, int):
            return Site(name, "linear", inputs, outputs)
    if isinstance(module, nn.Embedding):
        return Site(name, "embedding", module.num_embeddings, module.embedding_dim, True)
    if type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int):
        rows, columns = module.weight.shape  # type: ignore[misc]
        return Site(name, "linear", int(rows), int(columns), True)
    return None


def all_sites(model: nn.Module) -> list[Site]:
    """Every adaptable layer of a model; one that wears adapters already counts by its own name."""
    found = []
    for name, module in model.named_modules():
        inner = getattr(module, "adapted_base", module)
        if name.endswith(".adapted_base") or ".layers_by_adapter." in f".{name}.":
            continue
        site = site_of(name, inner)
        if site is not None:
            found.append(site)
    return found


def choose(model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()) -> list[Site]:
    """The sites that `targets` name: a full name, its last parts, a pattern, or `all-linear`.

    `all-linear` is every linear layer but the output head, as in PEFT.

    Raises:
        InputError: a target matches no layer; or it matches one whose weight another layer uses
            too (tied embeddings), where an adapter would change one use and a merge both.
    """
    sites = {site.name: site for site in all_sites(model)}
    linear = [site.name for site in sites.values() if site.kind == "linear"]
    names = targeting.choose(model, list(sites), targets, exclude, linear=linear)
    kept = [sites[name] for name in names]
    _refuse_shared(model, kept)
    return kept


def _refuse_shared(model: nn.Module, sites: Iterable[Site]) -> None:
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for weight in _weights(module):
            users.setdefault(id(weight), []).append(name.removesuffix(".adapted_base"))
    for site in sites:
        own = _weights(base_of(model, site.name))
        others = [name for weight in own for name in users[id(weight)] if name != site.name]
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


def base_name(name: str) -> str:
    """A parameter's name in the model that wears no adapters."""
    return name.replace(".adapted_base.", ".")


def base_of(model: nn.Module, name: str) -> nn.Module:
    """The layer `name` itself, without the adapters that it may wear."""
    module = model.get_submodule(name)
    inner = getattr(module, "adapted_base", module)
    assert isinstance(inner, nn.Module)
    return inner
