"""The digits' lab for serial adapters: behind each hidden block, with 60 or 200 turned images.

Before the blocks is a layer 64-256; each of the three blocks is a layer 256-256 and GELU, behind a
norm or, by default, behind a scale of ones; behind them is the head. Upright digits are learned as
in `digits_bench.py`, all weights stay frozen, and what is compared is accuracy on images that
nobody has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.serial import SerialLayer
from modicum.adapters.sites import Site
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Info, Names, PositiveInt
from modicum.proofs.adapters.digits_bench import WIDTHS, DigitsBench
from modicum.proofs.base import ProofRun

WIDTH, BLOCKS = WIDTHS[-1], 3


class ScaleNorm(nn.Module):
    """Inputs [..., width] times a scale that starts at 1, where a norm would be."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        """As many numbers."""
        return inputs * self.weight


class SerialBench(DigitsBench):
    """Adaptations behind each block, to so many images.

    Args:
        images: turned ones, to which a contender adapts.
        norm: what a block begins with.
    """

    targets = ("all-blocks",)

    def __init__(
        self, run: ProofRun, images: int, norm: Callable[[int], nn.Module] = ScaleNorm
    ) -> None:
        super().__init__(run)
        self.norm = norm
        self.name = f"digits, turned, behind blocks, {images} images, {norm.__name__}"
        self.turned = self.turned[0][:images], self.turned[1][:images]

    def drawn(self) -> nn.Sequential:
        blocks = [
            nn.Sequential(self.norm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
            for _ in range(BLOCKS)
        ]
        first = nn.Sequential(nn.Linear(WIDTHS[0], WIDTH), nn.GELU())
        return nn.Sequential(first, nn.Sequential(*blocks), nn.Linear(WIDTH, 10))


class BottleneckLayer(SerialLayer):
    """y = z + U GELU(D z + c) + d, with D [bottleneck, width] and U [width, bottleneck]."""

    def down(self, outputs: Tensor) -> Tensor:
        return self._mapped("down", outputs)

    def up(self, hidden: Tensor) -> Tensor:
        return self._mapped("up", hidden)

    def _mapped(self, which: str, x: Tensor) -> Tensor:
        return F.linear(x, self.get_parameter(f"{which}_matrix"), self._bias(which))

    def _bias(self, which: str) -> Tensor:
        return self.get_parameter(f"{which}_bias")


class Bottleneck(Adapter):
    """The standard serial adapter (Houlsby et al., arXiv 1902.00751); U starts at zero."""

    info = Info(
        name="bottleneck",
        title="Bottleneck: the standard serial adapter",
        room="adapters",
        paper="Parameter-Efficient Transfer Learning for NLP, arXiv 1902.00751",
        claim="a rival",
        traits=("adapts_base", "after_block", "exact_resume"),
    )
    layer = BottleneckLayer
    needs_input = False

    targets: Names = ("all-blocks",)
    bottleneck: PositiveInt = 32

    def factors(self, site: Site) -> Mapping[str, Factor]:
        width, narrow = site.out_features, self.bottleneck
        return {
            "down_matrix": Factor((narrow, width), bound=1 / math.sqrt(width)),
            "up_matrix": Factor((width, narrow)),
            "down_bias": Factor((narrow,)),
            "up_bias": Factor((width,)),
        }

    def saved_elements(self, site: Site) -> int:
        return site.out_features + 2 * self.bottleneck

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        product = 4 * at.shape.positions * at.site.out_features * self.bottleneck
        return Work(product), Work(2 * product, phase="backward")


class ThinBottleneckLayer(BottleneckLayer):
    """The same, where each matrix is an outer product."""

    def _mapped(self, which: str, x: Tensor) -> Tensor:
        read, write = (self.get_parameter(f"{which}_{name}") for name in ("read", "write"))
        thin = (x * read).sum(-1, keepdim=True)
        return thin * write + self._bias(which)


class ThinBottleneck(Bottleneck):
    """A serial adapter of matrices of rank one, which has as many numbers as Compacter's."""

    layer = ThinBottleneckLayer

    def factors(self, site: Site) -> Mapping[str, Factor]:
        width, narrow = site.out_features, self.bottleneck
        made: dict[str, Factor] = {}
        for which, inputs, outputs in (("down", width, narrow), ("up", narrow, width)):
            bound = 0.0 if which == "up" else math.sqrt(12 / (1 + outputs))
            made[f"{which}_read"] = Factor((inputs,), bound=math.sqrt(12 / (1 + inputs)))
            made[f"{which}_write"] = Factor((outputs,), bound=bound)
            made[f"{which}_bias"] = Factor((outputs,))
        return made
