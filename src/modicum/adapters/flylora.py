"""FlyLoRA: a frozen sparse projection says which few of B's columns a token uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.attachment import Attachment
from modicum.adapters.base import SAVED, Adapter, AdapterQuery, Factor, Generated
from modicum.adapters.dropping import dropped
from modicum.adapters.fused import compute_dtype
from modicum.adapters.routed import place_dtype, routed, spread
from modicum.adapters.sites import Site
from modicum.adapters.steps import AdapterSteps, FollowingLayer
from modicum.adapters.widths import linear_only
from modicum.core.contracts.ledger import Entry, Ledger
from modicum.core.contracts.method import (
    Against,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.random import normal_, sample
from modicum.core.torch_private import transforms_run


class FlyLoRALayer(FollowingLayer):
    """y = W x + b + s B (mask A dropout(x)), where the mask has 1 at the k largest of A x + d."""

    method: FlyLoRA
    A: Tensor
    B: Tensor
    d: Tensor

    @property
    def counted(self) -> int:
        return self.method.rank

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        rows = inputs.reshape(-1, inputs.shape[-1])
        dropout = self.dropout
        u = self.projected(dropped(rows, dropout) if dropout else rows)
        chosen, dtype = self.chosen(u), compute_dtype(inputs, self.B)
        if not torch.compiler.is_compiling() and transforms_run():
            thin = spread(u.gather(1, chosen), chosen, self.method.rank)
            update = self.method.scale * F.linear(thin.to(dtype), self.B.to(dtype))
        else:
            update = routed(u, self.B, chosen, self.method.scale, dtype)
        changed = (outputs + update.view(outputs.shape)).to(outputs.dtype)
        if not self.followed:
            return changed
        places = chosen.flatten()
        ones = torch.ones_like(places, dtype=torch.float32)
        return self.noted(changed, ones.new_zeros(len(self.d)).scatter_add(0, places, ones))

    def projected(self, rows: Tensor) -> Tensor:
        """u = A x, [n, r]: in fp32, or fp64, under autocast too."""
        rows = rows if self.method.input_gradient else rows.detach()
        with torch.autocast(rows.device.type, enabled=False):
            return F.linear(rows.to(torch.promote_types(rows.dtype, self.A.dtype)), self.A)

    @torch.no_grad()
    def chosen(self, u: Tensor) -> Tensor:
        """The places of the k ranks that each token uses, int64 [n, k]."""
        wanted = u + self.d
        wanted = wanted if self.method.choice == "signed" else wanted.abs()
        return wanted.topk(self.method.active, dim=1).indices

    def follow(self, counts: Tensor) -> None:
        moves = self.method.bias_rate * (counts.mean() - counts).sign()
        self.d += moves.to(self.d)

    def change(self, weight: Tensor, bias: Tensor | None) -> None:
        return None


class FlyLoRA(Adapter):
    """Each token uses k of B's r columns: where a frozen sparse projection of it is largest.

    A is drawn once and stays: each of its r rows has as many entries that are not zero. B is
    trained. A x is both what chooses and what B's chosen columns are multiplied with, so there is
    no router to train, and of a token k numbers and k places are kept for the backward pass. A bias
    d, which counts of chosen ranks move once an update, evens out how often each is used; it enters
    the choice alone. Adapters of other seeds read inputs in directions that are nearly orthogonal.

    The change depends on the token, so nothing of it can be merged: keep LoRA where a merged model
    is needed, and LoRA-FA where it is not and one task is all there is. To use several at once,
    attach each with a seed of its own, and `activate(alone=False)`; do not average their tensors.

    d moves in modicum's trainer by itself. In another loop, `adapter.steps()` has it move: see
    `modicum.adapters.steps`. Without that d stays where it is.

    Args:
        rank: r.
        active: k, how many ranks a token uses; at most `rank`. Rows of A have max(1, in k / r)
            entries, drawn from N(0, 1/r^2).
        alpha: the update is scaled by s = alpha / r; None means s = 2.
        choice: `signed`, the largest of A x + d, as in the authors' runs; or `absolute`, those of
            its absolute value, as in their layer that stands alone. They are different models.
        bias_rate: how far each entry of d moves in an update; 0: it stays zero. The authors' runs
            have 1e-2, moved with each micro-batch and in evaluation too, which is not done here.
        input_gradient: whether inputs get the adapter's gradient. The authors' runs leave it out,
            which is cheaper, and biased for the layers below.
        dropout: as LoRA's, of the inputs of A.
        targets, exclude: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: `active` is above `rank`; or a layer is an embedding.

    Source: "FlyLoRA: Boosting Task Decoupling and Parameter Efficiency via Implicit Rank-Wise
    Mixture-of-Experts", arXiv 2510.08396, section 3, and the authors' code.

    >>> import torch
    >>> from modicum.adapters import FlyLoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
    >>> adapter = FlyLoRA(rank=8, active=2).attach(model)
    >>> optimizer, steps = torch.optim.AdamW(adapter.parameters(), lr=1e-2), adapter.steps()
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs[:, :8]).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     steps.update()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="flylora",
        title="FlyLoRA: a frozen sparse projection chooses the ranks of each token",
        room="adapters",
        paper="FlyLoRA: Boosting Task Decoupling and Parameter Efficiency via Implicit Rank-Wise "
        "Mixture-of-Experts, arXiv 2510.08396",
        claim="better than LoRA and mixtures of LoRAs in four domains with fewer activated "
        "parameters, and when adapters of several tasks are combined",
        traits=("adapts_base", "follows_steps", "exact_resume", "compiles"),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("equal", "LoRA of as many active ranks"),
        reason="as good with a quarter of its ranks active as with all, and as LoRA of that rank; "
        "two summed adapters lose 0.34 nats less than those of one seed, and less than "
        "LoRA's",
        run_on_gpu=True,
        tiny={"rank": 5, "active": 3},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-4, 0.5, 1e-3),
            "rank": IntegerRange(8, 128, 32, log=True),
            "active": IntegerRange(1, 32, 8, log=True),
        },
        size="rank",
    )
    layer = FlyLoRALayer
    needs_input = False
    drops_by_bits = True

    rank: PositiveInt = 32
    active: PositiveInt = 8
    alpha: PositiveFloat | None = None
    choice: Literal["signed", "absolute"] = "signed"
    bias_rate: NonNegativeFloat = 1e-2
    input_gradient: bool = True

    @property
    def scale(self) -> float:
        """s."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "tokens are symbols, of which a projection chooses nothing")
        if self.active > self.rank:
            problem = f"above the rank {self.rank}: a token uses so many of its ranks at most"
            raise InputError(problem, field="active", value=self.active)
        return {"B": Factor((site.out_features, self.rank))}

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        draw = partial(self._drawn, site.in_features)
        a = Generated((self.rank, site.in_features), precise=True, draw=draw)
        return {"A": a, "d": Factor((self.rank,), precise=True)}

    def _drawn(self, columns: int, seed: int, name: str) -> Tensor:
        """A: each row a stream of its own."""
        entries = max(1, columns * self.active // self.rank)
        made = torch.zeros(self.rank, columns)
        for index, row in enumerate(made):
            own = f"{name}/{index}"
            values = normal_(torch.empty(entries), std=1 / self.rank, seed=seed, name=own)
            row[sample(columns, entries, seed=seed, name=f"{own}/places")] = values
        return made

    def run_hook(self, bound: Attachment) -> AdapterSteps:
        return AdapterSteps(bound)

    def saved_elements(self, site: Site) -> int:
        return self.active

    def ledger(self, at: AdapterQuery) -> Ledger:
        places = self.active * at.shape.positions * place_dtype(self.rank).itemsize
        return super().ledger(at) + Ledger.of(Entry("activation", places, SAVED, "chosen ranks"))

    def matrices_kept(self, at: AdapterQuery) -> int:
        return 0  # B is cast anew

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        positions, (m, n) = at.shape.positions, (at.site.out_features, at.site.in_features)
        back = 2 * m + (n if self.input_gradient else 0)
        product = 2 * positions * self.rank
        return product * (m + n), product * back
