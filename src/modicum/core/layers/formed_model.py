"""A model whose dense layers take other forms: the runtime that puts them in, and out again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import metadata
from modicum.core.errors import InputError
from modicum.core.layers.dense_layers import all_convolutions, all_layers, untied
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.layer_sites import Site
from modicum.core.layers.linear_forms import (
    full_weight,
    linear_form,
    make_linear,
    why_not_dense,
)
from modicum.core.layers.meta import materialise
from modicum.core.ranks.sharding import whole
from modicum.core.torch_private import exchange_call_hooks, has_state_hooks

_TRANSPOSED = "stands_for_transposed"


def stands_for_transposed(layer: nn.Module) -> bool:
    """Whether a form has replaced a layer that stores W^T, as files of the model do.

    Forms themselves hold W.
    """
    return getattr(layer, _TRANSPOSED, False)


def _why_not_replaced(layer: nn.Module) -> str | None:
    """Why a layer that replaces this one would not be called as it is; None: it would be."""
    # What accelerate leaves on a layer whose hooks it has removed is the layer's own again.
    own = MethodType(type(layer).forward, layer)
    if vars(layer).get("forward", own) != own:
        return "its `forward` was replaced (by accelerate?), and another form would not call that"
    # As torch's weight_norm, spectral_norm and pruning do; of a bias, too.
    hooks = layer._forward_pre_hooks.values()
    if any(hasattr(hook, "compute_weight") or hasattr(hook, "apply_mask") for hook in hooks):
        return "a hook makes its parameters of others (weight_norm, pruning)"
    if has_state_hooks(layer):
        return "hooks change its state dict, and another form has other tensors there"
    return None


@contextmanager
def of_layer(name: str) -> Iterator[None]:
    """Have an error that names no value say of which layer it is, in a `with` block."""
    try:
        yield
    except InputError as error:
        if error.field is not None or error.file is not None or error.value is not None:
            raise
        raise InputError(error.problem, value=name, allowed=error.allowed) from error


class FormedModel:
    """The handle to a model and the forms in it, as a plan of forms names them by layer.

    Hooks of a layer's calls are those of the form that replaces it, and of the dense layer that
    replaces the form.

    Attributes:
        plan: the forms of the layers that take one, by full name.
        layers: those layers, as they were.
        left_out: what a method's `targets` left dense though it holds matrices, by name, with the
            reason.

    Raises:
        InputError: a layer is not there, is not dense, has a tied weight, or has a `forward` or
            hooks of its own that would be lost.
    """

    def __init__(
        self, model: nn.Module, plan: FormPlan, left_out: Mapping[str, str] | None = None
    ) -> None:
        self.model, self.plan, self.left_out = model, plan, dict(left_out or {})
        there = all_layers(model) | all_convolutions(model)
        for name, form in plan.layers.items():
            if name not in there:
                problem = "the model has no dense linear layer of this name"
                raise InputError(problem, value=name, candidates=there)
            if there[name].kind == "convolution" and linear_form(form.name).convolution is None:
                problem = f"{form.name} holds linear layers alone, and this is a convolution"
                raise InputError(problem, value=name)
        chosen = untied(model, [there[name] for name in plan.layers])
        self.layers = {layer.name: layer for layer in chosen}
        for name in self.layers:
            if (why := _why_not_replaced(model.get_submodule(name))) is not None:
                problem = f"{why}; undo that before, or leave the layer out"
                raise InputError(problem, value=name)
        self._dense: dict[str, nn.Module] = {}

    def wrap(self) -> None:
        """Put the forms in, their numbers undefined: to load numbers into, or on meta."""
        for name in self.layers:
            self._replace(name)

    @torch.no_grad()
    def convert(self) -> None:
        """Put each weight into its form, layer by layer; make optimizers afterwards.

        Raises:
            InputError: the weights have no memory, another form already, or values that the form
                cannot represent.
        """
        for name in self.layers:
            weight = self._weight(name)
            planned = self.plan.of(name)
            form: Any = linear_form(planned.name)
            kind = form.convolution if self._convolves(name) else form
            with of_layer(name):
                made = kind.from_dense(weight, None, **planned.arguments)
            self._put_in(name, made)

    def _convolves(self, name: str) -> bool:
        return self.layers[name].kind == "convolution"

    def _weight(self, name: str) -> Tensor:
        """The weight [out, in] of a layer that is dense still."""
        if name in self._dense:
            raise InputError("this layer has another form already", value=name)
        stored = self.model.get_submodule(name).get_parameter("weight").detach()
        if stored.is_meta:
            raise InputError("this needs the trained weights, and this model has no memory")
        return stored.T if self.layers[name].transposed else stored.flatten(1)

    def _replace(self, name: str) -> nn.Module:
        """Replace a dense layer by a form of undefined numbers."""
        if name in self._dense:
            raise InputError("this layer has another form already", value=name)
        layer, weight = self.layers[name], self.model.get_submodule(name).get_parameter("weight")
        sizes, planned = (layer.in_features, layer.out_features), self.plan.of(name)
        device, dtype = weight.device, weight.dtype
        kind: Any = linear_form(planned.name).convolution if self._convolves(name) else None
        if kind is None:
            return self._put_in(name, make_linear(planned, *sizes, False, device, dtype))
        return self._put_in(name, kind(*sizes, False, device, dtype, **planned.arguments))

    def _put_in(self, name: str, form: nn.Module) -> nn.Module:
        """Replace a dense layer by this one, which gets its bias."""
        layer, dense = self.layers[name], self.model.get_submodule(name)
        weight, bias = dense.get_parameter("weight"), dense._parameters["bias"]
        form.train(dense.training)
        setattr(form, _TRANSPOSED, layer.transposed)
        if linear_form(self.plan.of(name).name).trains:
            form.requires_grad_(weight.requires_grad)
            if isinstance(form, FormLayer):
                form.describe(metadata(weight))
                if isinstance(dense, nn.Conv2d):
                    form.read_as(dense)
        form.register_parameter("bias", bias)
        dense._parameters["bias"] = None
        exchange_call_hooks(dense, form)
        self._dense[name] = dense.to("meta")
        self._put(layer, form)
        return form

    def _put(self, layer: Site, module: nn.Module) -> None:
        for name in layer.names:
            self.model.set_submodule(name, module)

    @torch.no_grad()
    def merge(self) -> None:
        """Put dense layers back with the weights that the forms represent; biases stay as they are.

        For files that know dense layers alone. Weights that are sharded over ranks are gathered.

        Raises:
            InputError: no dense weight computes what some layer does; nothing was changed.
        """
        for name in self.layers:
            if (why := why_not_dense(self.model.get_submodule(name))) is not None:
                raise InputError(f"this layer has no dense weight: {why}", value=name)
        for name, layer in self.layers.items():
            form = self.model.get_submodule(name)
            weight = whole(full_weight(form))
            dense = copy.deepcopy(self._dense.pop(name)).train(form.training)
            materialise(dense, weight.device)
            parameter = dense.get_parameter("weight")
            parameter.copy_((weight.T if layer.transposed else weight).view(parameter.shape))
            own = [each for each, _ in form.named_parameters(recurse=False) if each != "bias"]
            parameter.requires_grad_(any(form.get_parameter(each).requires_grad for each in own))
            dense._parameters["bias"] = form._parameters.get("bias")
            exchange_call_hooks(form, dense)
            self._put(layer, dense)

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """The layers' tensors by name, such as `name.up`, and their biases."""
        found: dict[str, Tensor] = {}
        for name in self.layers:
            layer = self.model.get_submodule(name)
            own = *layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)
            found |= {f"{name}.{key}": tensor.detach() for key, tensor in own}
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put numbers back into a model that was wrapped.

        Raises:
            InputError: names or shapes are others than this model's.
        """
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != given:
            different = sorted(name for name, _ in shapes.items() ^ given.items())[:3]
            raise InputError(f"these are not this model's layers; they differ in {different}")
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def close(self) -> None:
        """Forget how the dense layers looked; the forms stay."""
        self._dense.clear()
