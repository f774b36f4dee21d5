"""Which layers of a model are smaller as dense weights than in the form that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.linear_forms import DENSE, forms_of, linear_form, undense


def larger_forms(model: nn.Module) -> dict[str, float]:
    """Layers that take more bytes in their form than as a dense weight, with how many times as
    many, by name: of those in `forms_of` that have a dense weight."""
    plan, found = forms_of(model), {}
    for name in plan.layers.keys() - undense(plan).layers.keys():
        layer: Any = model.get_submodule(name)
        sizes = layer.in_features, layer.out_features
        arguments: Mapping[str, Any] = plan.of(name).arguments
        held = linear_form(plan.of(name).name).weight_bytes(*sizes, **arguments)
        if held > (dense := DENSE.weight_bytes(*sizes)):
            found[name] = held / dense
    return {name: found[name] for name in plan.layers if name in found}


def small_forms_of(model: nn.Module) -> FormPlan:
    """The plan of `forms_of` without the layers that are larger in their form than dense."""
    larger = larger_forms(model)
    layers = forms_of(model).layers
    return FormPlan(layers={name: form for name, form in layers.items() if name not in larger})
