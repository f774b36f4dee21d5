"""Buffers that are drawn from a seed: no state dict, file or checkpoint holds them, only the seed.

So frozen random matrices cost neither disk nor wire, and are the same to the bit wherever the state
is loaded, whatever seed and name the module had there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.torch_private import is_persistent


class DrawnBuffers(nn.Module):
    """A module that may have buffers which are a function of a seed, kept as a buffer `seed` [1].

    Subclasses give `drawn`. A state that is loaded brings its seed, and they are drawn anew. They
    are drawn on the CPU and take the dtype that the module has been given.

    Attributes:
        drawn_from: the seed of what stands in the buffers now; None: nothing was drawn yet.
        precise_names: buffers that keep their dtype when the module is cast to another.
    """

    drawn_from: int | None = None
    precise_names: tuple[str, ...] = ()

    def register_drawn(self, name: str, empty: Tensor) -> None:
        """Add a buffer that `drawn` fills."""
        self.register_buffer(name, empty, persistent=False)
        if "seed" not in self._buffers:
            seed = torch.zeros(1, dtype=torch.int64, device=empty.device)
            self.register_buffer("seed", seed)

    def drawn(self, seed: int) -> Mapping[str, Tensor]:
        """The values of those buffers, on the CPU."""
        raise TypeError(f"{type(self).__name__} has drawn buffers and defines no drawn()")

    @property
    def drawn_names(self) -> tuple[str, ...]:
        """The names of the buffers that are drawn."""
        return tuple(name for name in self._buffers if not is_persistent(self, name))

    @property
    def constant_names(self) -> tuple[str, ...]:
        """The names of buffers that no forward or backward pass writes to."""
        return self.drawn_names

    def kept_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers that a state dict holds, with their names."""
        return ((n, b) for n, b in self.named_buffers() if is_persistent(self, n))

    @torch.no_grad()
    def draw(self, seed: int, device: torch.device | str) -> None:
        """Fill the buffers that are drawn; without any, nothing happens.

        Raises:
            InputError: the seed has more than 64 bits.
        """
        if "seed" not in self._buffers:
            return
        if not -(2**63) <= seed < 2**63:
            problem = "a seed that is kept in a file must be a 64-bit integer"
            raise InputError(problem, field="seed", value=seed)
        kept = torch.tensor([seed], dtype=torch.int64, device=device)
        for name, value in self.drawn(seed).items():
            setattr(self, name, value.to(device=device, dtype=self.get_buffer(name).dtype))
        self.seed, self.drawn_from = kept, seed

    def redraw(self) -> None:
        """Draw again where the seed, as a state has written it, is another than was drawn from."""
        kept = self._buffers.get("seed")
        if kept is None or kept.is_meta:
            return
        if (seed := int(kept)) != self.drawn_from:
            self.draw(seed, kept.device)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        drawn = {name: self.get_buffer(name) for name in self.drawn_names}
        before = {name: self.get_buffer(name) for name in self.precise_names}
        super()._apply(fn, recurse)
        for name, value in before.items():
            if (now := self.get_buffer(name)).dtype != value.dtype:
                setattr(self, name, value.to(now.device))
        if any(self.get_buffer(name) is not value for name, value in drawn.items()):
            self.drawn_from = None  # rounded, or without values: the next state draws them anew
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.redraw()
