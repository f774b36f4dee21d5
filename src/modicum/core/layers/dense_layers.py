"""Which layers take another form: dense ones, and convolutions; and how names choose them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers import targets as targeting
from modicum.core.layers.layer_sites import Site, Survey, other_users, survey
from modicum.core.layers.left_out import matrices_left_out
from modicum.core.layers.linear_forms import DENSE, form_of
from modicum.core.layers.plain_layers import plain_type, why_not_plain


def all_layers(model: nn.Module) -> dict[str, Site]:
    """Every dense linear layer of a model by its name, that computes what its type says.

    >>> model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.TransformerEncoderLayer(2, 1)})
    >>> list(all_layers(model))
    ['a']
    """
    return {name: site for name, site in survey(model, ["linear"]).sites.items() if site.dense}


def all_convolutions(model: nn.Module) -> dict[str, Site]:
    """Every two-dimensional convolution of one group by its name, as the matrix that its weight is.

    That is [out, channels * height * width of the kernel]. Left out is what pads with
    anything but zeros, or does not compute what its type says.

    >>> list(all_convolutions(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(4, 4, 3, groups=2))))
    ['0']
    """
    found = {}
    for name, site in survey(model, ["convolution"]).sites.items():
        layer = model.get_submodule(name)
        if type(layer) is not nn.Conv2d or layer.groups != 1 or layer.padding_mode != "zeros":
            continue
        if why_not_plain(model, name, nn.Conv2d) is None:
            columns = math.prod(layer.weight.shape[1:])
            found[name] = replace(site, in_features=columns, dense=True)
    return found


def choose(
    model: nn.Module,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    convolutions: bool = False,
) -> list[Site]:
    """The layers that `targets` name: a full name, its last parts, a pattern, or `all-linear`.

    `all-linear` is every linear layer but the output head that computes what its type says. Nothing
    is read but shapes.

    Args:
        convolutions: whether names may be those of `all_convolutions` too.

    Raises:
        InputError: a target matches no layer, or one that may compute something else, or one whose
            weight is used elsewhere too (tied embeddings), where factors would stand in one place
            and not in the other.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [layer.name for layer in choose(model, ["all-linear"], exclude=["2"])]
    ['0']
    """
    found = survey(model, ["linear"])
    layers = {name: site for name, site in found.every.items() if site.dense}
    plain = [name for name in layers if name not in found.refused]
    kind = "dense linear layer"
    if convolutions:
        layers |= all_convolutions(model)
        kind += " or convolution of one group"
    names = targeting.choose(
        model, list(layers), targets, exclude, linear=plain, kind=kind, refused=_kept(model, found)
    )
    for name in names:
        if (why := found.refused.get(name)) is not None:
            raise InputError(f"{why}; leave it out with `exclude`", field="targets", value=name)
    return untied(model, [layers[name] for name in names])


def left_out(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, str]:
    """What `targets` leave dense though it holds matrices, by name, with the reason.

    Layers that have another form already are none of it.

    Args:
        model: without adapters.

    >>> left_out(nn.Sequential(nn.Linear(2, 2), nn.LSTM(2, 2)), ["all-linear"])["1.weight_ih_l0"]
    'a matrix that is no linear layer'
    """
    found = survey(model, ["linear"])
    refused = {
        name: why
        for name, why in _kept(model, found).items()
        if form_of(model.get_submodule(name)) in (None, DENSE)
    }
    return matrices_left_out(model, Survey(found.every, refused), targets, exclude)


def _kept(model: nn.Module, found: Survey) -> dict[str, str]:
    """The linear layers that no form replaces, by name, with the reason."""
    reasons = {n: _why_kept(model, n) for n, site in found.every.items() if not site.dense}
    return reasons | found.refused


def _why_kept(model: nn.Module, name: str) -> str:
    """Why a linear layer is not dense."""
    layer = model.get_submodule(name)
    form, own = form_of(layer), type(layer)
    if form not in (None, DENSE):
        return f"{own.__name__} is another form already"
    if plain_type(layer) is not own:
        return "it has adapters"
    return f"{own.__name__} is a subclass of Linear, and a form replaces Linear itself alone"


def untied(model: nn.Module, layers: list[Site]) -> list[Site]:
    """The same layers, whose weights no other module uses.

    Raises:
        InputError: one does.
    """
    for layer, others in other_users(model, layers):
        if set(others) - set(layer.names):
            raise InputError(
                "its weight is used by another layer too; untie the weights, or exclude this layer",
                field="targets",
                value=layer.name,
            )
    return layers
