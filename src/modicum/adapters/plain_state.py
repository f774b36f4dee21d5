"""What a layer with adapters is in a state dict: the plain weight, and the adapters next to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.adapter_layer import AdapterLayer
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import is_sharded


class PlainState(nn.Module):
    """A layer with adapters whose state dict a model without them reads too.

    The weight has the name and the value that it would have without adapters, and their tensors
    stand next to it: so `save_pretrained`, `from_pretrained` and other trainers' checkpoints hold
    the model as well as its adapters.
    """

    layers_by_adapter: nn.ModuleDict

    def rewriter(self) -> AdapterLayer | None:
        """The adapter's layer that has a part of the weight now."""
        layers = self.layers_by_adapter.values()
        return next((x for x in layers if isinstance(x, AdapterLayer) and x.rewrote), None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        _check_is_plain(self, prefix)
        if (layer := self.rewriter()) is not None:
            destination[f"{prefix}weight"] = self._original(layer)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name, each in self.layers_by_adapter.items():
            said = state_dict.get(f"{prefix}layers_by_adapter.{name}._extra_state")
            if said is not None and isinstance(each, AdapterLayer):
                each.set_extra_state(said)  # refused before the weight is touched
        layer, key = self.rewriter(), f"{prefix}weight"
        found = {} if layer is None else self._kept(layer, state_dict, prefix)
        shapes = {name: tensor.shape for name, tensor in found.items()}
        fits = layer is not None and shapes == {n: t.shape for n, t in layer.kept_buffers()}
        # What does not fit is named by `load_state_dict` itself, and nothing of it is used.
        if (
            fits
            and key in state_dict
            and state_dict[key].shape == self.get_parameter("weight").shape
        ):
            assert layer is not None
            _check_is_plain(self, prefix)
            before, stored = self._original(layer), state_dict[key]
            taken = layer.taken()
            for name, buffer in layer.kept_buffers():
                buffer.copy_(found[name])
            # What it has is exact where nothing else is read: sums would round it.
            same = torch.equal(taken, layer.taken()) and torch.equal(before, stored.to(before))
            rest = base_weights.at_least_fp32(stored.to(before.device))
            rest = rest - base_weights.oriented(layer.taken(), layer.site)
            state_dict[key] = self.get_parameter("weight") if same else rest.to(stored.dtype)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _kept(self, layer: AdapterLayer, state: Any, prefix: str) -> dict[str, Tensor]:
        """What a state dict says was taken out of the weight, else what it is here."""
        own = next(name for name, known in self.layers_by_adapter.items() if known is layer)
        at = f"{prefix}layers_by_adapter.{own}."
        return {name: state.get(f"{at}{name}", buffer) for name, buffer in layer.kept_buffers()}

    def _original(self, layer: AdapterLayer) -> Tensor:
        """The weight as it is stored without the adapter that has a part of it."""
        weight = base_weights.read(self, layer.site) + layer.taken()
        stored = base_weights.oriented(weight, layer.site)
        return stored.to(self.get_parameter("weight").dtype).detach()


def _check_is_plain(layer: PlainState, prefix: str) -> None:
    """Make sure that a weight can be kept under its plain name.

    Raises:
        InputError: it is quantized, or of another form that a plain model does not have; or its
            adapter has a part of it, and it is sharded.
    """
    name = prefix.removesuffix(".")
    if not base_weights.is_plain(layer):
        raise InputError(
            "its weight is held in a form that a plain model's state dict does not have, so a "
            "model that read it would start this layer at random; save the adapter with "
            "adapter.save(folder), or merge(dense=torch.bfloat16) and save the model; "
            'transformers.Trainer takes save_strategy="no"',
            value=name,
        )
    sharded = any(is_sharded(parameter) for parameter in layer.parameters(recurse=False))
    if sharded and layer.rewriter() is not None:
        raise InputError(
            "its adapter has a part of the weight, which is sharded, so no rank can give the "
            "weight of the plain model; save the adapter with adapter.save(folder)",
            value=name,
        )
