"""A vanilla recurrent net for sequences with one label: its configuration, its modules, its files.

Knows nothing of losses, optimizers or how its weights are found.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputed
from modicum.core.random import normal_
from modicum.core.ranks.sharding import elements_before, own_part
from modicum.models.own_folder import CONFIG as CONFIG
from modicum.models.own_folder import fill_own, read_own_config, save_own

_MODEL_TYPE = "modicum_recurrent"


@dataclass(frozen=True)
class RecurrentConfig:
    """The shape of a `RecurrentNet`: channels of an input, width of its state, classes.

    >>> RecurrentConfig(channels=3, width=5, classes=2).parameter_count()
    57
    """

    channels: int = 4
    width: int = 32
    classes: int = 4

    def block_prefixes(self) -> list[str]:
        """How the names of each block's parameters begin."""
        return ["blocks.0."]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in the order of the model's own."""
        return {
            "blocks.0.input.weight": (self.width, self.channels),
            "blocks.0.input.bias": (self.width,),
            "blocks.0.recurrent.weight": (self.width, self.width),
            "head.weight": (self.classes, self.width),
            "head.bias": (self.classes,),
        }

    def parameter_count(self) -> int:
        """How many numbers the model learns."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


class RecurrentLayer(nn.Module):
    """s_t = tanh(U x_t + b + W s_{t-1}), from s_0 = 0."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.channels, config.width)
        self.recurrent = nn.Linear(config.width, config.width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [B, T, channels] to states [B, T, width]."""
        driven = self.input(inputs)
        states = [driven[:, 0].tanh()]
        for step in range(1, inputs.shape[1]):
            states.append(torch.tanh(driven[:, step] + self.recurrent(states[-1])))
        return torch.stack(states, 1)


class RecurrentNet(nn.Module):
    """Maps sequences [B, T, channels] and the numbers of their last steps to logits [B, classes].

    One layer of tanh, and a linear layer on the state at each sequence's last step. Build it under
    `core.layers.meta.on_meta` and nothing is allocated; `create` makes one ready to train.

    Attributes:
        recompute: whether states are computed anew in the backward pass instead of being kept.

    Source: J. Elman, "Finding structure in time", Cognitive Science 14, 1990.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.blocks = nn.ModuleList([RecurrentLayer(config)])
        self.head = nn.Linear(config.width, config.classes)

    def forward(self, inputs: Tensor, last: Tensor) -> Tensor:
        """Logits [B, classes]; `last` is int64 [B], from 0."""
        states = inputs
        for block in self.blocks:
            again = self.recompute and torch.is_grad_enabled()
            states = recomputed(block, states) if again else block(states)
        return self.head(states[torch.arange(len(last), device=last.device), last])

    @torch.no_grad()
    def initialise(self, seed: int) -> RecurrentNet:
        """Fill every parameter from (seed, its name): biases 0, W orthogonal, others normal.

        U and V are N(0, 1 / inputs).
        A rank that holds a part of a parameter fills that part, with the values that it has in the
        full parameter. Orthogonal as in Saxe et al., arXiv 1312.6120.

        Raises:
            ValueError: the model is still on the meta device.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} has no memory yet; call to_empty(device=...) first")
            part, before = own_part(parameter)
            if name.endswith(".bias"):
                part.zero_()
            elif name.endswith("recurrent.weight"):
                drawn = torch.empty(parameter.shape, dtype=torch.float64)
                basis, corner = torch.linalg.qr(normal_(drawn, seed=seed, name=name))
                basis = basis * corner.diagonal().sign()  # so that every basis is as likely
                part.copy_(basis[before : before + len(part)])
            else:
                std = parameter.shape[1] ** -0.5
                normal_(part, seed=seed, name=name, std=std, offset=elements_before(parameter))
        return self


def create(config: RecurrentConfig, seed: int, device: torch.device | str = "cpu") -> RecurrentNet:
    """A new model with random weights that depend on the seed alone.

    >>> net = create(RecurrentConfig(channels=3, classes=2), seed=0)
    >>> net(torch.ones(5, 7, 3), torch.tensor([6, 6, 2, 0, 4])).shape
    torch.Size([5, 2])
    """
    with on_meta():
        model = RecurrentNet(config)
    materialise(model, device)
    return model.initialise(seed)


def save(model: RecurrentNet, folder: str | Path, *, write: bool = True) -> Path:
    """Write `model` to `folder`, as `own_folder.save_own` does."""
    return save_own(model, model.config, _MODEL_TYPE, folder, write=write)


def read_config(folder: str | Path) -> RecurrentConfig:
    """The configuration of a folder that `save` wrote.

    Raises:
        InputError: it is missing, cannot be read, or is another model's.
    """
    return read_own_config(folder, _MODEL_TYPE, "RecurrentNet", lambda raw: RecurrentConfig(**raw))


def fill(model: RecurrentNet, folder: str | Path, skip: Collection[str] = ()) -> RecurrentNet:
    """Read the weights of a folder into a model that has memory, as `own_folder.fill_own` does."""
    return fill_own(model, model.config, folder, skip)


def load(folder: str | Path, device: torch.device | str = "cpu") -> RecurrentNet:
    """The model of a folder that `save` wrote.

    Raises:
        InputError: the folder is no such model.
    """
    config = read_config(folder)
    with on_meta():
        model = RecurrentNet(config)
    materialise(model, device)
    return fill(model, folder)
