"""RandLoRA: full-rank changes from fixed random matrices and trained diagonal scalings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor, Generated
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.kronecker import folds
from modicum.adapters.sites import Site
from modicum.adapters.thin_products import (
    ThinRule,
    TrainedSide,
    backward_work,
    forward_work,
    plus_thin,
)
from modicum.adapters.widths import linear_only
from modicum.core.contracts.ledger import Entry, Ledger
from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.random import uniform_
from modicum.core.ranks.sharding import own_part, whole

LAMBDA, GAMMA = "rank_scales", "width_scales"


@dataclass(frozen=True)
class ScaledBases(ThinRule):
    """s lambda_i A gamma_i of all bases i, next to their B_i: on the layer's smaller width.

    The tensors are lambda [N, r], gamma [N, d], A [r, d] and, one basis after the other, the
    transposed B_i [N r, D].
    """

    side: TrainedSide
    scale: float
    by_rank: bool
    keeps_input: bool = True

    def matrices(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        scales, gains, a, b = tensors
        scaled = (self.scale * scales)[:, :, None] * a * gains[:, None, :]
        if self.by_rank:
            scaled = scaled.transpose(0, 1)
        scaled = scaled.reshape(b.shape[0], -1)
        return (scaled, b.T) if self.side == "down" else (b, scaled.T)

    def gradients(self, tensors: Sequence[Tensor], of_side: Tensor) -> tuple[Tensor | None, ...]:
        scales, gains, a, _ = tensors
        of_rows = of_side if self.side == "down" else of_side.T
        count, rank = scales.shape
        if self.by_rank:
            of_scaled = of_rows.reshape(rank, count, -1).transpose(0, 1)
        else:
            of_scaled = of_rows.reshape(count, rank, -1)
        of_scaled = of_scaled * (self.scale * a)
        of_scales = (of_scaled * gains[:, None, :]).sum(2)
        of_gains = (of_scaled * scales[:, :, None]).sum(1)
        return of_scales, of_gains, None, None


class RandLoRALayer(AdapterLayer):
    """y = W x + b + s sum_i B_i diag(lambda_i) A diag(gamma_i) dropout(x), or its transpose."""

    method: RandLoRA

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start lambda at zero and gamma at 1/D, or 1/d as PEFT does."""
        super().initialise(seed=seed, device=device)
        sizes = self.site.in_features, self.site.out_features
        width = max(sizes) if self.method.gamma_start == "long" else min(sizes)
        with torch.no_grad():
            own_part(self.get_parameter(GAMMA).detach())[0].fill_(1.0 / width)

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        dropout = self.dropout
        return plus_thin(
            inputs,
            base,
            self.method.rule(self.site),
            self.tensors(self.get_parameter(LAMBDA), self.get_parameter(GAMMA)),
            built=self.method.builds(self.site, self.positions(inputs), dropout=dropout),
            dropout=dropout,
        )

    def tensors(self, scales: Tensor, gains: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lambda and gamma, and what this layer uses of the model's A and B."""
        short, long = sorted((self.site.in_features, self.site.out_features))
        a, b = self.shared.get_buffer("A"), self.shared.get_buffer("B")
        return scales, gains, a[:, :short], b[: self.method.columns(self.site), :long]

    def delta(self) -> Tensor:
        scales, gains = (whole(self.get_parameter(name)) for name in (LAMBDA, GAMMA))
        tensors = [at_least_fp32(each) for each in self.tensors(scales, gains)]
        down, up = self.method.rule(self.site).matrices(tensors)
        return up @ down


class RandLoRA(Adapter):
    """Sums of fixed random matrices, of which diagonal scalings are trained: changes of full rank.

    With D and d the larger and the smaller width of a layer and N = ceil(d / r), the change is
    s sum_i B_i diag(lambda_i) A diag(gamma_i), [D, d], transposed where the output is the smaller.
    A [r, d] and B_1 ... B_N [D, r] are drawn from the adapter's seed with unit variance, once for
    the model; a layer takes the first rows and columns that it needs. Trained are lambda [N, r],
    which starts at zero, and gamma [N, d], which starts at 1/D.

    Prefer it where a change is far from any low rank, and LoRA where it is not: with as many
    trained numbers LoRA fits a low-rank change better by far. A step computes more than a frozen
    layer's own products.

    Args:
        rank: r, at most the smaller width of each layer. A smaller one trains more: N (r + d).
        alpha: the update is scaled by s = alpha / (r sqrt N); None means alpha = 2 r.
        scaling: `sqrt`: that s; `rank`: s = alpha / r, as PEFT has it, whose alpha is 20 r.
        gamma_start: `long`: 1/D; `short`: 1/d, as PEFT has it.
        pairing: `basis`: B_i meets lambda_i and gamma_i, as in the paper; `rank`: the columns of
            the B_i meet these in another order, which PEFT's code has.
        bases: `uniform` numbers, or `sparse` ones: -1, 0 and 1 in parts of 1, 4 and 1, scaled.
            `stored`: those of a file, which are then kept.
        product: whether the change is `built` once a pass, `factored` into two products, or
            whichever is less work for as many positions as there are.
        dropout, targets, exclude: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: a layer is narrower than `rank`, or is an embedding.

    Source: Albert et al., "RandLoRA: Full-rank parameter-efficient fine-tuning of large models",
    ICLR 2025, arXiv 2502.00987, section 4; PEFT's `RandLoraModel`.

    >>> import torch
    >>> from modicum.adapters import RandLoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
    >>> adapter = RandLoRA(rank=4).attach(model)
    >>> [tuple(factor.shape) for factor in adapter.parameters()]
    [(4, 4), (4, 16), (2, 4), (2, 8)]
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs[:, :8]).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> adapter.merge()  # into the weights
    >>> adapter.detach()  # the model is plain again
    """

    info = Info(
        name="randlora",
        title="RandLoRA: full-rank changes from random matrices and trained scalings",
        room="adapters",
        paper="RandLoRA: Full-rank parameter-efficient fine-tuning of large models, "
        "arXiv 2502.00987",
        claim="full-rank updates narrow or close the gap between LoRA and full fine-tuning, most "
        "on vision-language tasks, at as many trained parameters",
        traits=("adapts_base", "mergeable", "exact_resume", "compiles"),
        traits_if=(("pairing", "rank", "in_peft"),),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("better", "LoRA of as many trained parameters"),
        run_on_gpu=True,
        tiny={"rank": 2},
    )
    search = SearchTable({"rank": IntegerRange(4, 256, 32, log=True)}, size="rank")
    layer = RandLoRALayer
    drops_by_bits = True
    peft_type = "RANDLORA"

    rank: PositiveInt = 32
    alpha: PositiveFloat | None = None
    scaling: Literal["sqrt", "rank"] = "sqrt"
    gamma_start: Literal["long", "short"] = "long"
    pairing: Literal["basis", "rank"] = "basis"
    bases: Literal["uniform", "sparse", "stored"] = "uniform"
    product: Literal["auto", "built", "factored"] = "auto"

    @property
    def from_file(self) -> bool:
        return self.bases == "stored"

    def columns(self, site: Site) -> int:
        """N r: of all bases of a site together."""
        return -(-min(site.in_features, site.out_features) // self.rank) * self.rank

    def rule(self, site: Site) -> ScaledBases:
        """How a site's two matrices are made."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        root = math.sqrt(self.columns(site) // self.rank) if self.scaling == "sqrt" else 1.0
        side: TrainedSide = "down" if site.in_features <= site.out_features else "up"
        return ScaledBases(
            side, alpha / (self.rank * root), self.pairing == "rank", self.saves_input(site)
        )

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "RandLoRA adapts linear layers, and this is an embedding")
        width = min(site.in_features, site.out_features)
        if self.rank > width:
            raise InputError(
                f"above {width}, the smaller width of {site.name}; lower it, which trains more "
                "numbers, or exclude the layer",
                field="rank",
                value=self.rank,
            )
        count = self.columns(site) // self.rank
        return {LAMBDA: Factor((count, self.rank)), GAMMA: Factor((count, width))}

    def shared_frozen(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        short = max(min(site.in_features, site.out_features) for site in sites)
        long = max(max(site.in_features, site.out_features) for site in sites)
        shapes = {"A": (self.rank, short), "B": (max(map(self.columns, sites)), long)}
        if self.bases == "stored":
            return {name: Factor(shape) for name, shape in shapes.items()}
        bound = math.sqrt(3.0)  # of unit variance
        return {
            name: Generated(shape, bound=bound)
            if self.bases == "uniform"
            else Generated(shape, draw=Sparse(shape))
            for name, shape in shapes.items()
        }

    def builds(self, site: Site, positions: int, *, dropout: float) -> bool:
        """Whether the change of a layer is built for so many positions, by the work in fp32."""
        if self.product != "auto":
            return self.product == "built"
        works = [sum(self._work(site, positions, built, dropout)) for built in (True, False)]
        return works[0] < works[1]

    def built_at(self, site: Site, positions: int) -> tuple[bool, bool] | None:
        built = self.builds(site, positions, dropout=self.dropout)
        return (built, built) if self.product == "auto" else None

    def _work(
        self, site: Site, positions: int, built: bool, dropout: float, compute_bytes: int = 4
    ) -> tuple[int, int]:
        sizes = positions, self.columns(site), site.in_features, site.out_features
        rule, folded = self.rule(site), folds(dropout, compute_bytes)
        back = backward_work(
            *sizes, rule.side, built=built, folds=folded, keeps_input=rule.keeps_input
        )
        return forward_work(*sizes, built=built, folds=folded), back

    def saves_input(self, site: Site) -> bool:
        return self.product != "factored" or site.in_features <= site.out_features

    def saved_elements(self, site: Site) -> int:
        return 0 if self.saves_input(site) else self.columns(site)

    def matrices_kept(self, at: AdapterQuery) -> int:
        return 0  # all are made anew

    def shared_ledger(self, sites: Sequence[Site]) -> Ledger:
        made = max(self.columns(s) * min(s.in_features, s.out_features) + s.elements for s in sites)
        spent = Entry("workspace", 4 * made, ("forward", "backward"), "a layer's scaled bases")
        return super().shared_ledger(sites) + Ledger.of(spent)

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        built = self.builds(at.site, at.shape.positions, dropout=self.dropout)
        shape = at.shape
        return self._work(at.site, shape.positions, built, self.dropout, shape.compute_bytes)


@dataclass(frozen=True)
class Sparse:
    """-1, 0 and 1 with probabilities 1/6, 2/3 and 1/6, times sqrt 3: of unit variance."""

    shape: tuple[int, int]

    def __call__(self, seed: int, name: str) -> Tensor:
        made = torch.empty(self.shape)
        for row, values in enumerate(made):
            uniform_(values, -3.0, 3.0, seed=seed, name=f"{name}/{row}")
        return made.sign() * (made.abs() > 2) * math.sqrt(3.0)
