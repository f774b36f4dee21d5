"""Compacter: serial adapters whose matrices are sums of Kronecker products with shared factors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.base import Adapter, AdapterQuery, Factor
from modicum.adapters.serial import SerialLayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_divides
from modicum.core.contracts.method import Against, Info, Names, PositiveInt
from modicum.core.contracts.search import LogRange, SearchChoice, SearchTable

_STD = 1e-4  # of A at the start, as in the released configurations


class CompacterLayer(SerialLayer):
    """y = z + Up(GELU(Down(z))); each is x H + bias with H = sum over i of kron(A_i, s_i t_i)."""

    method: Compacter

    def down(self, outputs: Tensor) -> Tensor:
        return self._mapped("down", outputs)

    def up(self, hidden: Tensor) -> Tensor:
        return self._mapped("up", hidden)

    def _mapped(self, which: str, x: Tensor) -> Tensor:
        """x H + bias, [..., k] to [..., o], without H [k, o]."""
        s, t, bias = (self.get_parameter(f"{which}_{name}") for name in ("s", "t", "bias"))
        parts = x.unflatten(-1, (self.method.phm_dim, -1))
        thin = F.linear(parts, s.to(x.dtype)).flatten(-2)  # [..., (a, i)]
        mixed = (thin @ self._mixing().to(thin.dtype)).unflatten(-1, (self.method.phm_dim, -1))
        return (mixed @ t.to(mixed.dtype)).flatten(-2) + bias.to(mixed.dtype)

    def _mixing(self) -> Tensor:
        """The matrix [(a, i), (b, j)] with A_i[a, b] where i = j: all A_i in one product."""
        slow = self.shared.get_parameter("A").repeat_interleave(self.method.phm_rank, 0)
        return slow.permute(1, 2, 0).diag_embed().transpose(1, 2).flatten(2).flatten(0, 1)


class Compacter(Adapter):
    """A bottleneck behind each branch of a block, at the numbers of tuning biases.

    Prefer it for very many tasks of one model, and where there are few examples: two thin maps
    behind a module are 2 (d + d/32) numbers and biases, and n^3 for all of them. It does not merge,
    so two products stay in inference; LoRA merges. Here it is as good as the standard adapter
    behind blocks without norms, and worse behind blocks with. Give it a high learning rate: 3e-3
    in the paper.

    A layer maps d to d/reduction_factor and back, by H = sum over i = 1..n of kron(A_i, s_i t_i).
    The A_i [n, n] are trained and shared by all layers of the model, down and up; s_i [k/n, r] and
    t_i [r, o/n] are a layer's own. H is never built: a position costs n r (k + o) + (n^2 r)^2
    products. A starts at N(0, 1e-8), so a fresh model computes what the base does to 1e-6; s and t
    start Glorot-uniform with gain sqrt 2, biases at 0. The published runs train the norms too:
    `also=("*norm*",)`. Compacter++ is `targets` that name feed-forward modules alone.

    Args:
        reduction_factor: d over the width of the bottleneck.
        phm_dim: n, the terms of each sum; it divides d and the bottleneck.
        phm_rank: r, of the second factor of each term.
        targets: modules in blocks whose output is added to the residual stream (`mlp`), before the
            addition; `all-branches`: every one.
        dropout, exclude, also: see `Adapter`.

    Raises:
        InputError: a width that the parts do not divide, or modules whose end is not known.

    Source: Karimi Mahabadi et al., "Compacter: Efficient Low-Rank Hypercomplex Adapter Layers",
    NeurIPS 2021, arXiv 2106.04647, section 4; the start and GELU's tanh form from the authors'
    code. The `adapters` library has GELU by the error function, and its Compacter++ stands behind
    the feed-forward's addition to the stream, as `targets=("all-blocks",)` does.

    >>> import torch
    >>> from torch import nn
    >>> from modicum.adapters import Compacter
    >>> block = lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
    >>> model = nn.Sequential(block(), block())
    >>> adapter = Compacter(targets=("all-blocks",), reduction_factor=4, phm_dim=2).attach(model)
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(32, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    """

    info = Info(
        name="compacter",
        title="Compacter: bottlenecks of Kronecker products with shared factors",
        room="adapters",
        paper="Compacter: Efficient Low-Rank Hypercomplex Adapter Layers, arXiv 2106.04647",
        claim="T5-base with 0.047 % (Compacter++) of the parameters trained is on par with full "
        "tuning on GLUE, and better on SuperGLUE and where data are few",
        traits=("adapts_base", "after_block", "starts_near", "exact_resume", "compiles"),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("better", "serial adapters of rank one"),
        tiny={"reduction_factor": 1, "phm_dim": 1},
    )
    search = SearchTable(
        {
            "learning_rate": LogRange(1e-3, 0.5, 1e-2),
            "reduction_factor": SearchChoice((4, 8, 16, 32, 64), 32),
            "phm_dim": SearchChoice((2, 4, 8), 4),
        },
        size="reduction_factor",
    )
    layer = CompacterLayer
    needs_input = False
    drops_by_bits = True

    targets: Names = ("all-branches",)
    reduction_factor: PositiveInt = 32
    phm_dim: PositiveInt = 4
    phm_rank: PositiveInt = 1

    def factors(self, site: Site) -> Mapping[str, Factor]:
        n, width = self.phm_dim, site.out_features
        check_divides("reduction_factor", self.reduction_factor, {site.name: width})
        narrow = width // self.reduction_factor
        check_divides("phm_dim", n, {site.name: width, f"the bottleneck of {site.name}": narrow})
        made: dict[str, Factor] = {}
        for which, inputs, outputs in (("down", width, narrow), ("up", narrow, width)):
            for name, size in (("s", inputs // n), ("t", outputs // n)):
                bound = math.sqrt(12 / (size + self.phm_rank))
                made[f"{which}_{name}"] = Factor((n * self.phm_rank, size), bound=bound)
            made[f"{which}_bias"] = Factor((outputs,))
        return made

    def shared(self, sites: Sequence[Site]) -> Mapping[str, Factor]:
        return {"A": Factor((self.phm_dim,) * 3, std=_STD)}

    def saved_elements(self, site: Site) -> int:
        narrow = site.out_features // self.reduction_factor
        return site.out_features + 2 * narrow + 4 * self._mixed

    def matrices_kept(self, at: AdapterQuery) -> int:
        cast = self.trained(at.site) if at.shape.compute_bytes < 4 else 0
        return cast + 2 * self._mixed**2

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        width = at.site.out_features
        each = self.phm_dim * self.phm_rank * (width + width // self.reduction_factor)
        product = 4 * at.shape.positions * (each + self._mixed**2)
        return product, 2 * product

    @property
    def _mixed(self) -> int:
        """Numbers of a position between s and t: n^2 r."""
        return self.phm_dim**2 * self.phm_rank
