"""The tensors of an adapter: what each is like at first, and those that many layers share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from modicum.adapters.sites import Site
from modicum.core.contracts.parameters import (
    ParameterMetadata,
    describe_parameter,
    metadata,
    turn_of,
)
from modicum.core.layers.drawn_buffers import DrawnBuffers
from modicum.core.random import normal_, uniform_
from modicum.core.ranks.sharding import elements_before, own_part

if TYPE_CHECKING:
    from modicum.adapters.base import Adapter


@dataclass(frozen=True)
class Factor:
    """A tensor of an adapter, and how it starts.

    `bound` b starts it as U(-b, b), `std` s as N(0, s^2); neither, as zeros. Scalars have the shape
    [1], as sharding needs a dimension. A frozen one that is `precise` stays in its dtype where the
    model is cast to another.

    Args:
        learning_rate, weight_decay: multipliers on what the optimizer is given, which
            `optimizer_groups` reads and every recipe does; a decay of None is 1, and 0 for vectors.
        takes_turns: it does not take part in every update: `turn_of` its parameter says when.

    >>> factor = Factor((4,), learning_rate=10.0).described(nn.Parameter(torch.zeros(4)))
    >>> metadata(factor).learning_rate_multiplier, metadata(factor).weight_decay_multiplier
    (10.0, 0.0)
    """

    shape: tuple[int, ...]
    bound: float = 0.0
    std: float = 0.0
    dtype: torch.dtype = torch.float32
    precise: bool = False
    learning_rate: float = 1.0
    weight_decay: float | None = None
    takes_turns: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes, of the full tensor."""
        return self.numel * self.dtype.itemsize

    def empty(self, device: torch.device | str | None) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def described(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that holds it, with its multipliers and its turn where it has some."""
        if self.learning_rate != 1.0 or self.weight_decay is not None:
            decay = metadata(parameter).weight_decay_multiplier
            about = ParameterMetadata(
                self.learning_rate, decay if self.weight_decay is None else self.weight_decay
            )
            describe_parameter(parameter, about)
        if self.takes_turns:
            turn_of(parameter)
        return parameter

    def at_least(self, dtype: torch.dtype) -> Factor:
        """The same with that precision, if it is a number of less."""
        if not self.dtype.is_floating_point:
            return self
        return replace(self, dtype=torch.promote_types(self.dtype, dtype))

    def fill(self, tensor: Tensor, *, seed: int, name: str) -> None:
        """Start `tensor` in place, as a function of (seed, name) alone; a rank, its part of it."""
        before = elements_before(tensor)
        with torch.no_grad():
            part, _ = own_part(tensor)
            if self.bound:
                uniform_(part, -self.bound, self.bound, seed=seed, name=name, offset=before)
            elif self.std:
                normal_(part, std=self.std, seed=seed, name=name, offset=before)
            else:
                part.zero_()


# Numbers that say which tensors a layer has derived from its weight: 4 bytes, as files are small.
FINGERPRINT = Factor((2,), dtype=torch.float16, precise=True)


def derived_bytes(derived: Mapping[str, Factor], *, of_held: bool = False) -> int:
    """Bytes of tensors that are derived from a layer's weight, and of what says which they were.

    Args:
        of_held: whether nothing says it, as they are of what the layer holds.
    """
    own = sum(factor.bytes for factor in derived.values())
    return own + (FINGERPRINT.bytes if derived and not of_held else 0)


@dataclass(frozen=True)
class Generated(Factor):
    """A frozen tensor that is drawn from the adapter's seed wherever it is needed, and never kept.

    It is a function of that seed, the site and its own name, to the bit: drawn in fp32 on the CPU
    and cast afterwards. Every row is a stream of its own, so a tensor of more rows or columns
    begins with the same numbers. `draw(seed, name)` draws in another way; None: as `Factor` says.
    """

    draw: Callable[[int, str], Tensor] | None = None

    def value(self, *, seed: int, name: str) -> Tensor:
        """The tensor, on the CPU."""
        if self.draw is not None:
            return self.draw(seed, name)
        made = torch.empty(self.shape)
        for row, values in enumerate(made):
            plain = Factor(self.shape[1:], self.bound, self.std)
            plain.fill(values, seed=seed, name=f"{name}/{row}")
        return made


def generated(frozen: Mapping[str, Factor]) -> dict[str, Generated]:
    """Those of the frozen tensors that are drawn from a seed."""
    return {name: each for name, each in frozen.items() if isinstance(each, Generated)}


def frozen_bytes(frozen: Mapping[str, Factor]) -> int:
    """Bytes of tensors that are not trained, and of the seed that some are drawn from."""
    seed = torch.int64.itemsize if generated(frozen) else 0
    return seed + sum(factor.bytes for factor in frozen.values())


class FrozenBuffers(DrawnBuffers):
    """A module whose buffers are frozen tensors of an adapter: kept in its state, or generated."""

    def hold(
        self,
        frozen: Mapping[str, Factor],
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        """Register buffers without values, of at least this precision."""
        for name, factor in frozen.items():
            empty = factor.at_least(dtype).empty(device)
            if isinstance(factor, Generated):
                self.register_drawn(name, empty)
            else:
                self.register_buffer(name, empty)
            self.precise_names += (name,) * factor.precise


class SharedFactors(FrozenBuffers):
    """The tensors of an adapter that many sites use, owned once, by the model itself.

    So optimizers, clipping, checkpoints and gradient buckets see each once, and FSDP2's root group
    keeps it gathered from the first block's forward to the last one's backward. Layers read them
    here at each forward pass, as FSDP2 puts other tensors in their place.
    """

    def __init__(
        self, method: Adapter, sites: Sequence[Site], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.method, self.sites = method, tuple(sites)
        for name, factor in method.shared(sites).items():
            made = nn.Parameter(factor.at_least(_widest(sites)).empty(device))
            self.register_parameter(name, factor.described(made))
        self.hold(method.shared_frozen(sites), _widest(sites), device)

    def initialise(self, *, seed: int) -> None:
        """Start every tensor; the same seed gives the same values anywhere."""
        for key, factor in self.method.shared(self.sites).items():
            factor.fill(self.get_parameter(key), seed=seed, name=f"shared/{key}")

    def start_frozen(self, device: torch.device | str) -> None:
        """Give what is frozen and not generated memory on a device, as zeros."""
        for key, factor in self.method.shared_frozen(self.sites).items():
            if not isinstance(factor, Generated):
                setattr(self, key, factor.at_least(_widest(self.sites)).empty(device).zero_())

    def drawn(self, seed: int) -> dict[str, Tensor]:
        """The generated tensors that sites share."""
        found = generated(self.method.shared_frozen(self.sites))
        return {key: each.value(seed=seed, name=f"shared/{key}") for key, each in found.items()}

    def forward(self, inputs: Tensor) -> Tensor:
        """The inputs: an `nn.Sequential` that owns this runs it as its last layer."""
        return inputs


def _widest(sites: Sequence[Site]) -> torch.dtype:
    wide = any(site.dtype == torch.float64 for site in sites)
    return torch.float64 if wide else torch.float32
