"""QA-LoRA, the rival of adapters that merge into few bits: LoRA that reads means of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import AdapterQuery, Factor
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import PositiveInt


class QALoRALayer(LoRALayer):
    """y = W x + b + s B (A mean(x)), with A [r, in / g], B [out, r] and means of g inputs."""

    method: QALoRA

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        means = inputs.unflatten(-1, (-1, self.method.group)).mean(-1)
        return base(inputs) + self.method.scale * F.linear(F.linear(means, self.A), self.B)

    def delta(self) -> Tensor:
        return (super().delta() / self.method.group).repeat_interleave(self.method.group, 1)


class QALoRA(LoRA):
    """LoRA whose change is one number in each group of a row, so that it merges into zero points.

    Args:
        group: g, neighbouring inputs that share one; it divides every layer's inputs.
        rank, alpha, dropout, targets, exclude: as LoRA's; there is no dropout here.

    Source: Xu et al., "QA-LoRA: Quantization-Aware Low-Rank Adaptation of Large Language Models",
    arXiv 2309.14717, section 3.3.
    """

    layer = QALoRALayer
    needs_input = False

    group: PositiveInt = 32

    def factors(self, site: Site) -> Mapping[str, Factor]:
        groups = site.in_features // self.group
        return {
            "A": Factor((self.rank, groups), bound=1.0 / math.sqrt(groups)),
            "B": Factor((site.out_features, self.rank)),
        }

    def saved_elements(self, site: Site) -> int:
        return site.in_features // self.group + self.rank

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 2 * at.shape.positions * self.trained(at.site)
        return Work(product), Work(2 * product, phase="backward")
