"""Linear forms: what may replace an `nn.Linear`, chosen by name.

A form knows how its layers are made, which dense weight a layer represents, and how another dense
weight is put into it. Adapters, compression, files and merging go through `full_weight` and
`write_weight` alone, whatever the form.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.sharding import own_part

# Of each tensor of a layer: how many rows it has, and the bytes of one.
StoredRows = tuple[tuple[int, int], ...]


def _dense_rows(in_features: int, out_features: int, item_bytes: int) -> StoredRows:
    return ((out_features, in_features * item_bytes),)


def _no_workspace(in_features: int, out_features: int, item_bytes: int) -> int:
    return 0


@dataclass(frozen=True)
class LinearForm:
    """One way to hold the map y = x W^T + b, W of shape [out_features, in_features].

    Args:
        name: what a recipe and `make_linear` call it.
        make: `make(in_features, out_features, bias, device=, dtype=)`, an uninitialised layer.
        from_dense: the layer that represents a given weight and bias.
        to_dense: the full weight [out_features, in_features] that a layer represents; of a layer
            that is sharded over ranks a DTensor, sharded alike.
        kind: the class of its layers.
        write: `write(layer, weight)` puts another dense weight into a layer, in place; of a layer
            that is sharded over ranks each rank gives its own rows. None: the form cannot.
        exact: whether `write` and `to_dense` give back what was written, to the layer's dtype.
        trains: whether the weight takes gradients. One that does not learns through adapters only.
        rows: `rows(in_features, out_features, item_bytes)`, for each tensor that represents the
            weight how many rows it has and the bytes of one; dense weights have `item_bytes` an
            element.
        workspace: `workspace(in_features, out_features, item_bytes)`, the bytes that a layer takes
            for as long as its product is computed; products have `item_bytes` an element.
    """

    name: str
    make: Callable[..., nn.Module]
    from_dense: Callable[[Tensor, Tensor | None], nn.Module]
    to_dense: Callable[[Any], Tensor]
    kind: type[nn.Module] = nn.Linear
    write: Callable[[Any, Tensor], None] | None = None
    exact: bool = True
    trains: bool = True
    rows: Callable[[int, int, int], StoredRows] = _dense_rows
    workspace: Callable[[int, int, int], int] = _no_workspace

    def weight_bytes(
        self, in_features: int, out_features: int, bias: bool = False, item_bytes: int = 4
    ) -> int:
        """Bytes of a layer's parameters, those that are no codes with `item_bytes` an element.

        >>> DENSE.weight_bytes(6, 4, bias=True)
        112
        """
        held = sum(rows * each for rows, each in self.rows(in_features, out_features, item_bytes))
        return held + bias * out_features * item_bytes

    @torch.no_grad()
    def round_trip(self, weight: Tensor) -> Tensor:
        """What becomes of a weight [out_features, in_features] in this form: a dense one again."""
        return self.to_dense(self.from_dense(weight, None)).detach()


FORMS: dict[str, LinearForm] = {}


def register(form: LinearForm) -> LinearForm:
    """Make `form` known by its name; a later one of the same name replaces it."""
    FORMS[form.name] = form
    return form


def linear_form(name: str) -> LinearForm:
    """The form of that name.

    Raises:
        InputError: no form has that name.
    """
    if name not in FORMS:
        importlib.import_module("modicum.linears")  # which registers those of the room
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


def _to_dense(linear: nn.Linear) -> Tensor:
    """The layer's own weight [out, in], not a copy."""
    return linear.weight


def _write(linear: nn.Linear, weight: Tensor) -> None:
    """Copy `weight` into the layer's own, rounded to its dtype."""
    own_part(linear.weight)[0].copy_(own_part(weight)[0])


# The dense form is `torch.nn.Linear` itself, so all that knows `nn.Linear` knows it too.
DENSE = register(LinearForm("dense", nn.Linear, _from_dense, _to_dense, write=_write))


def form_of(module: nn.Module) -> LinearForm | None:
    """The form of a layer; None for a module that is no linear layer known here."""
    # The nearest class: FSDP2 gives a module that it shards a class of its own, before its old one.
    for kind in type(module).__mro__:
        for form in FORMS.values():
            if form.kind is kind:
                return form
    return None


def full_weight(module: nn.Module) -> Tensor:
    """The dense weight [out_features, in_features] that a linear layer represents.

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
        InputError: the module is no linear layer, or its form cannot represent any weight.
    """
    form = form_of(module)
    if form is None or form.write is None:
        what = type(module).__name__ if form is None else form.name
        raise InputError("no other weight can be written into this layer", value=what)
    with torch.no_grad():
        form.write(module, weight)


def frozen_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model whose weights take no gradients, by name.

    Their tensors are codes, which are made of dense weights by `write_weight` alone.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if (form := form_of(module)) is not None and not form.trains
    }


def own_rows(module: nn.Module) -> tuple[int, int]:
    """How many rows of a linear layer's weight this rank holds, and how many lie before them.

    Those are the rows that `write_weight` takes. All tensors of a layer that can be written have a
    row for each output.
    """
    part, before = own_part(next(module.parameters(recurse=False)))
    return part.shape[0], before
