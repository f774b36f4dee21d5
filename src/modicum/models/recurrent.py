"""A vanilla recurrent net for sequences with one label: its configuration, its modules, its files.

Knows nothing of losses, optimizers or how its weights are found.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.files import disk_errors, publish_folder, read_json, write_json
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputed
from modicum.core.random import normal_
from modicum.core.ranks.sharding import elements_before, own_part, whole
from modicum.models.convnet import CONFIG as CONFIG
from modicum.models.convnet import WEIGHTS, refuse_others
from modicum.models.safetensors_file import read_entries

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
    """Write `model` to `folder` as config.json and model.safetensors atomically.

    Args:
        write: of a model that is sharded over ranks every rank calls this, so that its tensors can
            be gathered, and one rank writes.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    from safetensors.torch import save_file

    target = Path(folder)
    weights = {name: whole(tensor.detach()) for name, tensor in model.named_parameters()}
    if write:
        with publish_folder(target) as temporary, disk_errors(target):
            save_file({name: w.cpu().contiguous() for name, w in weights.items()},
                      temporary / WEIGHTS, {"format": "pt"})  # fmt: skip
            write_json(temporary / CONFIG, {"model_type": _MODEL_TYPE, **asdict(model.config)})
    return target


def read_config(folder: str | Path) -> RecurrentConfig:
    """The configuration of a folder that `save` wrote.

    Raises:
        InputError: it is missing, cannot be read, or is another model's.
    """
    file = Path(folder) / CONFIG
    try:
        raw: dict[str, Any] = read_json(file)
        model_type = raw.pop("model_type", None)
    except AttributeError:
        raise InputError("cannot be read as a model's configuration", file=file) from None
    if model_type != _MODEL_TYPE:
        raise InputError(
            "this is another kind of model", file=file, field="model_type", value=model_type,
            allowed=_MODEL_TYPE,
        )  # fmt: skip
    try:
        return RecurrentConfig(**raw)
    except TypeError as error:
        raise InputError(f"is no configuration of a RecurrentNet: {error}", file=file) from None


def fill(model: RecurrentNet, folder: str | Path, skip: Collection[str] = ()) -> RecurrentNet:
    """Read the weights of a folder into a model that has memory; a rank, its part of each.

    Args:
        skip: parameters that are left as they are.

    Raises:
        InputError: the file is damaged, or its tensors are not those of the model.
    """
    from safetensors import safe_open

    file = Path(folder) / WEIGHTS
    found = {name: entry.shape for name, entry in read_entries(file).items()}
    refuse_others(model.config.parameter_shapes(), found, file)
    with safe_open(file, "pt") as tensors, torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in skip or name not in found:
                continue
            part, before = own_part(parameter)
            part.copy_(tensors.get_slice(name)[before : before + len(part)])
    return model
