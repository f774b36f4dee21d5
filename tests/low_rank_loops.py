"""Loops that tests of low-rank exchanges share: fixed gradients, and a small model that trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from modicum.comm.base import MatrixMethod
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.exchange import ExchangeContext
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.ranks import Ranks

Gradients = dict[str, Tensor]
# Two matrices of one shape, a convolution, a vector, and one that would not shrink.
SHAPES: dict[str, tuple[int, ...]] = {
    "first": (24, 40),
    "bias": (24,),
    "second": (24, 40),
    "convolution": (16, 3, 3, 5),
    "small": (6, 7),
}


def gradient(name: str, update: int, rank: int) -> Tensor:
    """A gradient that changes slowly, another on each rank; its singular values fall, as they do.

    Where they were alike, which of them are the largest would hang on rounding.
    """
    shape, number = SHAPES[name], list(SHAPES).index(name)
    fixed = torch.Generator().manual_seed(100 * number)
    own = torch.Generator().manual_seed(1 + 100 * number + 10_000 * update + rank)
    drawn = torch.randn(shape, generator=fixed).view(shape[0], -1)
    left, values, right = torch.linalg.svd(drawn, full_matrices=False)
    falling = values * 0.7 ** torch.arange(len(values))
    return ((left * falling) @ right).view(shape) + 0.1 * torch.randn(shape, generator=own)


class Fixed(nn.Module):
    """Its gradients are those that it is given, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        named = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.named = nn.ParameterDict(named)

    def forward(self, gradients: Gradients) -> Tensor:
        return torch.stack([(self.named[n] * g).sum() for n, g in gradients.items()]).sum()


def among_idle(exchange: MatrixExchange) -> None:
    """Have an exchange of several ranks make its sums alone: gradients of the others are zero."""
    exchange._wire = Collectives(Ranks())


def exchanged(exchange: MatrixExchange, gradients: Gradients, buckets: int = 1) -> Gradients:
    """The sums of some gradients, sent in so many buckets."""
    names = list(gradients)
    groups = [names[start::buckets] for start in range(buckets)]
    pending = [exchange.begin({n: gradients[n] for n in each}, each) for each in groups]
    exchange.turn()
    sums: Gradients = {}
    for each in pending:
        for name, total in each.land().items():
            assert total is not None
            sums[name] = total.full().clone()
    return {name: sums[name] for name in names}


def converged(
    method: MatrixMethod, ranks: Ranks, updates: int, *, buckets: int = 1, prefix: str = ""
) -> list[Gradients]:
    """The sums of so many updates of mean gradients, in fp64; names begin with `prefix`."""
    exchange = method.bind(ExchangeContext(ranks, seed=3))
    found = []
    for update in range(updates):
        own = {n: gradient(n, update, ranks.rank).double() / ranks.size for n in SHAPES}
        sums = exchanged(exchange, {f"{prefix}{n}": own[n] for n in own}, buckets)
        found.append({n.removeprefix(prefix): total for n, total in sums.items()})
        exchange.commit()
    return found


def furthest(one: Gradients, other: Gradients) -> float:
    """The largest distance of a tensor from the other's, in parts of that one's norm."""
    return max(float((one[n] - other[n]).norm() / other[n].norm()) for n in other)


def debt_off(
    ranks: Ranks, own: Gradients, before: Gradients, sums: Gradients, after: Gradients
) -> float:
    """How far gradients and debts are from sums and new debts, all over the ranks."""
    worst = 0.0
    for name in after:
        matrix = own[name].view(after[name].shape)
        mine = matrix + before.get(name, torch.zeros_like(matrix)) - after[name]
        total = mine.double()
        torch.distributed.all_reduce(total)
        wanted = sums[name].view(matrix.shape).double()
        worst = max(worst, float((total - wanted).norm() / wanted.norm()))
    return worst
