"""SoKA: sums of Kronecker products, begun as the best ones that the weight has."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from modicum.adapters.adapter_layer import RoundTrip
from modicum.adapters.base import AdapterLayer, AdapterQuery, Factor
from modicum.adapters.base_weights import at_least_fp32, check_finite
from modicum.adapters.input_alone import InputAlone
from modicum.adapters.kronecker import (
    WhichBuilt,
    backward_work,
    folds,
    forward_work,
    plus_kronecker,
    worth_building,
)
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.adapters.sites import Site
from modicum.adapters.widths import linear_only
from modicum.core.contracts.ledger import Entry, Ledger
from modicum.core.contracts.method import Against, Info, PositiveInt, PowerIterations
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.layers.allocate import GainCurve, allocate
from modicum.core.layers.kronecker import LARGE, KroneckerShape, kept_kronecker_svd
from modicum.core.layers.spectrum import elbow, enough
from modicum.core.layers.truncated_svd import numerical_rank
from modicum.core.ranks.sharding import whole
from modicum.core.ranks.turns import by_turns

_LOOKED_AT = 64  # terms of a large layer of which the spectrum is known, or `most` if that is more


class SoKALayer(AdapterLayer):
    """y = (W - sum_k A_k0 (x) B_k0) x + b + sum_k (A_k (x) B_k) dropout(x).

    A [r, m1, n1] is `outer`, B [r, m2, n2] is `inner`; A_0 and B_0 are where they began.
    """

    method: SoKA
    outer: Tensor
    inner: Tensor
    outer_0: Tensor
    inner_0: Tensor

    def __init__(self, method: SoKA, site: Site, *given: Any) -> None:
        super().__init__(method, site, *given)
        self.shape = method.shape(site)

    def split(
        self, weight: Tensor, round_trip: RoundTrip, *, seed: int, name: str
    ) -> dict[str, Tensor]:
        rank, niter = self.method.rank_at(self.site), self.method.niter
        a, values, b = kept_kronecker_svd(weight, self.shape, rank, niter, seed=seed, name=name)
        there = terms_in(values, self.shape, self.site.name)
        if there < rank:
            problem = f"above {there}, the Kronecker terms that the weight of {self.site.name} has"
            raise InputError(f"{problem}; lower it, or exclude the layer", field="rank", value=rank)
        root = values.sqrt()[:, None, None]
        return {"outer_0": root * a, "inner_0": root * b}

    def taken(self) -> Tensor:
        return self.shape.product(at_least_fp32(self.outer_0), at_least_fp32(self.inner_0))

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        dropout = self.dropout
        return self._plus(inputs, base, self.outer, self.inner, dropout)

    def original(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return self._plus(inputs, base, self.outer_0, self.inner_0, 0.0)

    def _plus(
        self,
        inputs: Tensor,
        base: Callable[[Tensor], Tensor],
        outer: Tensor,
        inner: Tensor,
        dropout: float,
    ) -> Tensor:
        built = self.method.builds(self.shape, len(outer), self.positions(inputs))
        return plus_kronecker(inputs, base, outer, inner, self.shape, built=built, dropout=dropout)

    def delta(self) -> Tensor:
        factors = (at_least_fp32(whole(factor)) for factor in (self.outer, self.inner))
        return self.shape.product(*factors) - self.taken()


class SoKA(InputAlone):
    """Trained Kronecker products that begin as the best ones of W; the residual stays frozen.

    W [out, in] is a sum of sigma_k A_k (x) B_k with A_k [m1, n1], B_k [m2, n2] and m1 n1 about
    m2 n2 about sqrt(out in): the singular value decomposition of W with its blocks as rows. The
    first r terms, sqrt(sigma_k) to each side, are trained, and W less these is frozen, so the model
    is the same at first. A term has about as many numbers as a LoRA of rank 1, and full rank. So
    prefer it to PiSSA and LoRA where the change that is to be learned has a high rank or blocks,
    and LoRA where its rank is low: there it wins by far. It merges.

    One term of a square layer of width 4,096 is 64 x 64 twice. Widths that are no product of two
    similar numbers are padded inside the products, which trains some more numbers. X A^T and B are
    small products; with many positions the sum is built and added to W, which is faster.

    With `rank=None` weights say how many terms a layer has, before the first update. With `total`,
    terms are handed out over all layers by what they hold, sigma_k^2 for their numbers. Without,
    each layer has the fewest terms that hold `energy` of its squares, or those before the elbow of
    its spectrum, the point furthest below the line from its first to its last value, where these
    are fewer. On trained weights spectra are flat, so `most` decides often.

    The paper does not say what is decomposed; that is the weight here, as in PiSSA. A start from
    gradients, and dropping terms in training, are not here.

    Args:
        rank: r, the terms of every layer; None: by the weights.
        total: trained numbers of all layers together, at most; for `rank=None`.
        energy: of a layer's squares; for `rank=None` without a total.
        most: the most terms of a layer; for `rank=None`.
        niter: power iterations of a randomized decomposition. None: an exact one, and 8 for layers
            of more than 1,024 terms, those of about 1,024 x 1,024 entries.
        product: whether the sum is `built` once a pass, `factored`, or by work and memory traffic
            for as many positions as there are. With dropout and below fp32 it is factored.
        dropout, targets, exclude: see `Adapter`; embeddings cannot be targets, and of dropout as
            little as of PiSSA's is best.

    Raises:
        InputError: `rank` is above the terms that a layer's weight has; a layer is so small that a
            term has as many numbers as it; or `total` is less than one term a layer.

    Source: "Singular Value Decomposition on Kronecker Adaptation for Large Language Model", arXiv
    2506.15251; Van Loan and Pitsianis, "Approximation with Kronecker Products", 1993.

    >>> import torch
    >>> from modicum.adapters import SoKA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    >>> adapter = SoKA(rank=2).attach(model)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    256
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="soka",
        title="SoKA: Kronecker products begun as the best ones of the weight",
        room="adapters",
        paper="Singular Value Decomposition on Kronecker Adaptation for Large Language Model, "
        "arXiv 2506.15251",
        claim="with 25 % fewer trained parameters equal to or better than LoRA and PiSSA on GSM8K, "
        "MATH and MBPP (LLaMA-2-7B), in fewer steps",
        traits=(
            "adapts_base",
            "rewrites_base",
            "starts_near",
            "mergeable",
            "exact_resume",
            "compiles",
        ),
        traits_if=(("rank", None, "prepares_from_data"),),
        evidence="reconstructed",
        claim_verdict="in part",
        against=Against("better", "LoRA of as many trained numbers"),
        reason="0.054 above LoRA's accuracy with 0.95 of its numbers, in a third of its steps; but "
        "handing out terms by the weights is better than equal shares at 2 terms a layer alone, "
        "not at 4, where as many at random are better too",
        run_on_gpu=True,
        tiny={"rank": 2},
    )
    search = SearchTable(
        {"learning_rate": LogRange(1e-5, 1e-1, 1e-3), "rank": IntegerRange(1, 16, 4, log=True)},
        size="rank",
    )
    layer = SoKALayer

    rank: PositiveInt | None = 4
    total: PositiveInt | None = None
    energy: Annotated[float, Field(gt=0, le=1)] = 0.9
    most: PositiveInt = 16
    niter: PowerIterations | None = None
    product: Literal["auto", "built", "factored"] = "auto"

    @property
    def looks_at(self) -> int:
        return 0  # weights say it all

    def shape(self, site: Site) -> KroneckerShape:
        """Of the factors at a site.

        Raises:
            InputError: a term has no fewer numbers than the layer.
        """
        shape = KroneckerShape.of(site.out_features, site.in_features)
        if shape.numbers < site.elements:
            return shape
        sizes = f"{site.out_features} x {site.in_features}"
        problem = f"a Kronecker term of a {sizes} layer has as many numbers as the layer"
        raise InputError(f"{problem}; leave it out", field="targets", value=site.name)

    def rank_at(self, site: Site) -> int:
        """r of a site; where the weights say it and have not been asked, the most that may be.

        Raises:
            InputError: it is above what the layer can have.
        """
        shape = self.shape(site)
        if self.rank is None:
            afforded = self.most if self.total is None else max(1, self.total // shape.numbers)
            return int(site.prepared.get("rank", min(self.most, shape.terms, afforded)))
        if self.total is not None:
            problem = "shares terms where the weights say how many; set rank to null, or leave it"
            raise InputError(f"{problem} out", field="total", value=self.total)
        if self.rank > shape.terms:
            problem = f"above {shape.terms}, the Kronecker terms of the layer {site.name}"
            raise InputError(
                f"{problem}; lower it, or exclude that layer", field="rank", value=self.rank
            )
        return self.rank

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "SoKA adapts linear layers, and this is an embedding")
        rank, shape = self.rank_at(site), self.shape(site)
        return {
            "outer": Factor((rank, *shape.outer)),
            "inner": Factor((rank, *shape.inner)),
        }

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {f"{name}_0": factor for name, factor in self.factors(site).items()}

    def prepare(self, context: PreparationContext) -> Preparation:
        sites = {site.name: site for site in context.sites}
        spectra: dict[str, Tensor] = {}
        turns = by_turns(
            list(sites),
            lambda name, weight: self._spectrum(sites[name], weight, context.seed),
            context.ranks,
            read=lambda name, mine: context.weight(sites[name]) if mine else None,
        )
        ranks: dict[str, int] = {}
        for name, made in turns:
            spectra[name] = made["values"].double().cpu()
            share = self.energy * float(made["squares"])
            ranks[name] = min(self.most, enough(spectra[name], share), elbow(spectra[name]))
            context.progress(len(spectra), len(sites))
        if self.total is not None:
            curves = {
                name: GainCurve.of_gains(
                    values[: self.most].square().tolist(),
                    cost=self.shape(sites[name]).numbers,
                    floor=1,
                )
                for name, values in spectra.items()
            }
            ranks = allocate(curves, self.total).amounts
        return Preparation({name: {"rank": rank} for name, rank in ranks.items()})

    def _spectrum(self, site: Site, weight: Tensor, seed: int) -> dict[str, Tensor]:
        """sigma_k of a layer's terms, those that are no rounding errors, and the sum of squares."""
        shape = self.shape(site)
        check_finite(weight, site.name)
        large = self.niter is not None or shape.terms > LARGE
        terms = min(max(_LOOKED_AT, self.most), shape.terms) if large else None
        found = kept_kronecker_svd(weight, shape, terms, self.niter, seed=seed, name=site.name)
        values = found[1][: terms_in(found[1], shape, site.name)]
        return {"values": values, "squares": weight.double().square().sum()[None]}

    def builds(self, shape: KroneckerShape, terms: int, positions: int) -> WhichBuilt:
        """Whether the sum is built for so many positions: for the outputs, for the gradients."""
        if self.product != "auto":
            return (self.product == "built",) * 2
        return worth_building(shape, terms, positions)

    def built_at(self, site: Site, positions: int) -> WhichBuilt | None:
        built = self.builds(self.shape(site), self.rank_at(site), positions)
        return built if self.product == "auto" else None

    def shared_ledger(self, sites: Sequence[Site]) -> Ledger:
        made = 0 if self.product == "factored" else max(site.elements for site in sites)
        spent = Entry("workspace", 8 * made, ("forward", "backward"), "a layer's sum and weight")
        return super().shared_ledger(sites) + Ledger.of(spent)

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        sizes = self.shape(at.site), self.rank_at(at.site), at.shape.positions
        built = self.builds(*sizes)
        if not folds(self.dropout, at.shape.compute_bytes):
            built = (False, False)
        forward = forward_work(*sizes, built=built[0])
        return forward, backward_work(*sizes, built=built[1])


def terms_in(values: Tensor, shape: KroneckerShape, name: str) -> int:
    """How many of the sigma_k, falling, of the layer `name` are no rounding errors.

    Raises:
        InputError: none.
    """
    there = numerical_rank(values, (math.prod(shape.outer), math.prod(shape.inner)))
    if not there:
        raise InputError("its weight is zero, so it has no terms; exclude it", value=name)
    return there
