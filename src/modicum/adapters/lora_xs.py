"""LoRA-XS: a small trained matrix between the leading singular vectors of the weight."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from modicum.adapters.base import Factor
from modicum.adapters.deriving_layer import DerivingLayer, mixed_fingerprint
from modicum.adapters.middle_factor import MiddleFactor, MiddleFactorLayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_directions
from modicum.core.contracts.method import (
    Against,
    Info,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    PowerIterations,
)
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.layers.basis_cache import kept_svd
from modicum.core.layers.truncated_svd import numerical_rank, with_fixed_signs

_SEED = 42  # of the randomized SVD, as the authors have it


class LoRAXSLayer(DerivingLayer, MiddleFactorLayer):
    """y = W x + b + s B (R (A dropout(x))), with B = U_r and A = S_r V_r^T of W = U S V^T."""

    method: LoRAXS

    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        rank, niter = self.method.rank, self.method.niter
        left, singular, right = kept_svd(weight, rank, niter, seed=_SEED)
        there = numerical_rank(singular, weight.shape)
        check_directions(rank, there, f"rank of the weight of {self.site.name}")
        left, right = with_fixed_signs(left, right)
        down = singular[:, None] * right
        said = mixed_fingerprint(left, down) + down.norm().log()  # A has the weight's scale
        return {"A": down, "B": left, "fingerprint": said}


class LoRAXS(MiddleFactor):
    """R [r, r] is trained between the leading singular vectors of W, which is untouched.

    With W = U S V^T, B is U_r, A is S_r V_r^T, and R begins as N(0, std^2), nearly zero. A layer
    has r^2 trained numbers, whatever its width, and B and A are computed again from W where the
    adapter is loaded. So `save(folder, form="modicum")` writes r^2 numbers a layer: prefer it where
    very many adapters are stored, or where what travels is to be small. Prefer LoRA where neither
    is scarce. R needs a larger learning rate than LoRA's factors: 5e-4 to 4e-3 with AdamW.

    Args:
        rank: r, above LoRA's: 4 to 25 for RoBERTa, 64 for Mistral-7B.
        alpha: s = alpha / rank; None means s = 1 (the authors' for language models; 16 on GLUE).
        std: of R at first.
        niter: power iterations of a randomized SVD; None: exact.
        learning_rate: the multiplier of a recipe's learning rate, which is LoRA's as a rule; a
            loop of one's own has it by `modicum.core.contracts.parameters.optimizer_groups`.
        dropout, targets, exclude: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: `rank` is above a layer's smaller width, or above the rank of its weight.

    Source: Bałazy et al., "LoRA-XS: Low-Rank Adaptation with Extremely Small Number of Parameters",
    arXiv 2405.17604, section 3; the authors' code.

    >>> import torch
    >>> from modicum.adapters import LoRAXS
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    >>> adapter = LoRAXS(rank=4).attach(model)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    32
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="lora_xs",
        title="LoRA-XS: a trained r x r matrix between the weight's leading singular vectors",
        room="adapters",
        paper="LoRA-XS: Low-Rank Adaptation with Extremely Small Number of Parameters, "
        "arXiv 2405.17604",
        claim="100 times fewer trained parameters than LoRA on 7B models, at its quality or above",
        traits=("adapts_base", "starts_near", "mergeable", "is_lora", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("better", "random orthonormal factors"),
        run_on_gpu=True,
        tiny={"rank": 5, "std": 1e-6},
    )
    search = SearchTable({"rank": IntegerRange(2, 256, 32, log=True)}, size="rank")
    layer = LoRAXSLayer

    rank: PositiveInt = 32
    std: NonNegativeFloat = 1e-5
    niter: PowerIterations | None = 10
    learning_rate: PositiveFloat = 10.0

    def factors(self, site: Site) -> Mapping[str, Factor]:
        return {
            name: Factor(each.shape, std=self.std, learning_rate=self.learning_rate)
            for name, each in super().factors(site).items()
        }

    def derived(self, site: Site) -> Mapping[str, Factor]:
        return self.outer(site)
