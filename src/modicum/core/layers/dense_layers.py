"""Which layers of a model are compressed: its dense linear layers, and how names choose them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers import targets as targeting
from modicum.core.layers.layer_sites import transposed_sizes, weight_users
from modicum.core.layers.plain_layers import why_not_plain


@dataclass(frozen=True)
class DenseLayer:
    """A dense layer with a weight W [out_features, in_features].

    Args:
        name: in the model.
        transposed: whether it stores W^T, as the `Conv1D` of GPT-2 does.
        names: all names that the model has for it, where a block is used more than once.
    """

    name: str
    in_features: int
    out_features: int
    transposed: bool = False
    names: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        """Of the weight."""
        return self.in_features * self.out_features

    @property
    def suffix(self) -> str:
        """The last part of the name, by which recipes choose layers."""
        return self.name.rsplit(".", 1)[-1]


def layer_of(name: str, module: nn.Module, names: tuple[str, ...] = ()) -> DenseLayer | None:
    """The layer that a module is; None for what is no dense linear layer.

    A subclass of `nn.Linear` may use its weight in a way of its own, so it counts as none.
    """
    if type(module) is nn.Linear:
        return DenseLayer(name, module.in_features, module.out_features, False, names)
    sizes = transposed_sizes(module)
    return None if sizes is None else DenseLayer(name, *sizes, True, names)


def all_layers(model: nn.Module) -> dict[str, DenseLayer]:
    """Every dense linear layer of a model by its name, that computes what its type says.

    >>> model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.TransformerEncoderLayer(2, 1)})
    >>> list(all_layers(model))
    ['a']
    """
    return {name: layer for name, (layer, why) in _surveyed(model).items() if why is None}


def _surveyed(model: nn.Module) -> dict[str, tuple[DenseLayer, str | None]]:
    """Every dense linear layer, with the reason why another could not stand in its place."""
    named: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        named.setdefault(id(module), []).append(name)
    found = {}
    for name, module in model.named_modules():
        layer = layer_of(name, module, tuple(named[id(module)]))
        if layer is not None:
            found[name] = layer, why_not_plain(model, name, type(module))
    return found


def choose(
    model: nn.Module, targets: Sequence[str], exclude: Sequence[str] = ()
) -> list[DenseLayer]:
    """The layers that `targets` name: a full name, its last parts, a pattern, or `all-linear`.

    `all-linear` is every linear layer but the output head that computes what its type says. Nothing
    is read but shapes.

    Raises:
        InputError: a target matches no layer, or one that may compute something else, or one whose
            weight is used elsewhere too (tied embeddings), where factors would stand in one place
            and not in the other.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> [layer.name for layer in choose(model, ["all-linear"], exclude=["2"])]
    ['0']
    """
    layers = _surveyed(model)
    plain = [name for name, (_, why) in layers.items() if why is None]
    kind = "dense linear layer"
    names = targeting.choose(model, list(layers), targets, exclude, linear=plain, kind=kind)
    for name in names:
        if (why := layers[name][1]) is not None:
            raise InputError(f"{why}; leave it out with `exclude`", field="targets", value=name)
    return untied(model, [layers[name][0] for name in names])


def untied(model: nn.Module, layers: list[DenseLayer]) -> list[DenseLayer]:
    """The same layers, whose weights no other module uses.

    Raises:
        InputError: one does.
    """
    users = weight_users(model)
    for layer in layers:
        weight = model.get_submodule(layer.name).get_parameter("weight")
        if len({id(module) for _, module in users[id(weight)]}) > 1:
            raise InputError(
                "its weight is used by another layer too; untie the weights, or exclude this layer",
                field="targets",
                value=layer.name,
            )
    return layers
