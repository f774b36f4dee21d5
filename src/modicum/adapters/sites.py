"""Where adapters go: linear layers of any form, embeddings, convolutions, and how names choose."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace as replaced

from torch import nn

from modicum.adapters import convolutions
from modicum.adapters.names import plain_name
from modicum.adapters.slice_sites import choose_slices, may_name_a_slice, slices_of
from modicum.adapters.slices import layer_name
from modicum.core.errors import InputError
from modicum.core.layers import targets as targeting
from modicum.core.layers.layer_sites import Site, SiteKind, Survey, other_users
from modicum.core.layers.layer_sites import survey as surveyed
from modicum.core.layers.left_out import matrices_left_out

__all__ = [
    "MATRICES",
    "Site",
    "SiteKind",
    "Survey",
    "all_sites",
    "choose",
    "left_out",
    "replace",
    "shared_name",
    "slices_at",
    "survey",
    "unreached",
]


MATRICES: tuple[SiteKind, ...] = ("linear", "embedding")
NO_GRADIENT = "no gradient reaches it"


def survey(model: nn.Module, kinds: Collection[SiteKind] = MATRICES) -> Survey:
    """What of a model can be adapted, and what looks alike and cannot, with the reason.

    Layers that have adapters are there as the layers that they were. The inputs of a convolution
    are the columns of its weight as a matrix: channels that an output reads, times kernel places.
    """
    found = surveyed(model, kinds, _of_adapters)
    for name, site in found.every.items():
        if site.kind == "convolution":
            found.every[name] = convolutions.as_matrix(model, site)
            if (why := convolutions.why_not(model, name)) is not None:
                found.refused[name] = why
    return found


def shared_name(name: str) -> str:
    """Under which name a model owns what the sites of the adapter `name` share."""
    return f"shared_by_{name}"


def _of_adapters(path: str) -> bool:
    """Whether a module is a part of an adapter."""
    return ".layers_by_adapter." in f".{path}." or path.startswith(shared_name(""))


def all_sites(model: nn.Module, kinds: Collection[SiteKind] = MATRICES) -> list[Site]:
    """Every adaptable layer of a model, those that have adapters too."""
    return list(survey(model, kinds).sites.values())


def choose(
    model: nn.Module,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    kinds: Collection[SiteKind] = MATRICES,
    unmeant: Collection[str] = (),
) -> list[Site]:
    """The sites that `targets` name: a full name, its last parts, a pattern, or `all-linear`.

    One that names no layer may name slices of fused layers (`slice_sites`): `q_proj`, `c_attn.v`.

    `all-linear` is every linear layer but the output head, as in PEFT, that computes what its type
    says; `left_out` names the others.

    Args:
        unmeant: layers that `all-linear` does not mean either.

    Raises:
        InputError: a target matches no layer; or one that may compute something else than its type
            says; or one whose weight another layer uses too (tied embeddings), where an adapter
            would change one use and a merge both.
    """
    found = survey(model, kinds)
    layers = list(found.every)
    if not found.linear and found.refused and targeting.ALL_LINEAR in targets:
        raise _refusal(*next(iter(found.refused.items())))
    others, slices = choose_slices(model, found, targets, exclude)
    linear = [name for name in found.linear if name not in unmeant]
    names = targeting.choose(model, layers, others, exclude, linear=linear) if others else []
    for name in names:
        if name in found.refused:
            raise _refusal(name, found.refused[name])
    kept = [*(found.every[name] for name in names), *slices.values()]
    _refuse_shared(model, kept)
    return kept


def unreached(model: nn.Module) -> frozenset[str]:
    """Names of layers whose weights get no gradient, where the model knows that of itself.

    >>> unreached(nn.Linear(2, 2))
    frozenset()
    """
    return frozenset(getattr(model, "unreached", ()))


def slices_at(model: nn.Module, names: Sequence[str]) -> list[Site]:
    """The slices of fused layers of these full names; what is none is left out.

    >>> slices_at(nn.Sequential(nn.Linear(2, 2)), ["0"])
    []
    """
    found = survey(model)
    asked = {n for n in map(plain_name, names) if may_name_a_slice(n)} - set(found.every)
    known = slices_of(model, found) if asked else {}
    return [site for name, site in known.items() if plain_name(name) in asked]


def left_out(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, str]:
    """What `targets` leave out though it holds matrices, by name, with the reason.

    >>> left_out(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), ["all-linear"])["1.weight_ih_l0"]
    'a matrix that is no linear layer'
    """
    found = matrices_left_out(model, survey(model), targets, exclude, _of_adapters)
    if targeting.ALL_LINEAR in targets:
        aside = [*exclude, *(each for each in targets if each != targeting.ALL_LINEAR)]
        names = (name for name in unreached(model) if not targeting.named(name, aside))
        found |= dict.fromkeys(sorted(names), NO_GRADIENT)
    return found


def _refusal(name: str, why: str) -> InputError:
    problem = f"{why}, so an adapter on it could have another effect; leave it out with `exclude`"
    return InputError(problem, field="targets", value=name)


def _refuse_shared(model: nn.Module, sites: Iterable[Site]) -> None:
    layers = (replaced(site, name=layer_name(site)) for site in sites)
    for site, others in other_users(model, layers):
        if others:
            raise InputError(
                f"its weight is shared with {others[0]}, so an adapter would change one use and a "
                "merge both; untie the weights, or leave this layer out of `targets`",
                field="targets",
                value=site.name,
            )


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where the layer `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
