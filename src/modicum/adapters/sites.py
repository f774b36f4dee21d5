"""Where adapters go: linear layers of any form, embeddings, and how names choose among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers import targets as targeting
from modicum.core.layers.layer_sites import Site, Survey, other_users
from modicum.core.layers.layer_sites import survey as surveyed

__all__ = ["Site", "Survey", "all_sites", "choose", "left_out", "replace", "shared_name", "survey"]


def survey(model: nn.Module) -> Survey:
    """What of a model can be adapted, and what looks alike and cannot, with the reason.

    Layers that have adapters are there as the layers that they were.
    """
    return surveyed(model, ["linear", "embedding"], _of_adapters)


def shared_name(name: str) -> str:
    """Under which name a model owns what the sites of the adapter `name` share."""
    return f"shared_by_{name}"


def _of_adapters(path: str) -> bool:
    """Whether a module is a part of an adapter."""
    return ".layers_by_adapter." in f".{path}." or path.startswith(shared_name(""))


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
    layers = list(found.every)
    if not found.linear and found.refused and targeting.ALL_LINEAR in targets:
        raise _refusal(*next(iter(found.refused.items())))
    names = targeting.choose(model, layers, targets, exclude, linear=found.linear)
    for name in names:
        if name in found.refused:
            raise _refusal(name, found.refused[name])
    kept = [found.every[name] for name in names]
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
        known = path in found.every or _of_adapters(path)
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
    for site, others in other_users(model, sites):
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
