"""A small convolutional classifier of images: its configuration, its modules, its files.

Six convolutions in the manner of VGG by default. Knows nothing of losses, optimizers or
what others do with its activations.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.map import ModelMap
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.layers.recomputing import recomputed
from modicum.core.random import normal_
from modicum.core.ranks.sharding import elements_before, own_part
from modicum.models.layer_maps import convnet_map
from modicum.models.own_folder import CONFIG as CONFIG
from modicum.models.own_folder import fill_own, read_own_config, save_own

_KERNEL = 3
_MODEL_TYPE = "modicum_convnet"


@dataclass(frozen=True)
class ConvNetConfig:
    """The shape of a `ConvNet`.

    Args:
        classes: what it tells apart.
        channels, size: of an image: [channels, size, size].
        widths: channels that each convolution makes.
        pool_every: after so many convolutions height and width are halved.
        norm: what follows each convolution: nothing, or a normalisation over `groups` of channels.

    Raises:
        InputError: these do not go together.

    >>> ConvNetConfig(widths=(4, 8)).parameter_shapes()["blocks.1.conv.weight"]
    (8, 4, 3, 3)
    """

    classes: int = 10
    channels: int = 3
    size: int = 32
    widths: tuple[int, ...] = (32, 32, 64, 64, 128, 128)
    pool_every: int = 2
    norm: Literal["none", "group"] = "none"
    groups: int = 4

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise InputError("needs at least one convolution", field="widths", value=self.widths)
        if self.norm not in ("none", "group"):
            raise InputError("no norm has this name", field="norm", value=self.norm)
        if self.pool_every < 1:
            raise InputError("must be at least 1", field="pool_every", value=self.pool_every)
        halvings = sum(self.pools(block) for block in range(len(self.widths)))
        if self.size % 2**halvings or not self.size:
            raise InputError(
                f"is halved {halvings} times; make it a multiple of {2**halvings}, or pool less "
                "often",
                field="size",
                value=self.size,
            )
        odd = next((width for width in self.widths if width % self.groups), None)
        if self.norm == "group" and odd is not None:
            raise InputError(f"must divide every width ({odd})", field="groups", value=self.groups)

    def pools(self, block: int) -> bool:
        """Whether the convolution number `block`, from 0, is followed by pooling."""
        return (block + 1) % self.pool_every == 0

    def side(self, block: int) -> int:
        """Height and width of what the convolution number `block` reads and makes."""
        return self.size // 2 ** (block // self.pool_every)

    def inputs(self, block: int) -> int:
        """Channels that the convolution number `block` reads."""
        return self.widths[block - 1] if block else self.channels

    def block_prefixes(self) -> list[str]:
        """How the names of each block's parameters begin."""
        return [f"blocks.{block}." for block in range(len(self.widths))]

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, in the order of the model's own."""
        shapes: dict[str, tuple[int, ...]] = {}
        for block, (prefix, width) in enumerate(
            zip(self.block_prefixes(), self.widths, strict=True)
        ):
            shapes[f"{prefix}conv.weight"] = (width, self.inputs(block), _KERNEL, _KERNEL)
            shapes[f"{prefix}conv.bias"] = (width,)
            if self.norm == "group":
                shapes[f"{prefix}norm.weight"] = shapes[f"{prefix}norm.bias"] = (width,)
        shapes["head.weight"] = (self.classes, self.widths[-1])
        shapes["head.bias"] = (self.classes,)
        return shapes

    def parameter_count(self) -> int:
        """How many numbers the model learns."""
        return sum(math.prod(shape) for shape in self.parameter_shapes().values())


class ConvBlock(nn.Module):
    """relu(norm(conv(x))), pooled where the configuration says so."""

    def __init__(self, config: ConvNetConfig, block: int) -> None:
        super().__init__()
        width, pad = config.widths[block], _KERNEL // 2
        self.conv = nn.Conv2d(config.inputs(block), width, _KERNEL, padding=pad)
        self.norm = nn.GroupNorm(config.groups, width) if config.norm == "group" else None
        self.pools = config.pools(block)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [B, C, H, W] to [B, width, H, W], or half of both sides."""
        x = self.conv(x)
        x = F.relu(x if self.norm is None else self.norm(x))
        return F.max_pool2d(x, 2) if self.pools else x


class ConvNet(nn.Module):
    """Maps images [B, channels, size, size] to logits [B, classes].

    Blocks of convolution, norm and ReLU, the mean over what is left of height and width, and a
    linear layer. Build it under `core.layers.meta.on_meta` and nothing is allocated; `create` makes
    one ready to train.

    Attributes:
        blocks: in the order in which they run.
        recompute: whether each block's activations are computed anew in the backward pass instead
            of being kept.

    Source: Simonyan and Zisserman, arXiv 1409.1556 (pairs of 3x3 convolutions, then pooling); norms
    as in Wu and He, arXiv 1803.08494.
    """

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config, self.recompute = config, False
        self.blocks = nn.ModuleList(ConvBlock(config, block) for block in range(len(config.widths)))
        self.head = nn.Linear(config.widths[-1], config.classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes]."""
        x = images
        for block in self.blocks:
            again = self.recompute and torch.is_grad_enabled()
            x = recomputed(block, x) if again else block(x)
        return self.head(x.mean((2, 3)))

    def layer_map(self) -> ModelMap:
        """The map of this model."""
        config = self.config
        return convnet_map(config.widths, config.groups if config.norm == "group" else 0)

    @torch.no_grad()
    def initialise(self, seed: int) -> ConvNet:
        """Fill every parameter from (seed, its name): norms 1, biases 0, weights N(0, std^2).

        std is sqrt(2 / inputs of an output) for convolutions (He et al., arXiv 1502.01852) and
        1 / sqrt(inputs) for the head. A rank that holds a part of a parameter fills that part, with
        the values that it has in the full parameter.

        Raises:
            ValueError: the model is still on the meta device.
        """
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                raise ValueError(f"{name} has no memory yet; call to_empty(device=...) first")
            part, _ = own_part(parameter)
            if name.endswith("norm.weight"):
                part.fill_(1.0)
            elif name.endswith(".bias"):
                part.zero_()
            else:
                std = math.sqrt((2.0 if parameter.ndim > 2 else 1.0) / parameter[:1].numel())
                normal_(part, seed=seed, name=name, std=std, offset=elements_before(parameter))
        return self


def create(config: ConvNetConfig, seed: int, device: torch.device | str = "cpu") -> ConvNet:
    """A new model with random weights that depend on the seed alone.

    >>> create(ConvNetConfig(widths=(4, 4)), seed=0)(torch.ones(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    with on_meta():
        model = ConvNet(config)
    materialise(model, device)
    return model.initialise(seed)


def save(model: ConvNet, folder: str | Path, *, write: bool = True) -> Path:
    """Write `model` to `folder`, as `own_folder.save_own` does."""
    return save_own(model, model.config, _MODEL_TYPE, folder, write=write)


def read_config(folder: str | Path) -> ConvNetConfig:
    """The configuration of a folder that `save` wrote.

    Raises:
        InputError: it is missing, cannot be read, or is another model's.
    """
    return read_own_config(
        folder,
        _MODEL_TYPE,
        "ConvNet",
        lambda raw: ConvNetConfig(**raw | {"widths": tuple(raw["widths"])}),
    )


def fill(model: ConvNet, folder: str | Path, skip: Collection[str] = ()) -> ConvNet:
    """Read the weights of a folder into a model that has memory, as `own_folder.fill_own` does."""
    return fill_own(model, model.config, folder, skip)


def load(folder: str | Path, device: torch.device | str = "cpu") -> ConvNet:
    """The model of a folder that `save` wrote.

    Raises:
        InputError: the folder is no such model.
    """
    config = read_config(folder)
    with on_meta():
        model = ConvNet(config)
    materialise(model, device)
    return fill(model, folder)
