"""PiSSA: LoRA that starts from the principal part of the weight, with the residual frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from modicum.adapters.adapter_layer import RoundTrip
from modicum.adapters.base import Factor
from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_directions, check_rank
from modicum.core.contracts.method import Against, Info, PositiveInt, PowerIterations
from modicum.core.contracts.search import IntegerRange, LogRange, SearchTable
from modicum.core.layers.basis_cache import kept_svd
from modicum.core.layers.truncated_svd import numerical_rank, with_fixed_signs
from modicum.core.ranks.sharding import whole


class PiSSALayer(LoRALayer):
    """y = (W - s B_0 A_0) x + b + s B (A dropout(x)); B_0 and A_0 are where B and A began."""

    method: PiSSA
    A_0: Tensor
    B_0: Tensor

    def split(
        self, weight: Tensor, round_trip: RoundTrip, *, seed: int, name: str
    ) -> dict[str, Tensor]:
        method, lost = self.method, weight
        for last in (*(False,) * (method.rounds - 1), True):
            left, singular, right = kept_svd(lost, method.rank, method.niter, seed=seed, name=name)
            there = numerical_rank(singular, weight.shape)
            check_directions(method.rank, there, f"rank of the weight of {self.site.name}")
            left, right = with_fixed_signs(left, right)
            root = (singular / method.scale).sqrt()
            a, b = root[:, None] * right, left * root
            if not last:
                lost = weight - round_trip(weight - method.scale * (b @ a))
        return {"A_0": a, "B_0": b}

    def taken(self) -> Tensor:
        return self.method.scale * (at_least_fp32(self.B_0) @ at_least_fp32(self.A_0))

    def original(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        return self.plus_low_rank(base, inputs, self.A_0, self.B_0, 0.0)

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        a, b, scale = self.lora_on_residual()
        return torch.cat([a, self.A_0]), torch.cat([b, -self.B_0], dim=1), scale

    def lora_on_residual(self) -> tuple[Tensor, Tensor, float]:
        return whole(self.A), whole(self.B), self.method.scale


class PiSSA(LoRA):
    """LoRA whose factors begin as the best rank-r part of W; the frozen weight is the residual.

    With W = U S V^T, B begins as U_r sqrt(S_r / s), A as sqrt(S_r / s) V_r^T, and W - s B A
    replaces the base weight, so the model is the same at first. Gradients are larger and better
    directed than LoRA's: prefer it where steps are few, and on a 4-bit base, where quantizing the
    residual loses less than quantizing W. Prefer LoRA where many adapters share one base in memory.

    A_0 and B_0 are kept, so the result can be written as a LoRA of rank 2r for the original W,
    exactly: s (B A - B_0 A_0). On a quantized base W is lost; there `save(form="modicum")` keeps
    the quantized residual, `save(form="peft-rest")` writes the LoRA of rank r next to it, and
    `merge(dense=torch.bfloat16)` makes dense layers. The SVD needs the full-precision W, so there
    `attach(model, weights=...)` reads it from the model's file.

    Signs are fixed (the largest entry of each column of U_r is positive), so that machines agree.
    Dropout drops principal directions and is best left at 0.

    Args:
        rank: r.
        alpha: s = alpha / rank; None means s = 1, as the authors have it.
        niter: power iterations of a randomized SVD, some seconds where the exact one takes minutes
            (the authors take 4 to 16); None: exact.
        rounds: on a quantized base, how often the part that quantization loses is split anew (the
            paper's T, up to 5); on others nothing is lost, and one is as good as many.
        dropout, targets, exclude: see `Adapter`.

    Raises:
        InputError: a layer is narrower than `rank`, or its weight has a lower rank.

    Source: Meng, Wang and Zhang, "PiSSA: Principal Singular Values and Singular Vectors Adaptation
    of Large Language Models", arXiv 2404.02948, sections 3 and 4, algorithm 1; Halko, Martinsson
    and Tropp, arXiv 0909.4061, algorithms 4.4 and 5.1.

    >>> import torch
    >>> from modicum.adapters import PiSSA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))
    >>> adapter = PiSSA(rank=4).attach(model)
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs[:, :8]).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> [factor.shape for factor in next(adapter.layers())[1].as_lora()[:2]]  # for the original W
    [torch.Size([8, 16]), torch.Size([64, 8])]
    """

    info = Info(
        name="pissa",
        title="PiSSA: LoRA started from the principal part of the weight",
        room="adapters",
        paper="PiSSA: Principal Singular Values and Singular Vectors Adaptation of Large Language "
        "Models, arXiv 2404.02948",
        claim="converges faster than LoRA (Mistral-7B on GSM8K 72.9 % against 67.7 %), and "
        "quantizing the residual loses 19 % less than quantizing the weight",
        traits=(
            "adapts_base",
            "rewrites_base",
            "starts_near",
            "mergeable",
            "is_lora",
            "exact_resume",
            "compiles",
        ),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("worse", "LoRA of the same rank"),
        reason="three quarters of LoRA's steps to LoRA's loss, and NF4 loses 28 to 53 % less; but "
        "after all steps, at the rates that are fastest, test errors are 1.15 of LoRA's",
        run_on_gpu=True,
        tiny={"rank": 2},
    )
    search = SearchTable(
        {"learning_rate": LogRange(1e-5, 1e-1, 1e-3), "rank": IntegerRange(1, 256, 8, log=True)},
        size="rank",
    )
    layer = PiSSALayer

    niter: PowerIterations | None = None
    rounds: PositiveInt = 1

    def factors(self, site: Site) -> Mapping[str, Factor]:
        check_rank(self.rank, site)
        return {
            "A": Factor((self.rank, site.in_features)),
            "B": Factor((site.out_features, self.rank)),
        }

    def frozen(self, site: Site) -> Mapping[str, Factor]:
        return {f"{name}_0": factor for name, factor in self.factors(site).items()}
