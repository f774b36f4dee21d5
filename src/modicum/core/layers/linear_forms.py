"""Linear forms: what may replace an `nn.Linear`, chosen by name, with arguments of its own.

A form knows how its layers are made, which dense weight a layer represents, and how another dense
weight is put into it. Adapters, compression, files and merging go through `full_weight` and
`write_weight` alone, whatever the form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.catalog import built_in, of_package
from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer, StoredRows, TensorShapes
from modicum.core.layers.form_plan import DENSE_FORM, FormPlan, LayerForm
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.sharding import own_part


def _dense_shapes(in_features: int, out_features: int) -> TensorShapes:
    return {"weight": (out_features, in_features)}


def _all_elements(in_features: int, out_features: int) -> int:
    return in_features * out_features


def _no_indices(in_features: int, out_features: int) -> TensorShapes:
    return {}


def _as_products(in_features: int, out_features: int) -> None:
    return None


def _is_dense() -> None:
    return None


def _nothing(in_features: int, out_features: int, item_bytes: int = 0, device: str = "cpu") -> int:
    return 0


def _as_shaped(in_features: int, out_features: int, item_bytes: int) -> None:
    return None


def _no_arguments(layer: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class LinearForm:
    """One way to hold the map y = x W^T + b, W of shape [out_features, in_features].

    Arguments of a form (`rank`) are keywords of all that is made or said by shape.

    Args:
        name: what a recipe and `make_linear` call it.
        make: `make(in_features, out_features, bias, device=, dtype=)`, an uninitialised layer.
        from_dense: `from_dense(weight, bias)`, the layer that represents a given weight and bias.
        to_dense: the full weight [out_features, in_features] that a layer represents; of a layer
            that is sharded over ranks a DTensor, sharded alike. Where `why_not_dense` gives a
            reason, it is not asked.
        kind: the class of its layers.
        write: `write(layer, weight)` puts another dense weight into a layer, in place; of a layer
            that is sharded over ranks each rank gives its own rows. None: the form cannot.
        exact: whether `write` and `to_dense` give back what was written, to the layer's dtype.
        shift: `shift(layer, change)`, the tensors of a layer that take a change of its weight
            [out, in] without loss, with their new values, or None where they cannot; of a layer
            that is sharded a rank gives its own rows. None: the form never can.
        trains: whether the weight takes gradients. One that does not learns through adapters only.
        shapes: `shapes(in_features, out_features)`, of the tensors that a file holds of the
            weight, by their names: those of the layer where it trains, else the dense weight.
        indices: `indices(in_features, out_features)`, of buffers of integers, int32, by name.
        resting: `resting(in_features, out_features)`, of buffers that are not trained, by name.
        learned: `learned(in_features, out_features)`, elements that take gradients by a product,
            where those are not all that products read; else None.
        why_not_dense: `why_not_dense()`, why no dense weight computes what a layer with these
            arguments does, in a sentence without a full stop; None: one does.
        stored: `stored(in_features, out_features, item_bytes)`, for each tensor how many rows it
            has and the bytes of one, where those are not what `shapes` says; else None.
        workspace: `workspace(in_features, out_features, item_bytes, device)`, the bytes that a
            layer takes for as long as its product is computed, on this kind of device; products
            have `item_bytes` an element.
        between: `between(in_features, out_features)`, the elements a position that are kept between
            a layer's products for the backward pass.
        final: `final(in_features, out_features)`, elements of the tensors whose products come after
            all that is kept, so that a block that is recomputed leaves them out.
        arguments: of a layer, those that make another one like it.
        convolution: the class of its layers in place of `nn.Conv2d`; None: there is none.
    """

    name: str
    make: Callable[..., nn.Module]
    from_dense: Callable[..., nn.Module]
    to_dense: Callable[[Any], Tensor]
    kind: type[nn.Module] = nn.Linear
    write: Callable[[Any, Tensor], None] | None = None
    exact: bool = True
    shift: Callable[[Any, Tensor], Mapping[str, Tensor] | None] | None = None
    trains: bool = True
    shapes: Callable[..., TensorShapes] = _dense_shapes
    indices: Callable[..., TensorShapes] = _no_indices
    resting: Callable[..., TensorShapes] = _no_indices
    learned: Callable[..., int | None] = _as_products
    why_not_dense: Callable[..., str | None] = _is_dense
    stored: Callable[..., StoredRows | None] = _as_shaped
    workspace: Callable[..., int] = _nothing
    between: Callable[..., int] = _nothing
    final: Callable[..., int] = _all_elements
    arguments: Callable[[Any], Mapping[str, Any]] = _no_arguments
    convolution: type[FormLayer] | None = None

    @classmethod
    def of_layers(
        cls, name: str, kind: type[FormLayer], convolution: type[FormLayer] | None = None
    ) -> LinearForm:
        """The form whose layers are of a class, and of another in place of convolutions."""
        return cls(
            name,
            kind,
            kind.from_dense,
            kind.to_dense,
            kind,
            None if kind.write is FormLayer.write else kind.write,
            exact=kind.exact,
            shift=None if kind.shift is FormLayer.shift else kind.shift,
            trains=kind.trains,
            shapes=kind.shapes,
            indices=kind.indices,
            resting=kind.resting,
            learned=kind.learned,
            why_not_dense=kind.why_not_dense,
            stored=kind.stored,
            workspace=kind.workspace,
            between=kind.between,
            final=kind.final,
            arguments=kind.arguments,
            convolution=convolution,
        )

    def rows(
        self, in_features: int, out_features: int, item_bytes: int, **arguments: Any
    ) -> StoredRows:
        """For each tensor that represents the weight how many rows it has, and the bytes of one.

        Those that are no codes have `item_bytes` an element.
        """
        stored = self.stored(in_features, out_features, item_bytes, **arguments)
        if stored is not None:
            return stored
        shapes = self.shapes(in_features, out_features, **arguments).values()
        return tuple((shape[0], math.prod(shape[1:]) * item_bytes) for shape in shapes)

    def elements(self, in_features: int, out_features: int, **arguments: Any) -> int:
        """Elements of the weight that products are computed with, or of the factors of one.

        Vectors have no matrix product.
        """
        own = self.shapes(in_features, out_features, **arguments)
        resting = self.resting(in_features, out_features, **arguments)
        shapes = (*own.values(), *resting.values())
        return sum(math.prod(shape) for shape in shapes if len(shape) > 1)

    def weight_bytes(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        item_bytes: int = 4,
        **arguments: Any,
    ) -> int:
        """Bytes of a layer's tensors, those that are no codes with `item_bytes` an element.

        >>> DENSE.weight_bytes(6, 4, bias=True)
        112
        """
        tensors = self.rows(in_features, out_features, item_bytes, **arguments)
        held = sum(rows * each for rows, each in tensors)
        held += self.index_bytes(in_features, out_features, **arguments)
        resting = self.resting(in_features, out_features, **arguments).values()
        held += item_bytes * sum(math.prod(shape) for shape in resting)
        return held + bias * out_features * item_bytes

    def index_bytes(self, in_features: int, out_features: int, **arguments: Any) -> int:
        """Bytes of a layer's buffers of integers."""
        shapes = self.indices(in_features, out_features, **arguments).values()
        return sum(4 * math.prod(shape) for shape in shapes)

    @torch.no_grad()
    def round_trip(self, weight: Tensor, **arguments: Any) -> Tensor:
        """What becomes of a weight [out_features, in_features] in this form: a dense one again."""
        return self.to_dense(self.from_dense(weight, None, **arguments)).detach()


FORMS: dict[str, LinearForm] = {}


def register(form: LinearForm) -> LinearForm:
    """Make `form` known by its name; a later one of the same name replaces it."""
    FORMS[form.name] = form
    return form


def linear_form(name: str) -> LinearForm:
    """The form of that name; those of a plugin are there once its file was imported.

    Raises:
        InputError: no form has that name.
    """
    if name not in FORMS and (record := built_in(name)) and record.room == "linears":
        record.load()  # which registers it
    if name not in FORMS:
        known = {*FORMS, *(record.name for record in of_package("modicum.linears"))}
        raise InputError(
            "no linear form has this name; that of a plugin needs the plugin in the recipe",
            field="linear",
            value=name,
            allowed=", ".join(sorted(known)),
            candidates=known,
        )
    return FORMS[name]


def make_linear(
    form: str | LayerForm,
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """An uninitialised layer from `in_features` to `out_features` in a form, or that of a name.

    Raises:
        InputError: no form has that name.

    >>> make_linear("dense", 4, 2, bias=False)
    Linear(in_features=4, out_features=2, bias=False)
    """
    form = LayerForm(form) if isinstance(form, str) else form
    make = linear_form(form.name).make
    return make(in_features, out_features, bias, device=device, dtype=dtype, **form.arguments)


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
DENSE = register(LinearForm(DENSE_FORM.name, nn.Linear, _from_dense, _to_dense, write=_write))


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
        InputError: the module is no linear layer, or no dense weight computes what it does.
    """
    form = form_of(module)
    if form is None:
        raise InputError("no linear form is known for this layer", value=type(module).__name__)
    if (why := why_not_dense(module)) is not None:
        raise InputError(f"this layer has no dense weight: {why}", value=form.name)
    return form.to_dense(module)


def why_not_dense(module: nn.Module) -> str | None:
    """Why no dense weight computes what a linear layer does; None: one does, or it is no layer."""
    form = form_of(module)
    return None if form is None else form.why_not_dense(**form.arguments(module))


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


def forms_of(model: nn.Module) -> FormPlan:
    """The plan of forms that a model has: its layers that train and are not dense."""
    found = {
        name: LayerForm(form.name, dict(form.arguments(module)))
        for name, module in model.named_modules()
        if (form := form_of(module)) is not None and form.trains and form is not DENSE
    }
    return FormPlan(layers=found)


def undense(plan: FormPlan) -> FormPlan:
    """Of a plan the layers that no dense weight represents."""
    kept = {
        name: form
        for name, form in plan.layers.items()
        if linear_form(form.name).why_not_dense(**form.arguments) is not None
    }
    return FormPlan(layers=kept)


@torch.no_grad()
def fit_weight(module: nn.Module, weight: Tensor) -> None:
    """Put into a layer what its form makes of a dense weight [out_features, in_features].

    Every rank gives the full weight; of a layer that is sharded each keeps its own rows.

    Raises:
        InputError: the module is no linear layer.
    """
    form = form_of(module)
    if form is None:
        raise InputError("no linear form is known for this layer", value=type(module).__name__)
    if isinstance(module, FormLayer) and module.trains:
        module.fit(weight)
        return
    made = dict(form.from_dense(weight, None, **form.arguments(module)).named_parameters())
    for name, parameter in module.named_parameters(recurse=False):
        if name in made:
            part, before = own_part(parameter)
            part.copy_(made[name][before : before + part.shape[0]])


def own_rows(module: nn.Module) -> tuple[int, int]:
    """How many rows of a linear layer's weight this rank holds, and how many lie before them.

    Those are the rows that `write_weight` takes. All tensors of a layer that can be written have a
    row for each output, or one for as many outputs as the layer says.
    """
    part, before = own_part(next(module.parameters(recurse=False)))
    if not isinstance(module, FormLayer):
        return part.shape[0], before
    outputs, each = module.out_features, module.outputs_a_row
    first = min(before * each, outputs)
    return min(part.shape[0] * each, outputs - first), first
