"""Linear forms: what may stand in the place of an `nn.Linear`, chosen by name.

A form knows how its layers are made, which dense weight a layer stands for, and how another dense
weight is put into it. Adapters, compression, files and merging go through `full_weight` and
`write_weight` alone, whatever the form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.meta import on_meta
from modicum.core.sharding import own_part


@dataclass(frozen=True)
class LinearForm:
    """One way to hold the map y = x W^T + b, W of shape [out_features, in_features].

    Args:
        name: what a recipe and `make_linear` call it.
        make: `make(in_features, out_features, bias, device=, dtype=)`, an uninitialised layer.
        from_dense: the layer that stands for a given weight and bias.
        to_dense: the full weight [out_features, in_features] that a layer stands for.
        kind: the class of its layers.
        write: `write(layer, weight)` puts another dense weight into a layer, in place; of a layer
            that is cut over ranks each rank gives its own rows. None: the form cannot.
        exact: whether `write` and `to_dense` give back what was written, to the layer's dtype.
    """

    name: str
    make: Callable[..., nn.Module]
    from_dense: Callable[[Tensor, Tensor | None], nn.Module]
    to_dense: Callable[[nn.Module], Tensor]
    kind: type[nn.Module] = nn.Linear
    write: Callable[[nn.Module, Tensor], None] | None = None
    exact: bool = True


FORMS: dict[str, LinearForm] = {}


def register(form: LinearForm) -> LinearForm:
    """Make `form` known by its name; a later one of the same name takes its place."""
    FORMS[form.name] = form
    return form


def linear_form(name: str) -> LinearForm:
    """The form of that name.

    Raises:
        InputError: no form has that name.
    """
    if name not in FORMS:
        raise InputError(
            "no linear form has this name",
            field="linear",
            value=name,
            allowed=", ".join(sorted(FORMS)),
            candidates=FORMS,
        )
    return FORMS[name]


def make_linear(
    form: str,
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """An uninitialised layer from `in_features` to `out_features` in the form of that name.

    Raises:
        InputError: no form has that name.

    >>> make_linear("dense", 4, 2, bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    """
    return linear_form(form).make(in_features, out_features, bias, device=device, dtype=dtype)


def _from_dense(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """An `nn.Linear` around `weight` [out, in] and `bias` [out]; neither is copied."""
    with on_meta():
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def _to_dense(linear: nn.Module) -> Tensor:
    """The layer's own weight [out, in], not a copy."""
    return cast(nn.Linear, linear).weight


def _write(linear: nn.Module, weight: Tensor) -> None:
    """Copy `weight` into the layer's own, rounded to its dtype."""
    own_part(cast(nn.Linear, linear).weight)[0].copy_(own_part(weight)[0])


# The dense form is `torch.nn.Linear` itself, so all that knows `nn.Linear` knows it too.
DENSE = register(LinearForm("dense", nn.Linear, _from_dense, _to_dense, write=_write))


def form_of(module: nn.Module) -> LinearForm | None:
    """The form of a layer; None for a module that is no linear layer known here."""
    exact = next((form for form in FORMS.values() if type(module) is form.kind), None)
    return exact or (DENSE if isinstance(module, nn.Linear) else None)


def full_weight(module: nn.Module) -> Tensor:
    """The dense weight [out_features, in_features] that a linear layer stands for.

    Raises:
        InputError: the module is no linear layer.
    """
    form = form_of(module)
    if form is None:
        raise InputError("no linear form is known for this layer", value=type(module).__name__)
    return form.to_dense(module)


def write_weight(module: nn.Module, weight: Tensor) -> None:
    """Put a dense weight [out_features, in_features] into a linear layer, in place.

    Raises:
        InputError: the module is no linear layer, or its form cannot stand for any weight.
    """
    form = form_of(module)
    if form is None or form.write is None:
        what = type(module).__name__ if form is None else form.name
        raise InputError("no other weight can be written into this layer", value=what)
    with torch.no_grad():
        form.write(module, weight)
