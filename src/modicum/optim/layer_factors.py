"""The inverses of K-FAC's two factors of each layer, kept by owners and refreshed by one vector.

Of a layer y = W x with the gradient G [out, in] they are L^-1 [out, out] and R^-1 [in, in], and the
preconditioned gradient is L^-1 G R^-1. Where parameters are sharded by rows over ranks, each layer
has an owner among them: it alone keeps the factors, gathers G, and sends each rank its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.optim.capture import CapturedLayer
from modicum.optim.owners import Cut, assign

InverseForm = Literal["code", "average", "paper"]
"""How a vector v enters an inverse M; see `RankOneInverse`."""


@dataclass(frozen=True)
class RankOneInverse:
    """How an inverse factor M [d, d] takes up a vector v [d], in O(d^2).

    - `code`: Z = decay M + (1 - decay) I, M <- Z - Z v v^T Z / (1 + v^T Z v), which is the inverse
      of Z^-1 + v v^T;
    - `average`: M <- (M - (1 - decay) M v v^T M / (decay + (1 - decay) v^T M v)) / decay, which is
      the inverse of the running average decay A + (1 - decay) v v^T, where A is that of M;
    - `paper`: M <- decay M + (1 - decay) M v v^T M / (decay^2 (1 + decay (1 - decay) v^T M v)), the
      printed equation, which is the inverse of nothing: it amplifies what `code` damps, without
      end where vectors are large, and all else shrinks, in fp16 down to zero.

    Before it, where M's largest element is over `bound`, M <- keep M + (1 - keep) I. M is positive
    definite, so that its largest element is on the diagonal. What is added is symmetric to the bit,
    and so M stays.

    Args:
        decay: gamma.
        bound: epsilon; None: M is never brought near I.
        keep: zeta.

    >>> rule = RankOneInverse("code", 0.95, None, 0.9)
    >>> rule.refreshed(torch.eye(2), torch.tensor([1.0, 0.0]))
    tensor([[0.5000, 0.0000],
            [0.0000, 1.0000]])
    """

    form: InverseForm
    decay: float
    bound: float | None
    keep: float

    def over(self, inverse: Tensor) -> Tensor:
        """Whether the largest element is over the bound: one bool, on the device."""
        top = inverse.diagonal().abs().max()
        return top > (torch.inf if self.bound is None else self.bound)

    def stabilized(self, inverse: Tensor) -> Tensor:
        """The inverse nearer to I where it is over the bound, in place."""
        if self.bound is None:
            return inverse
        kept = torch.where(self.over(inverse), self.keep, 1.0).to(inverse)
        inverse.mul_(kept).diagonal().add_(1 - kept)
        return inverse

    def refreshed(self, inverse: Tensor, vector: Tensor) -> Tensor:
        """The inverse with a vector taken up, in place."""
        decay = self.decay
        if self.form == "code":
            inverse.mul_(decay).diagonal().add_(1 - decay)
        product = inverse @ vector
        # Of a matrix that was rounded to few bits it may come out below zero.
        along = (vector @ product).clamp(min=0)
        if self.form == "code":
            weight = 1 / (1 + along)
        elif self.form == "average":
            weight = (1 - decay) / (decay + (1 - decay) * along)
        else:
            weight = (1 - decay) / (decay**2 * (1 + decay * (1 - decay) * along))
        scaled = product * weight.sqrt()
        change = torch.outer(scaled, scaled)  # u_i u_j = u_j u_i: symmetric to the bit
        if self.form == "code":
            return inverse.sub_(change)
        if self.form == "average":
            return inverse.sub_(change).div_(decay)
        return inverse.mul_(decay).add_(change)

    def take_up(self, factor: Tensor, vector: Tensor) -> None:
        """Refresh a factor that is kept in its own precision, in that of the vector.

        Its scale does not matter, since the product gets the norm of G, so none leaves the range.
        In 16 bits rounding moves eigenvalues by about sqrt(d) roundings of the largest element,
        perhaps below zero, from where `average` would drive them on; so there they are lifted by
        as much before. `code` lifts them each time by itself, and `paper` only adds.
        """
        work = self.stabilized(factor.to(vector.dtype, copy=True))
        work = self.refreshed(work, vector)
        top, kept = work.diagonal().max(), torch.finfo(factor.dtype)
        if self.form == "average" and kept.bits == 16:
            work.diagonal().add_(top * (kept.eps / 2 * len(work) ** 0.5))
        factor.copy_(work.mul_((kept.max / 2 / top).clamp(max=1)))


class LayerFactors:
    """The inverse factors of all layers that this rank owns, from I on.

    Args:
        parameters: by name; sharded ones say who shares them.
        dtype: in which factors are kept; they are refreshed, and multiplied, in that of gradients.
    """

    def __init__(
        self,
        layers: Sequence[CapturedLayer],
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self._weights = layers, [parameters[layer.weight] for layer in layers]
        self.cut = Cut.of(self._weights[0])
        self.sides = [factor_sides(at.out_features, at.in_features, at.bias) for at in layers]
        costs = {index: o * o + i * i for index, (o, i) in enumerate(self.sides)}
        self.owners = assign(costs, self.cut.size)
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for index, (out, width) in enumerate(self.sides):
            if self.owners[index] == self.cut.rank:
                left, right = (torch.eye(d, dtype=dtype, device=device) for d in (out, width))
                self.pairs[index] = left, right

    def names(self, index: int) -> tuple[str, str]:
        """What a layer's factors are called in the state."""
        name = self.layers[index].weight
        return f"{name}.output_inverse", f"{name}.input_inverse"

    def product(self, index: int, gradient: Tensor) -> Tensor:
        """L^-1 G R^-1 of a layer that this rank owns, with the norm that G has.

        Where that norm or the product's is no number or zero, it is G.
        """
        left, right = (factor.to(gradient.dtype) for factor in self.pairs[index])
        product = left @ gradient @ right
        ratio = gradient.norm() / product.norm()
        good = ratio.isfinite() & (ratio > 0)
        return torch.where(good, product * ratio, gradient)

    def products(self, rows: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Of each layer this rank's rows of its owner's `product`.

        Args:
            rows: this rank's rows of each layer's G; of the same layers on all ranks, which call
                this together.
        """
        if not rows:
            return
        heights = {index: self.cut.rows(self._weights[index]) for index in rows}
        mine = [index for index in rows if index in self.pairs]
        like, size = next(iter(rows.values())), self.cut.size
        # To the owners: from each rank come its rows of all layers that are owned here.
        parts = {
            rank: joined
            for rank in range(size)
            if (joined := _flat([rows[i] for i in rows if self.owners[i] == rank])) is not None
        }
        shares = [[heights[i][rank] * self.sides[i][1] for i in mine] for rank in range(size)]
        received = self.cut.exchange(parts, [sum(each) for each in shares], like)
        pieces = received.split([one for each in shares for one in each])
        updates = {}
        for place, index in enumerate(mine):
            width = self.sides[index][1]
            found = [pieces[r * len(mine) + place].view(-1, width) for r in range(size)]
            updates[index] = self.product(index, torch.cat(found))
        del received, pieces
        # And back: each rank gets its rows of all that its senders own.
        cuts = {index: update.split(heights[index]) for index, update in updates.items()}
        parts = {
            rank: joined
            for rank in range(size)
            if (joined := _flat([cuts[index][rank] for index in mine])) is not None
        }
        owned = [[i for i in rows if self.owners[i] == rank] for rank in range(size)]
        counts = [sum(rows[i].numel() for i in each) for each in owned]
        back, first = self.cut.exchange(parts, counts, like), 0
        for index in (i for each in owned for i in each):
            yield index, back[first : first + rows[index].numel()].view_as(rows[index])
            first += rows[index].numel()

    def state_dict(self) -> dict[str, Tensor]:
        """The factors that this rank owns, by the weight's name: `.output_inverse`, `.input_..`."""
        return {
            name: factor
            for index, pair in self.pairs.items()
            for name, factor in zip(self.names(index), pair, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any], skip: Collection[str] = ()) -> None:
        """Take this rank's factors from a state that holds all ranks'.

        Args:
            skip: what else the state holds.

        Raises:
            InputError: names or shapes are others than those of these layers.
        """
        known = {name for index in range(len(self.layers)) for name in self.names(index)}
        if different := sorted(known ^ (set(state) - set(skip)))[:3]:
            raise InputError(f"the checkpoint has the factors of other layers: {different}")
        for name, factor in self.state_dict().items():
            if factor.shape != state[name].shape:
                raise InputError(
                    f"has shape {tuple(state[name].shape)}, this model's {tuple(factor.shape)}",
                    field=name,
                )
            factor.copy_(state[name])


def factor_sides(out_features: int, in_features: int, bias: object) -> tuple[int, int]:
    """The widths of a layer's two factors; a bias is a further input, which is 1."""
    return out_features, in_features + bool(bias)


def _flat(tensors: Sequence[Tensor]) -> Tensor | None:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else None
