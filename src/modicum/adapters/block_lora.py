"""Block-LoRA: LoRA split into blocks that share one down-projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from modicum.adapters.base import AdapterQuery, Factor
from modicum.adapters.channel_sums import ChannelSums
from modicum.adapters.fused import in_autocast, plus_low_rank
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_divides, linear_only
from modicum.core.contracts.method import Against, Info, PositiveInt, Probability
from modicum.core.contracts.search import IntegerRange, LinearRange, SearchTable
from modicum.core.ranks.sharding import own_part, whole


class BlockLoRALayer(LoRALayer):
    """y = W x + b + s (B_1 + .. + B_N) A x, or + s B A (x_1 + .. + x_N): see `BlockLoRA`."""

    method: BlockLoRA

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start every tensor; arms that do not start at zero add up to it exactly."""
        super().initialise(seed=seed, device=device)
        if self.method.summed and self.method.arms == "zero_sum":
            with torch.no_grad():
                part, _ = own_part(self.B)
                std = 1.0 / math.sqrt(self.site.in_features)
                part.copy_(summing_to_zero(part, self.method.blocks, std))

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        method, dropout = self.method, self.dropout
        if dropout and method.own_masks:
            for arm in self.B.chunk(method.blocks, 1):
                base = partial(
                    plus_low_rank, base=base, a=self.A, b=arm, scale=method.scale, dropout=dropout
                )
            return base(inputs)
        a, b = self.matrices()
        return plus_low_rank(inputs, base, a, b, method.scale, dropout, (method.segments, None))

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.A, sum_of_arms(self.B, self.method.blocks) if self.method.summed else self.B

    def as_lora(self) -> tuple[Tensor, Tensor, float]:
        a, b = whole(self.A), whole(self.B)
        if self.method.summed:
            return a, sum_of_arms(b, self.method.blocks), self.method.scale
        return a.repeat(1, self.method.blocks), b, self.method.scale


class BlockLoRA(LoRA):
    """LoRA whose N blocks share one down-projection, of which fewer numbers are trained.

    Reconstructed from the paper's abstract, which fits two structures of N blocks:

    - `sum`: B = [B_1 .. B_N] meets N times the same A [r / N, in], so the update is
      s (B_1 + .. + B_N) A: m r + n r / N numbers, of rank r / N.
    - `fold`: A = [A_0 .. A_0] along the input, so the update is s B A_0 (x_1 + .. + x_N) for the N
      contiguous segments of x: m r + n r / N numbers, of rank r.

    Prefer `fold` where layers are wide in their inputs and memory of factors counts. What `sum`
    computes depends on the sum of its arms alone, and all arms have the same gradient wherever they
    start: without dropout it is LoRA of rank r / N whose B learns N times as fast (under Adam too),
    with `arms="zero_sum"` as with `arms="equal"`. A mask for each arm changes the noise.

    A starts uniform in (-1/sqrt(in), 1/sqrt(in)) and B zero, or summing to zero, so training starts
    from the base model exactly. With heads interleaved in the input, `fold` adds channels that have
    nothing to do with each other, which is allowed.

    Args:
        rank: r, of the blocks together.
        blocks: N; it divides r (`sum`), or the inputs of every layer (`fold`). With 1 it is LoRA.
        structure: `sum` or `fold`.
        arms: of `sum`. `own_masks`: dropout has a mask for each arm, one product of A each;
            `equal`: one mask for all; `zero_sum`: so too, and arms start as N(0, 1 / in) less
            their mean.
        alpha: s = alpha / rank, with the nominal r in both structures; None means s = 1.
        dropout: 0.25 unless stated, as in few-shot practice with CLIP.
        targets, exclude: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: N does not divide r, or a layer's inputs; with the nearest number that does.

    Source: Zhou et al., "One Head Eight Arms: Block Matrix based Low Rank Adaptation for
    CLIP-based Few-Shot Learning", arXiv 2501.16720; no public code was found.

    >>> import torch
    >>> from modicum.adapters import BlockLoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    >>> adapter = BlockLoRA(rank=4, blocks=2, structure="fold").attach(model)
    >>> {name: tuple(factor.shape) for name, factor in adapter.named_parameters()}
    {'0.A': (4, 8), '0.B': (64, 4), '1.A': (4, 32), '1.B': (1, 4)}
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="block_lora",
        title="Block-LoRA: blocks of LoRA that share one down-projection",
        room="adapters",
        paper="One Head Eight Arms: Block Matrix based Low Rank Adaptation for CLIP-based Few-Shot "
        "Learning, arXiv 2501.16720",
        claim="competitive few-shot accuracy of CLIP with fewer parameters and operations than "
        "LoRA",
        traits=("adapts_base", "mergeable", "is_lora", "exact_resume", "compiles"),
        evidence="reconstructed",
        claim_verdict="in part",
        against=Against("worse", "LoRA of no more numbers"),
        reason="fewer numbers and operations, and on the testbed LoRA's loss to 0.0012 nats; but "
        "with few shots it is 0.045 less accurate than LoRA of its rank, and LoRA of half "
        "the rank is better",
        run_on_gpu=True,
        tiny={"rank": 2, "dropout": 0.0},
    )
    search = SearchTable(
        {"rank": IntegerRange(2, 128, 8, log=True, step=2), "dropout": LinearRange(0.0, 0.5, 0.25)},
        size="rank",
    )
    layer = BlockLoRALayer

    blocks: PositiveInt = 2
    structure: Literal["sum", "fold"] = "sum"
    arms: Literal["own_masks", "equal", "zero_sum"] = "own_masks"
    dropout: Probability = 0.25

    def model_post_init(self, context: Any) -> None:
        """Check that blocks divide the rank."""
        if self.structure == "sum":
            check_divides("blocks", self.blocks, {"rank": self.rank})

    @property
    def summed(self) -> bool:
        """Whether B is made of arms."""
        return self.structure == "sum" and self.blocks > 1

    @property
    def own_masks(self) -> bool:
        """Whether dropout has a mask for each arm."""
        return self.summed and self.arms == "own_masks"

    @property
    def segments(self) -> ChannelSums | None:
        """What A reads: sums of segments; None: the input."""
        folds = self.structure == "fold" and self.blocks > 1
        return ChannelSums(self.blocks, adjacent=False) if folds else None

    def sites(self, model: nn.Module) -> list[Site]:
        found = super().sites(model)
        if self.structure == "fold":
            check_divides("blocks", self.blocks, {site.name: site.in_features for site in found})
        return found

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "the inputs of an embedding are symbols, which have no segments")
        if self.structure == "fold":
            check_divides("blocks", self.blocks, {site.name: site.in_features})
        n, bound = site.in_features, 1.0 / math.sqrt(site.in_features)
        rows = self.rank // self.blocks, n
        apart = self.summed and self.arms == "zero_sum"
        return {
            "A": Factor(rows if self.summed else (self.rank, n // self.blocks), bound=bound),
            "B": Factor((site.out_features, self.rank), std=bound if apart else 0.0),
        }

    def saved_elements(self, site: Site) -> int:
        one_product = self.summed and not (self.dropout and self.own_masks)
        return self.rank // self.blocks if one_product else self.rank

    def input_parts(self, site: Site) -> int:
        return 1 if self.dropout or self.segments is None else self.blocks

    def dropout_bytes(self, at: AdapterQuery) -> int:
        return super().dropout_bytes(at) * (self.blocks if self.own_masks else 1)

    def matrices_kept(self, at: AdapterQuery) -> int:
        made = self.summed and not (self.dropout and self.own_masks)
        return at.site.out_features * self.rank // self.blocks if made else 0

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        n, m, r = at.site.in_features, at.site.out_features, self.rank
        elements = m * r + n * r // self.blocks
        if self.summed:
            elements = (m + n) * self.saved_elements(at.site)
        product = 2 * at.shape.positions * elements
        return product, 2 * product


def sum_of_arms(b: Tensor, arms: int) -> Tensor:
    """B_1 + .. + B_N [out, r / N] of [B_1 .. B_N]; under autocast in its dtype, as it is kept."""
    return in_autocast(b.unflatten(1, (arms, -1)).sum(1))


def summing_to_zero(drawn: Tensor, arms: int, std: float) -> Tensor:
    """[out, r] less the mean over arms, all multiples of one power of two, so that sums are exact.

    Args:
        std: of the draws.

    >>> made = summing_to_zero(torch.randn(5, 6), 3, 1.0)
    >>> made.unflatten(1, (3, 2)).sum(1).abs().max().item(), bool(made.any())
    (0.0, True)
    """
    step = 2.0 ** (math.floor(math.log2(std)) - 8)
    grid = (drawn / step).round().unflatten(1, (arms, -1))
    centred = arms * grid - grid.sum(1, keepdim=True)
    return (centred * (step / 2 ** (arms - 1).bit_length())).flatten(1)
