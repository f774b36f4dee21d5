"""LoRA-SB: a small trained matrix between the directions in which full tuning would go first."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from modicum.adapters.base import Factor
from modicum.adapters.middle_factor import MiddleFactor, MiddleFactorLayer
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_directions
from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt, PowerIterations
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.layers.truncated_svd import numerical_rank, truncated_svd, with_fixed_signs


class LoRASBLayer(MiddleFactorLayer):
    """y = W x + b + s B (R (A dropout(x))); B^T B = A A^T = I, and s B R A begins as a step."""

    method: LoRASB


class LoRASB(MiddleFactor):
    """R [r, r] is trained between two orthonormal factors, taken from full tuning's first step.

    Adam's first step is about D = -eta sign(G), with the gradient G of a few examples. With
    D = U S V^T, B is U_r, A is V_r^T, and R begins as S_r / s: so the model begins at W and the
    best part of rank r of that step, not at W. As B and A are orthonormal, a step of SGD on R is
    full tuning's step projected onto B ... A, whatever the layer. Adam's is not, but near.

    Prefer it where trained numbers, their state or what travels are to be few at any width: r^2 a
    layer, and clients that share B and A average R exactly. Prefer LoRA-XS where no gradients of
    the base can be had. B and A cannot be computed from W, so they are kept in the file, as large
    as a LoRA: what is few is what is trained.

    Args:
        rank: r; a layer has r^2 trained numbers, so ranks are larger than LoRA's.
        alpha: s = alpha / rank. None means s = 1: another scale breaks the projection, for which
            the step of R would have to be divided by s^2.
        examples: how many to look at; the authors take a thousandth of the data.
        first_step: eta, the size of full tuning's first step: its learning rate, or in a warm-up
            this over the warm-up's steps.
        niter: power iterations of a randomized SVD; None: exact.
        dropout, targets, exclude: see `Adapter`; embeddings cannot be targets. Dropout changes the
            start, and is best left at 0.

    Raises:
        InputError: a layer is narrower than `rank`; the loss does not reach one; or a first step
            has fewer directions, as of too few examples.

    Source: Ponkshe et al., "Initialization using Update Approximation is a Silver Bullet for
    Extremely Efficient Low-Rank Fine-Tuning", arXiv 2411.19557, sections 3 and 4, algorithm 1.

    >>> import torch
    >>> from modicum.adapters import LoRASB
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    >>> batches = [torch.randn(64, 16)]
    >>> def loss(model, inputs):
    ...     return (model(inputs) - inputs).square().sum()
    >>> adapter = LoRASB(rank=4).attach(model, batches=batches, loss=loss)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    32
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> for _ in range(10):
    ...     loss(model, batches[0]).backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="lora_sb",
        title="LoRA-SB: a trained r x r matrix between the directions of the first full step",
        room="adapters",
        paper="Initialization using Update Approximation is a Silver Bullet for Extremely "
        "Efficient Low-Rank Fine-Tuning, arXiv 2411.19557",
        claim="better than LoRA with 27 to 90 times fewer trained parameters, and than LoRA-XS at "
        "equal rank, on arithmetic, commonsense and GLUE",
        traits=(
            "adapts_base",
            "starts_elsewhere",
            "prepares_from_data",
            "mergeable",
            "is_lora",
            "exact_resume",
            "compiles",
        ),
        evidence="against paper",
        claim_verdict="in part",
        against=Against("equal", "LoRA-XS of the same rank"),
        reason="LoRA's accuracy with 7 times fewer trained numbers; but LoRA-XS of as many, whose "
        "factors no data chose, has the same, and lets through more of a gradient",
        run_on_gpu=True,
        tiny={"rank": 5},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-4, 3.0, 2e-3),
            "rank": IntegerRange(2, 256, 32, log=True),
            "first_step": LogRange(1e-6, 1e-2, 1e-4),
        },
        size="rank",
    )
    layer = LoRASBLayer

    rank: PositiveInt = 32
    examples: PositiveInt = 64
    first_step: PositiveFloat = 1e-4
    niter: PowerIterations | None = None

    @property
    def looks_at(self) -> int:
        return self.examples

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return self.outer(site)

    def prepare(self, context: PreparationContext) -> Preparation:
        def use(name: str, gradient: Tensor) -> Mapping[str, Tensor]:
            return self.start(gradient, seed=context.seed, name=name)

        return Preparation(tensors=context.gradients(use, self.examples))

    def start(self, gradient: Tensor, *, seed: int, name: str) -> dict[str, Tensor]:
        """A, B and R at first, for a layer's gradient [out, in].

        Raises:
            InputError: -eta sign(G) has a lower rank than r.
        """
        step = gradient.sign().mul_(-self.first_step)
        left, singular, right = truncated_svd(step, self.rank, self.niter, seed=seed, name=name)
        there = numerical_rank(singular, step.shape)
        which, also = f"directions that the first step of {name} has", "look at more `examples`, "
        check_directions(self.rank, there, which, also)
        left, right = with_fixed_signs(left, right)
        return {"A": right, "B": left, "R": torch.diag(singular / self.scale)}
