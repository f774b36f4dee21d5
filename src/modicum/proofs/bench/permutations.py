"""A source of tokens whose entropy is known: permutations that are followed nine times of ten."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.core.random import derive_seed

MODES, FOLLOWED, HELD_OUT = 4, 0.9, 512


class PermutationSource:
    """Sequences [mode m, x0, x1, ...]: x0 is uniform over the symbols, and so is every tenth x.

    x_{t+1} is permutation_m(x_t) with probability 0.9, else uniform.

    Args:
        symbols: how many; modes are numbered after them.
        tokens: of a sequence, its mode among them.
    """

    def __init__(self, symbols: int, tokens: int) -> None:
        self.symbols, self.tokens = symbols, tokens

    @property
    def floor(self) -> float:
        """The entropy of a symbol given the ones before it, in nats.

        >>> round(PermutationSource(64, 40).floor, 4)
        0.7295
        """
        other = (1 - FOLLOWED) / self.symbols
        right = FOLLOWED + other
        return -right * math.log(right) - (self.symbols - 1) * other * math.log(other)

    def table(self, seed: int) -> Tensor:
        """One permutation a mode: int64 [modes, symbols]."""
        generator = _generator("permutations", seed)
        return torch.stack(
            [torch.randperm(self.symbols, generator=generator) for _ in range(MODES)]
        )

    def batch(self, table: Tensor, generator: torch.Generator, rows: int) -> Tensor:
        """Token ids [rows, tokens]."""
        mode = torch.randint(MODES, (rows,), generator=generator)
        columns = [torch.randint(self.symbols, (rows,), generator=generator)]
        for _ in range(self.tokens - 2):
            follows = torch.rand(rows, generator=generator) < FOLLOWED
            anything = torch.randint(self.symbols, (rows,), generator=generator)
            columns.append(torch.where(follows, table[mode, columns[-1]], anything))
        return torch.stack([self.symbols + mode, *columns], dim=1)

    def loss(self, model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """Cross-entropy from the third token on: the first two cannot be predicted."""
        logits = model(tokens[:, :-1])[:, 1:].float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())

    def loss_sum(self, model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
        """The same as a sum over sequences of their means."""
        return self.loss(model, tokens) * len(tokens)

    @torch.no_grad()
    def excess(
        self, model: torch.nn.Module, table: Tensor, modes: tuple[int, ...] | None = None
    ) -> float:
        """KL(source || model) a token on held-out prefixes: the loss's exact distance to its floor.

        The loss on sampled tokens has the samples' own noise, a hundredth of a nat here.

        Args:
            modes: of these sequences alone; None: of all.
        """
        model.eval()
        tokens = self.batch(table, _generator("held out", 0), HELD_OUT)
        if modes is not None:
            tokens = tokens[torch.isin(tokens[:, 0] - self.symbols, torch.tensor(modes))]
        log_model = F.log_softmax(model(tokens[:, :-1])[:, 1:].float(), dim=-1)
        follows = table[tokens[:, :1] - self.symbols, tokens[:, 1:-1]]
        source = torch.full_like(log_model, (1 - FOLLOWED) / self.symbols)
        source[..., self.symbols :] = 0.0
        source.scatter_add_(2, follows[..., None], torch.full_like(source[..., :1], FOLLOWED))
        return F.kl_div(log_model, source, reduction="sum").item() / follows.numel()


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(seed, name))
