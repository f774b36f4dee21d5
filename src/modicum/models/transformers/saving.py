"""The files of a decoder of transformers, with the names that transformers itself would give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.linear_forms import form_of
from modicum.core.layers.meta import on_meta
from modicum.core.ranks.sharding import whole
from modicum.models.tensor_groups import TensorGroup, dense_weight
from modicum.models.transformers.buffers import exact_tensors, stored_buffers
from modicum.models.transformers.model import TransformersModel, build


def groups(model: TransformersModel, forms: FormPlan | None = None) -> list[TensorGroup]:
    """The tensors of the model's files, a block's together: what a file splits is in one block.

    Linear forms are written as the dense weights that they represent, shared tensors once.

    Args:
        forms: of layers whose own tensors are written instead; then all have the model's names.
    """
    forms = forms or FormPlan()
    named: Callable[..., dict[str, Tensor]]
    named = (lambda _, tensors: tensors) if forms.layers else _as_saved
    with on_meta():
        plain: Any = build(replace(model.decoder_config, forms=forms))
    shapes = dict(plain.named_parameters())
    shapes |= stored_buffers(plain)
    exact = exact_tensors(plain)
    prefixes = [f"{model.blocks_name}.{number}." for number in range(len(model.blocks))]
    names: dict[str, list[str]] = {prefix: [] for prefix in ["", *prefixes]}
    for name in shapes:
        names[next((each for each in prefixes if name.startswith(each)), "")].append(name)
    dtype = next(model.parameters()).dtype

    def group(own: list[str]) -> TensorGroup:
        empty = {name: torch.empty_like(shapes[name], dtype=dtype) for name in own}
        found = named(plain, empty).items()
        sizes = {name: tuple(tensor.shape) for name, tensor in found}
        kept = {name: empty[name] for name in own if name in exact}
        unrounded = frozenset(named(plain, kept)) if kept else frozenset[str]()

        def make() -> Mapping[str, Tensor]:
            return named(plain, {name: _tensor(model, name) for name in own})

        return TensorGroup(sizes, dtype.itemsize, make, unrounded)

    return [group(own) for own in names.values() if own]


def _as_saved(plain: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(plain, tensors)


def _tensor(model: TransformersModel, name: str) -> Tensor:
    """The full tensor of this name in a model with dense layers."""
    path, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(path)
    if leaf != "weight" or form_of(module) is None:
        return whole(getattr(module, leaf).detach())
    weight = dense_weight(module, next(model.parameters()).dtype)
    # Only a layer that took a form is known as one here, and it holds W where the file holds W^T.
    return weight.T if path in model.transposed else weight
