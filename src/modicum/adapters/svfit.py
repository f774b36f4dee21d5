"""SVFit: singular vectors of each weight are fixed, and its largest singular values are trained."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from modicum.adapters.base import Factor
from modicum.adapters.base_weights import check_finite
from modicum.adapters.directions import Directions, DirectionsLayer
from modicum.adapters.preparation import Preparation, PreparationContext
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_directions, check_rank
from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.layers.basis_cache import kept_svd
from modicum.core.layers.truncated_svd import numerical_rank, with_fixed_signs
from modicum.core.ranks.turns import by_turns


class SVFitLayer(DirectionsLayer):
    """y = W x + b + U_k (shift * (V_k^T x)): shift = sigma - sigma_0, of the k largest."""

    method: SVFit

    def directions(self, weight: Tensor) -> dict[str, Tensor]:
        rank = self.method.rank_at(self.site)
        left, singular, right = kept_svd(weight, rank)
        check_directions(
            rank, numerical_rank(singular, weight.shape), f"rank of the weight of {self.site.name}"
        )
        left, right = with_fixed_signs(left, right)
        return {"up": left, "down": right}


class SVFit(Directions):
    """W's k largest singular values are trained, and its singular vectors stay as they are.

    W = U S V^T is untouched: trained is shift = sigma - sigma_0 [k], zero at first, and the layer
    computes W x + U_k (shift * (V_k^T x)). A value may become negative, which turns its direction
    around. It can weigh directions that W has, and give W no others: prefer it where the task is
    near the one that the model knows (a new head, a style, mild noise), where very many adapters
    are stored, or as a cheap first look at which layers matter; and LoRA where the domain is
    another. Values are of the size of singular values and few, so they need 10 to 50 times LoRA's
    learning rate: 1e-3 to 3e-2 with AdamW, and more the further the task is.

    U_k and V_k, k (in + out) numbers in fp32 a layer, are in memory and in no file: they are
    computed again from W where the adapter is loaded. `save(folder, form="modicum")` writes k
    numbers a layer; a PEFT file is the equal LoRA of rank k.

    Args:
        rank: k; None: each layer's smallest k whose squares sum to `energy` of all, which is found
            out from the weights before the first update.
        energy: of the squared singular values, for `rank=None`. On flat spectra 0.99 is nearly all.
        learning_rate: the multiplier of a recipe's learning rate, which is LoRA's as a rule; a
            loop of one's own has it by `modicum.core.contracts.parameters.optimizer_groups`.
        dropout, targets, exclude: see `Adapter`; `targets` must name convolutions, and cannot name
            embeddings.

    Raises:
        InputError: `rank` is above a layer's smaller width, or above the rank of its weight.

    Source: Sun et al., "SVFit: Parameter-Efficient Fine-Tuning of Large Pre-Trained Models Using
    Singular Values", arXiv 2409.05926, section 3; the residual is W itself here, which is the same
    function.

    >>> import torch
    >>> from modicum.adapters import SVFit
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    >>> adapter = SVFit(rank=8).attach(model)
    >>> sum(parameter.numel() for parameter in adapter.parameters())
    16
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="svfit",
        title="SVFit: only the largest singular values of each weight are trained",
        room="adapters",
        paper="SVFit: Parameter-Efficient Fine-Tuning of Large Pre-Trained Models Using Singular "
        "Values, arXiv 2409.05926",
        claim="outperforms LoRA on GLUE, image classification and subject-driven diffusion with 16 "
        "times fewer trained parameters",
        traits=(
            "adapts_base",
            "mergeable",
            "is_lora",
            "adapts_convolutions",
            "exact_resume",
            "compiles",
        ),
        traits_if=(("rank", None, "prepares_from_data"),),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("equal", "as many random orthonormal directions"),
        reason="near the known domain random orthonormal directions have as many test errors, and "
        "on images turned by a quarter a LoRA of rank 4 is better",
        run_on_gpu=True,
        tiny={"rank": 5},
    )
    search = SearchTable(
        {"learning_rate": LogRange(1e-4, 1.0, 1e-3), "rank": IntegerRange(1, 1024, 16, log=True)},
        size="rank",
    )
    layer = SVFitLayer

    rank: PositiveInt | None = 16
    energy: Annotated[float, Field(gt=0, le=1)] = 0.99
    learning_rate: PositiveFloat = 10.0

    @property
    def looks_at(self) -> int:
        return 0  # weights say it all

    def rank_at(self, site: Site) -> int:
        most = min(site.in_features, site.out_features)
        if self.rank is None:
            return int(site.prepared.get("rank", most))
        return check_rank(self.rank, site)

    def factor(self, site: Site) -> Factor:
        return Factor((self.rank_at(site),), learning_rate=self.learning_rate)

    def prepare(self, context: PreparationContext) -> Preparation:
        sites = {site.name: site for site in context.sites}
        values = by_turns(
            list(sites),
            _values,
            context.ranks,
            read=lambda name, mine: context.weight(sites[name]) if mine else None,
        )
        ranks = {
            name: {"rank": self._rank_of(made["values"], sites[name])} for name, made in values
        }
        return Preparation(ranks)

    def _rank_of(self, singular: Tensor, site: Site) -> int:
        """The fewest singular values [k] whose squares sum to `energy` of all."""
        most = numerical_rank(singular, (site.out_features, site.in_features))
        energy = singular.double().square().cumsum(0)
        enough = int((energy < self.energy * energy[-1]).sum()) + 1
        return max(1, min(enough, most))


def _values(name: str, weight: Tensor) -> dict[str, Tensor]:
    check_finite(weight, name)
    return {"values": torch.linalg.svdvals(weight)}
