"""The built-in Llama-family decoder, with Hugging Face's parameter names.

Knows nothing of losses, files, optimizers or adapters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.linear_forms import form_of, frozen_linears, own_rows, write_weight
from modicum.core.layers.map import ModelMap, find_map
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputed
from modicum.core.random import normal_
from modicum.core.ranks.sharding import elements_before, own_part
from modicum.models.blocks import Block, RMSNorm
from modicum.models.config import ModelConfig
from modicum.models.layer_maps import llama_map
from modicum.models.rope import describe


@dataclass(frozen=True)
class States:
    """What every layer's mixer remembers of the first `position` tokens."""

    layers: tuple[Any, ...]
    position: int = 0


class Decoder(nn.Module):
    """Embedding, blocks and the last norm: all but the output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_epsilon)


class Llama(nn.Module):
    """A decoder that maps token ids [B, T] to logits [B, T, vocabulary].

    Build it under `core.layers.meta.on_meta` and nothing is allocated; `create` makes one ready to
    train. With tied embeddings there is no `lm_head`: the embedding's weight serves as both.

    Attributes:
        recompute: whether each block's activations are computed anew in the backward pass
            instead of being kept.

    Raises:
        InputError: the configuration names a mixer, MLP or linear form that does not exist.
    """

    peft_task_type: ClassVar = "CAUSAL_LM"  # as which PEFT loads adapters of it

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.recompute = False
        self.model = Decoder(config)
        self.lm_head: nn.Linear | None = None
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.width, config.vocabulary_size, bias=False)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder blocks, in order."""
        return self.model.layers

    @overload
    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor: ...
    @overload
    def forward(
        self, input_ids: Tensor, documents: Tensor | None = None, *, states: States
    ) -> tuple[Tensor, States]: ...
    def forward(
        self, input_ids: Tensor, documents: Tensor | None = None, *, states: States | None = None
    ) -> Tensor | tuple[Tensor, States]:
        """Logits [B, T, vocabulary]; with `states`, those of tokens that follow, and new states."""
        if states is None:
            return self.logits(self.hidden(input_ids, documents))
        hidden, states = self.hidden(input_ids, documents, states=states)
        return self.logits(hidden), states

    @overload
    def hidden(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor: ...
    @overload
    def hidden(
        self, input_ids: Tensor, documents: Tensor | None = None, *, states: States
    ) -> tuple[Tensor, States]: ...
    def hidden(
        self, input_ids: Tensor, documents: Tensor | None = None, *, states: States | None = None
    ) -> Tensor | tuple[Tensor, States]:
        """The last norm's output [B, T, width], which `logits` maps to logits.

        Args:
            documents: int [B, T], the document of each token; attention stays in a document and
                positions restart with each. None: every row is one document.
            states: from `new_states` or the last call; not together with `documents`.

        Raises:
            ValueError: both `documents` and `states` are given.
        """
        if documents is not None and states is not None:
            raise ValueError("tokens that continue cached ones cannot be split into documents")
        x = self.model.embed_tokens(input_ids)
        past = states.position if states is not None else 0
        sequence = describe(self.config, input_ids, documents, past, compute_dtype(x))
        if states is None:
            recompute = self.recompute and torch.is_grad_enabled()
            for block in self.model.layers:
                if recompute:
                    x, _ = recomputed(block, x, None, sequence)
                else:
                    x, _ = block(x, None, sequence)
            return self.model.norm(x)
        layers = []
        for block, state in zip(self.model.layers, states.layers, strict=True):
            x, state = block(x, state, sequence)
            layers.append(state)
        return self.model.norm(x), States(tuple(layers), past + input_ids.shape[1])

    @property
    def weights_read(self) -> tuple[str, ...]:
        """Layers whose weight is used without calling them: embeddings that make the logits too."""
        return ("model.embed_tokens",) if self.lm_head is None else ()

    def layer_map(self) -> ModelMap:
        """The map of this model: of dense layers by its configuration, of others found."""
        dense = {type(m) for m in self.modules() if form_of(m) is not None} <= {nn.Linear}
        known = (self.config.mixer, self.config.mlp) == ("attention", "swiglu")
        return llama_map(self.config) if dense and known else find_map(self)

    def units_removed(self) -> None:
        """State the blocks' widths in the configuration, after units of some were removed."""
        plan = self.config.forms
        for prefix, block in zip(self.config.block_prefixes(), self.blocks, strict=True):
            plan = plan.with_block(prefix.removesuffix("."), **cast(Block, block).widths())
        self.config = replace(self.config, forms=plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., width] to logits [..., vocabulary]."""
        if self.lm_head is None:
            return F.linear(hidden, self.model.embed_tokens.weight)
        return self.lm_head(hidden)

    def continued(self, input_ids: Tensor, states: States) -> tuple[Tensor, States]:
        """Logits [B, vocabulary] of what follows the last of these tokens, and new states."""
        hidden, states = self.hidden(input_ids, states=states)
        return self.logits(hidden[:, -1]), states

    def new_states(self, batch: int, capacity: int | None = None) -> States:
        """Empty states for `batch` rows of up to `capacity` tokens (default: the context)."""
        weight = self.model.embed_tokens.weight
        room = (batch, capacity or self.config.context, weight.device, compute_dtype(weight))
        mixers = (cast(Block, block).self_attn for block in self.model.layers)
        return States(tuple(mixer.new_state(*room) for mixer in mixers))

    @torch.no_grad()
    def initialise(self, seed: int) -> Llama:
        """Fill every parameter from (seed, its name): norms 1, biases 0, weights N(0, std^2).

        std is `initializer_range`, and that over sqrt(2 * layers) for the projections that add to
        the residual stream (GPT-2's rule, Radford et al. 2019, section 2.3). A rank that holds a
        part of a parameter fills that part, with the values that it has in the full one. Layers of
        a frozen form hold what becomes of the weight that a dense layer would have; those of
        another form that trains draw their tensors so that the weight is as large on average.

        Raises:
            ValueError: the model is still on the meta device.
        """
        frozen = frozen_linears(self)
        formed = {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, FormLayer) and module.trains
        }
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} has no memory yet; call to_empty(device=...) first")
            part, _ = own_part(parameter)
            path, _, leaf = name.rpartition(".")
            if name.endswith("norm.weight"):
                part.fill_(1.0)
            elif leaf == "bias":
                part.zero_()
            elif path not in frozen and path not in formed:
                self._draw(part, name, seed, elements_before(parameter))
        for path, layer in frozen.items():
            rows, before = own_rows(layer)
            columns = cast(int, layer.in_features)
            device = next(layer.parameters()).device
            weight = torch.empty(rows, columns, dtype=torch.float32, device=device)
            self._draw(weight, f"{path}.weight", seed, before * columns)
            write_weight(layer, weight)
        for path, layer in formed.items():
            layer.initialise(std=self._std(path), seed=seed, name=path)
        return self

    def _draw(self, part: Tensor, name: str, seed: int, before: int) -> None:
        """Fill the part of a weight that follows its first `before` elements."""
        std = self._std(name.rpartition(".")[0])
        normal_(part, seed=seed, name=name, std=std, offset=before)

    def _std(self, layer: str) -> float:
        """Of the entries of a layer's weight when the model is new."""
        adds = layer.endswith(("o_proj", "down_proj"))
        return self.config.initializer_range / (math.sqrt(2 * self.config.layers) if adds else 1)


def create(
    config: ModelConfig,
    seed: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Llama:
    """A new model with random weights that depend on the seed alone.

    Raises:
        InputError: the configuration names a mixer, MLP or linear form that does not exist.

    >>> config = ModelConfig(vocabulary_size=11, width=8, layers=1, heads=2)
    >>> create(config, seed=0)(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    with on_meta(dtype):
        model = Llama(config)
    materialise(model, device)
    return model.initialise(seed)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which linear layers will give their outputs for x."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
