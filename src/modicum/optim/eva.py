"""Eva: K-FAC's curvature from two vectors a layer, and its exact inverse without inverting."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from modicum.core.contracts.ledger import Ledger, Wire, Work
from modicum.core.contracts.method import (
    Against,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
)
from modicum.core.contracts.search import LogRange, SearchTable
from modicum.optim.layer_means import MeansRuntime, means_ledger
from modicum.optim.transform import (
    GradientRows,
    GradientTransform,
    TransformContext,
    TransformQuery,
)


class Eva(GradientTransform):
    """Precondition gradients with the damped rank-one curvature (g g^T) kron (a a^T) + gamma I.

    a is the mean over positions of a layer's inputs (with a constant 1 where it has a bias), g that
    of the gradients of its outputs, both as running averages. The gradient G [out, in] becomes

        P = (G - (g^T G a) / ((a^T a)(g^T g) + gamma) g a^T) / gamma,

    which is the exact inverse times G, and then all layers' P are scaled by one nu, so that the
    change of the model's output is bounded (the KL clip): nu = min(1, sqrt(kappa / s)) with
    s = sum <P, G> lr^2. Prefer it to plain momentum where K-FAC would help and is too expensive:
    deep nets without normalization. It does little where inputs are centred at zero, since a is
    then, and where gamma outweighs (a^T a)(g^T g): g, of the mean loss, falls with the batch. What
    is left then is the clip, which on small networks does most of the good by itself.

    Args:
        damping: gamma.
        decay: xi, the weight of the *new* value in the averages; the first is taken as it is.
        kl_clip: kappa; 0 gives P the norm that G had, over all layers; None leaves P as it is.
        variant: `eva`; `f` (for FOOF) has no g: P = (G - (G a) a^T / (a^T a + gamma)) / gamma; `s`
            (for Shampoo) has no hooks: g and a are the means of G over its columns and over its
            rows, and biases keep their gradient.
        every: statistics are taken in every n-th update.
        samples: of a batch, take so many samples, evenly spread; None for all. The authors take the
            first 16, which is biased where batches are sorted, and differs over ranks.
        exclude: see `GradientTransform`.

    The mean is one of the full update: sums over micro-batches and ranks, divided by the count of
    all their positions. With losses scaled by the global count (or `reduction="mean"` and equal
    shares), ranks with unequal batches have the a and g of one process with all of them.

    Source: Zhang, Shi and Li, "Eva: Practical Second-order Optimization with Kronecker-vectorized
    Approximation", ICLR 2023, section 3, and the authors' code, which the defaults are from. There
    a and g are all-reduced one by one from the hooks, here in one exchange. `f` and `s` are named
    in arXiv 2308.02123; they are as in the authors' code (`semi_eva.py`, `vshampoo.py`) up to the
    scale, for which the code tries several ways and this takes the KL clip. Their `s` is not the
    product of Shampoo's two roots, but this rank-one inverse.

    >>> from modicum.optim import SGD, Eva
    >>> from modicum.optim.transform import TransformContext
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> eva = Eva(damping=0.03).bind(TransformContext(model, optimizer=optimizer))
    >>> inputs = torch.rand(32, 8)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     eva.apply()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> eva.close()

    Under transformers: `Trainer(..., callbacks=[Eva().callback()])`.
    """

    info = Info(
        name="eva",
        title="Eva: second-order preconditioning from two vectors a layer",
        room="optim",
        paper="Eva: Practical Second-order Optimization with Kronecker-vectorized Approximation, "
        "ICLR 2023; arXiv 2308.02123",
        claim="up to 2.05x less training time than SGD and 2.42x less than K-FAC and Shampoo",
        traits=(
            "transforms_gradients",
            "works_on_base",
            "keeps_own_shapes",
            "needs_eager",
            "exact_resume",
        ),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("equal", "momentum with the clip alone"),
        reason="0.64 of momentum's steps and a pass 39 times shorter than K-FAC's; but a step of a "
        "small network takes 1.6 times as long, so the time is momentum's; the clip without "
        "curvature needs as many steps",
        run_on_gpu=True,
        slot="transform",
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-4, 1.0, 1e-2),
            "damping": LogRange(1e-3, 1.0, 0.03),
            "kl_clip": LogRange(1e-5, 1e-1, 1e-3),
        }
    )

    damping: PositiveFloat = 0.03
    decay: Annotated[float, Field(gt=0, le=1)] = 0.95
    kl_clip: NonNegativeFloat | None = 0.001
    variant: Literal["eva", "f", "s"] = "eva"
    every: PositiveInt = 1
    samples: PositiveInt | None = None

    def bind(self, context: TransformContext) -> EvaRuntime:
        """Put hooks on the context's model.

        Raises:
            InputError: there is a KL clip and no optimizer, or nothing to precondition.
        """
        return EvaRuntime(self, context)

    def ledger(self, at: TransformQuery) -> Ledger:
        """What the means take, and the operations on this rank's rows: no matrix product."""
        elements = sum(p.rows(0, at.shards) * math.prod(p.shape[1:]) for p in at.layers)
        each = 7 if self.variant == "eva" else 9
        work = Work(each * elements, phase="step")
        scalars = Wire("all_reduce", 16 * len(at.layers) * (at.shards - 1) // at.shards, "shard")
        means = means_ledger(at, gradients=self.variant != "f", hooked=self.variant != "s")
        return means + Ledger.of(work, *([scalars] if scalars.bytes else []))


class EvaRuntime(MeansRuntime):
    """Eva at work on a model."""

    def __init__(self, method: Eva, context: TransformContext) -> None:
        super().__init__(
            context,
            exclude=method.exclude,
            gradients=method.variant != "f",
            hooked=method.variant != "s",
            decay=method.decay,
            every=method.every,
            samples=method.samples,
        )
        self.method = method
        self.check_clip(method.kl_clip)

    def transform(self) -> None:
        """Replace every G by nu P."""
        damping, (aa, gg) = self.method.damping, self.means.squares()
        inner, squares = self._inner()
        # P = (G - share left a^T) / gamma, and left is g or, without a g, G a.
        if self.method.variant == "f":
            share, gg = 1 / (aa + damping), inner
        else:
            share = inner / (aa * gg + damping)
        seen = self.means.seen
        along = torch.where(seen, squares - share * inner, 0).sum()
        after = torch.where(seen, squares - 2 * share * inner + share**2 * gg * aa, 0).sum()
        before = torch.where(seen, squares, 0).sum()
        nu = self.clip(self.method.kl_clip, along / damping, before, after / damping**2)
        scales = torch.where(seen, nu / damping, 1).unbind()
        shares = torch.where(seen, nu / damping * share, 0).unbind()

        def precondition(index: int, rows: GradientRows) -> None:
            a, _ = self.means.vectors[index]
            rows.subtract(scales[index], shares[index] * self._left(index, rows), a)

        self.each(precondition)

    def _left(self, index: int, rows: GradientRows) -> Tensor:
        a, g = self.means.vectors[index]
        return rows.times(a) if self.method.variant == "f" else g[rows.own]

    def _inner(self) -> Tensor:
        """Per layer <left, G a> and <G, G>: [2, layers], summed over shards in one exchange."""
        nothing = self.means.averages.new_zeros(())
        found = [[nothing] * len(self.layers) for _ in range(2)]

        def measure(index: int, rows: GradientRows) -> None:
            product = rows.times(self.means.vectors[index][0])
            left = product if self.method.variant == "f" else self._left(index, rows)
            found[0][index], found[1][index] = left @ product, rows.square()

        self.each(measure)
        return self.sum_over_shards(torch.stack([torch.stack(numbers) for numbers in found]))
