"""monarch: a weight held as two block-diagonal matrices with a fixed permutation between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from modicum.core.contracts.method import Against, Info, PositiveInt
from modicum.core.contracts.search import IntegerRange, LinearRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.layers.form_layer import FormLayer, TensorShapes
from modicum.core.layers.form_plan import FormPlan
from modicum.core.ranks.sharding import is_sharded, laid_out_like, whole
from modicum.linears.base import FormContext, LinearMethod
from modicum.linears.dense_later import DenseLater


class MonarchLinear(FormLayer):
    """y = x W^T + b, with K runs of inputs as groups, and output o in the group o % J of J.

    The part of W between a group of inputs and one of outputs has rank r at most, and no two parts
    share a factor. Here K = J = `blocks`. Where that does not divide the inputs or the outputs,
    what the last of them lack is padding, which is left out of the product.

    Attributes:
        first: [K r J, ceil(in / K)], of each group of inputs the r J sums of it, in this order.
        second: [ceil(out / J) J, K r], a row for each output.
        bias: [out], or None.

    >>> layer = MonarchLinear(64, 64, bias=False, blocks=8, rank=1)
    >>> layer.to_dense().shape, sum(parameter.numel() for parameter in layer.parameters())
    (torch.Size([64, 64]), 1024)
    """

    first: nn.Parameter
    second: nn.Parameter

    def __init__(self, *sizes: Any, blocks: int = 4, rank: int | None = None, **where: Any) -> None:
        super().__init__(*sizes, blocks=blocks, rank=rank, **where)
        self.blocks, self.rank = blocks, self.second.shape[1] // blocks

    @classmethod
    def shapes(
        cls, in_features: int, out_features: int, blocks: int = 4, rank: int | None = None, **_: Any
    ) -> TensorShapes:
        """Of both factors; without a rank they have 2 / `blocks` of a square weight's elements."""
        ins, outs = -(-in_features // blocks), -(-out_features // blocks)
        inner = blocks * (rank or max(1, min(ins, outs) // blocks))
        return {"first": (blocks * inner, ins), "second": (outs * blocks, inner)}

    @classmethod
    def between(
        cls, in_features: int, out_features: int, blocks: int = 4, rank: int | None = None, **_: Any
    ) -> int:
        """The sums of all groups; and the inputs with their padding, where there is any."""
        sums, ins = cls.shapes(in_features, out_features, blocks, rank)["first"]
        return sums + (ins * blocks if in_features % blocks else 0)

    def arguments(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "rank": self.rank}

    def fitted(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The factors nearest to `weight` [out, in]: each part's truncated SVD, in float64.

        The squared error is the sum of the squared singular values that are dropped, over all
        parts (section 3 and appendix of the paper).

        Raises:
            InputError: the rank is larger than a part's smaller side.
        """
        groups, ins, outs = self.blocks, self.first.shape[1], len(self.second) // self.blocks
        if self.rank > min(ins, outs):
            raise InputError(
                "no weight of this shape needs it",
                field="rank",
                value=self.rank,
                allowed=f"at most {min(ins, outs)}",
            )
        short = groups * ins - self.in_features, groups * outs - self.out_features
        padded = F.pad(weight.detach().double(), (0, short[0], 0, short[1]))
        parts = padded.view(outs, groups, groups, ins).permute(2, 1, 0, 3)  # [K, J, outs, ins]
        left, values, right = torch.linalg.svd(parts, full_matrices=False)
        root = values[..., : self.rank].sqrt()
        second = left[..., : self.rank] * root[..., None, :]  # [K, J, outs, r]
        first = right[..., : self.rank, :] * root[..., None]  # [K, J, r, ins]
        return {
            "first": first.transpose(1, 2).reshape(self.first.shape),
            "second": second.permute(2, 1, 0, 3).reshape(self.second.shape),
        }

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out], by two batched products."""
        groups, (inner, ins) = self.blocks, (self.second.shape[1], self.first.shape[1])
        rows = math.prod(inputs.shape[:-1])
        x = inputs
        if padding := groups * ins - self.in_features:
            x = F.pad(x, (0, padding))
        x = x.reshape(rows, groups, ins).transpose(0, 1)  # [K, rows, ins]
        first = self.first.view(groups, inner, ins)
        sums = torch.bmm(x, first.mT).unflatten(2, (self.rank, groups))  # [K, rows, r, J]
        sums = sums.permute(3, 1, 0, 2).reshape(groups, rows, inner)  # [J, rows, K r]
        second = self.second.view(-1, groups, inner).permute(1, 2, 0)  # [J, K r, outs]
        out = torch.bmm(sums, second).permute(1, 2, 0).flatten(1)[:, : self.out_features]
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.reshape(*inputs.shape[:-1], self.out_features)

    def to_dense(self) -> Tensor:
        """The weight [out, in] that the factors represent, multiplied in fp32 or wider.

        Where they are sharded, every rank calls this, and it is sharded by rows.
        """
        wide = torch.promote_types(self.second.dtype, torch.float32)
        groups, second = self.blocks, whole(self.second)
        left = second.to(wide).view(-1, groups, groups, self.rank)
        right = whole(self.first).to(wide).view(groups, self.rank, groups, -1)
        weight = torch.einsum("ojkr,krji->ojki", left, right).flatten(2).flatten(0, 1)
        weight = weight[: self.out_features, : self.in_features].to(second.dtype)
        return laid_out_like(weight, self.second) if is_sharded(self.second) else weight

    def initialise(self, *, std: float, seed: int, name: str) -> None:
        """Draw both factors so that entries of the weight, sums of r products, have `std`."""
        each = math.sqrt(std / math.sqrt(self.rank))
        self.draw({"first": self.first, "second": self.second}, std=each, seed=seed, name=name)


def part_rank(in_features: int, out_features: int, blocks: int, share: float) -> int:
    """The largest rank of parts at which factors have at most `share` of the weight's elements.

    It is 1 at least, and no larger than a part's smaller side.

    >>> part_rank(192, 192, 4, 0.5), part_rank(192, 64, 4, 0.5)
    (12, 6)
    """
    ins, outs = -(-in_features // blocks), -(-out_features // blocks)
    rank = int(share * in_features * out_features / (blocks**2 * (ins + outs)))
    return max(1, min(rank, ins, outs))


class Monarch(LinearMethod):
    """Each weight as two block-diagonal factors: r b (in + out) elements, as two batched products.

    A part of the weight, between one of b groups of inputs and one of b groups of outputs, is of
    rank r; the weight's own rank is up to r b^2, b times that of low-rank factors of as many
    elements. Sine and cosine transforms in the right order of inputs are that exactly, with r = 2.
    Prefer it for new models as wide as those at which its products are faster than dense ones (the
    proof prints these widths), or to begin with before `dense_after`, or `FormedModel.merge` in a
    loop of one's own, makes layers dense. Converting a trained model loses much unless it is
    trained further: of a random weight it keeps no more energy than a truncated SVD of as many
    elements does.

    Under weight decay, or optimizers that see matrices, it is the factors that they see. A layer's
    outputs are grouped by o % b, its inputs in runs.

    Args:
        blocks: b, groups of inputs and of outputs.
        share: of each layer's weight elements, the part that its factors have at most, of rank 1
            more; None: r is the smaller side of a part, over b, which makes a square weight's
            factors 2 / b of it.
        rank: r, in place of what `share` gives. A layer that would not become smaller stays dense.
        dense_after: the number of the update after which all layers are dense, with moments of
            zero; None: they stay. A plan counts what is there then. Modicum's trainer does this.
        targets, exclude: see `LinearMethod`.

    Source: Dao et al., "Monarch: Expressive Structured Matrices for Efficient and Accurate
    Training", ICML 2022, arXiv 2204.00595, sections 3 and 4.

    >>> import torch
    >>> from modicum.linears import Monarch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> formed = Monarch(blocks=4, targets=("0",)).convert(model)
    >>> [sum(parameter.numel() for parameter in model[n].parameters()) for n in (0, 2)]
    [2112, 65]
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> for _ in range(10):
    ...     model(torch.randn(8, 64)).square().mean().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> formed.merge()
    >>> type(model[0]).__name__
    'Linear'
    """

    info = Info(
        name="monarch",
        title="Monarch: two block-diagonal factors in place of a weight",
        room="linears",
        paper="Monarch: Expressive Structured Matrices for Efficient and Accurate Training, "
        "arXiv 2204.00595",
        claim="twice as fast training of transformers at equal quality",
        traits=("holds_trained_forms", "mergeable", "exact_resume", "compiles"),
        traits_unless=(("dense_after", None, 2, "changes_shapes"),),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("better", "low-rank factors of as many parameters"),
        run_on_gpu=True,
        tiny={"blocks": 2},
    )
    search = SearchTable(
        {"share": LinearRange(0.1, 0.9, 0.5), "blocks": IntegerRange(2, 16, 4, log=True)},
        size="share",
    )
    layer = MonarchLinear

    blocks: PositiveInt = 4
    share: Annotated[float | None, Field(gt=0, lt=1, allow_inf_nan=False)] = None
    rank: PositiveInt | None = None
    dense_after: PositiveInt | None = None

    def arguments(self, in_features: int, out_features: int) -> Mapping[str, Any] | None:
        sides, rank = (in_features, out_features), self.rank
        if rank is None and self.share is not None:
            rank = part_rank(*sides, self.blocks, self.share)
        shapes = MonarchLinear.shapes(*sides, self.blocks, rank)
        if sum(map(math.prod, shapes.values())) >= in_features * out_features:
            return None
        return {"blocks": self.blocks, "rank": shapes["second"][1] // self.blocks}

    def later(self, forms: FormPlan) -> FormPlan:
        if self.dense_after is None:
            return forms
        kept = {name: form for name, form in forms.layers.items() if form.name != self.info.name}
        return replace(forms, layers=kept)

    def run_hook(self, bound: FormContext) -> DenseLater | None:
        """What makes layers dense in a run that is to."""
        if self.dense_after is None:
            return None
        return DenseLater(bound.model, MonarchLinear, self.dense_after)
