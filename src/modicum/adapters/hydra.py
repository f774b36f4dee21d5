"""Hydra: a low-rank branch on a layer's input, and one on what the frozen layer gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from modicum.adapters import base_weights
from modicum.adapters.base import Adapter, AdapterLayer, AdapterQuery, Factor, LayerChange
from modicum.adapters.fused import plus_dropped_between, plus_low_rank
from modicum.adapters.sites import Site
from modicum.adapters.widths import check_rank, linear_only
from modicum.core.contracts.method import Against, Info, PositiveFloat
from modicum.core.contracts.search import IntegerRange, SearchTable
from modicum.core.errors import InputError
from modicum.core.ranks.sharding import own_part, whole


class HydraLayer(AdapterLayer):
    """y = y0 + s (B_p (A_p x + c_p) + d_p + B_s (A_s y0 + c_s) + d_s), where y0 = W x + b."""

    method: Hydra

    def initialise(self, *, seed: int, device: torch.device | str) -> None:
        """Start every tensor; a scale that is trained starts at its field."""
        super().initialise(seed=seed, device=device)
        if self.method.learn_scale:
            with torch.no_grad():
                own_part(self.get_parameter("s"))[0].fill_(self.method.scale)

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        branches = self.method.branches
        if "s" not in branches:
            return self._with("p", inputs, base)
        frozen = base(inputs)
        outputs = self._with("s", frozen, lambda _: frozen)
        return self._with("p", inputs, lambda _: outputs) if "p" in branches else outputs

    def _with(self, branch: str, reads: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        """What `base` gives, plus what a branch makes of what it reads."""
        a: Tensor = self.get_parameter(f"A_{branch}")
        b: Tensor = self.get_parameter(f"B_{branch}")
        down: Tensor | None = self._parameters.get(f"c_{branch}")
        up: Tensor | None = self._parameters.get(f"d_{branch}")
        fixed: float = self.method.scale
        if self.method.learn_scale:
            scale, fixed = self.get_parameter("s"), 1.0
            b, up = scale * b, None if up is None else scale * up
        constant = None if up is None else fixed * up
        if self.dropout:
            outputs = plus_dropped_between(reads, base, a, b, fixed, self.dropout, down)
        else:
            outputs = plus_low_rank(reads, base, a, b, fixed)
            if constant is not None and down is not None:
                constant = constant + fixed * (b * down).sum(1)
        return outputs if constant is None else (outputs + constant).to(outputs.dtype)

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange:
        (a, b, scale), grown = self._on(weight), self._grown(bias)
        return LayerChange(scale * (b @ a), None if grown is None else scale * grown)

    def as_lora(self) -> tuple[Tensor, Tensor, float] | None:
        return None if self._grows() else self.as_peft()

    def peft_bias(self) -> Tensor | None:
        return self._grown(base_weights.read_bias(self.layer)) if self._grows() else None

    def _grows(self) -> bool:
        """Whether it changes the layer's bias."""
        reads = "s" in self.method.branches and base_weights.read_bias(self.layer) is not None
        return self.method.biases or reads

    def _grown(self, bias: Tensor | None) -> Tensor | None:
        """The change of the layer's bias over s: B_p c_p + d_p + B_s (A_s b + c_s) + d_s."""
        grown: list[Tensor] = []
        for branch in self.method.branches if self.method.biases else ():
            grown.append(self._full("B", branch) @ self._full("c", branch))
            grown.append(self._full("d", branch))
        if bias is not None and "s" in self.method.branches:
            grown.append(self._full("B", "s") @ (self._full("A", "s") @ bias))
        return torch.stack(grown).sum(0) if grown else None

    def as_peft(self) -> tuple[Tensor, Tensor, float] | None:
        if self.merged or (self.site.rows is not None and self._grows()):
            return None
        rewriter = getattr(self.layer, "rewriter", lambda: None)()
        weight = base_weights.read(self.layer, self.site)
        return self._on(weight if rewriter is None else weight + rewriter.taken())

    def _on(self, weight: Tensor) -> tuple[Tensor, Tensor, float]:
        """A = [A_p; A_s W], B = [B_p, B_s] and s: the plain LoRA that this is on a weight."""
        downs = [
            self._full("A", each) @ weight if each == "s" else self._full("A", each)
            for each in self.method.branches
        ]
        ups = [self._full("B", branch) for branch in self.method.branches]
        learned = self.method.learn_scale and not ups[0].is_meta  # it has no value there
        scale = float(whole(self.get_parameter("s").detach())) if learned else self.method.scale
        return torch.cat(downs), torch.cat(ups, 1), scale

    def _full(self, kind: str, branch: str) -> Tensor:
        return base_weights.at_least_fp32(whole(self.get_parameter(f"{kind}_{branch}")))


class Hydra(Adapter):
    """Low-rank branches next to a layer and behind it: new features, and new sums of the old ones.

    The parallel branch is LoRA's; the sequential one reads what the frozen layer gives. Both fold:
    W' = W + s (B_p A_p + B_s A_s W), b' = b + s (B_s A_s b + B_p c_p + d_p + B_s c_s + d_s). So it
    expresses no more than LoRA of rank r_p + r_s. Prefer it on layers that narrow: on 4m inputs and
    m outputs a sequential rank costs 2m numbers, a parallel one 5m. With few examples of new digits
    it was worse than LoRA of as many numbers. A starts uniform in (-1/sqrt(inputs),
    1/sqrt(inputs)), all else zero. It is not HydraLoRA, a mixture of experts.

    Args:
        rank: r_p, of the parallel branch; 0 leaves it out.
        sequential_rank: r_s, of the branch behind the layer; 0 leaves it out, and then it is LoRA.
        scale: s, of both branches.
        learn_scale: whether each layer trains its own s, without weight decay.
        biases: whether each factor has a bias: c before B, d after it.
        dropout: here of what is between the factors, as in the authors' code.
        targets, exclude, also: see `Adapter`; embeddings cannot be targets.

    Raises:
        InputError: both ranks are 0, or one is above a layer's inputs or outputs.

    Source: Kim et al., "Hydra: Multi-head Low-rank Adaptation for Parameter Efficient Fine-tuning",
    arXiv 2309.06922, section 3; the authors' code, whose merge into attention projections takes the
    wrong weight, and whose patch for RoBERTa leaves the sequential branch unused.

    >>> import torch
    >>> from modicum.adapters import Hydra
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Linear(16, 4))
    >>> adapter = Hydra(rank=2, sequential_rank=2).attach(model)
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(32, 64)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs[:, :4]).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> adapter.merge()
    """

    info = Info(
        name="hydra",
        title="Hydra: low-rank branches next to a layer and behind it",
        room="adapters",
        paper="Hydra: Multi-head Low-rank Adaptation for Parameter Efficient Fine-tuning, "
        "arXiv 2309.06922",
        claim="VTAB-1k average 76.5 where LoRA has 74.5 at as many parameters; ELEVATER few-shot "
        "average 70.95 against 61.48",
        traits=("adapts_base", "reads_base", "mergeable", "exact_resume", "compiles"),
        traits_if=(("biases", False, "is_lora"), ("biases", True, "in_peft")),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("equal", "LoRA of as many numbers"),
        reason="what mixes outputs is fitted with fewer numbers than LoRA's, and a sequential rank "
        "costs 0.4 of a parallel one where a layer narrows; with one or two shots of new "
        "digits it is 3.6 points below LoRA, and 2.1 over all numbers of shots, both within "
        "the spread; permutations are learned as well",
        run_on_gpu=True,
        tiny={"rank": 1, "sequential_rank": 1},
    )
    search = SearchTable(
        {
            "rank": IntegerRange(1, 64, 2, log=True),
            "sequential_rank": IntegerRange(1, 64, 2, log=True),
        },
        size="rank",
    )
    layer = HydraLayer
    peft_switch = "lora_bias"

    rank: NonNegativeInt = 2
    sequential_rank: NonNegativeInt = 2
    scale: PositiveFloat = 1.0
    learn_scale: bool = False
    biases: bool = False

    def model_post_init(self, context: Any) -> None:
        """Check that there is a branch."""
        if not self.branches:
            problem = "one of rank and sequential_rank must be above 0"
            raise InputError(problem, field="rank", value=0)

    @property
    def branches(self) -> str:
        """Those that there are: `p`, `s`, or both."""
        return "p" * (self.rank > 0) + "s" * (self.sequential_rank > 0)

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "Hydra adapts linear layers, and this is an embedding")
        n, m = site.in_features, site.out_features
        made = {"s": Factor((1,))} if self.learn_scale else {}
        for branch, rank, reads in (("p", self.rank, n), ("s", self.sequential_rank, m)):
            if branch not in self.branches:
                continue
            check_rank(rank, site, "rank" if branch == "p" else "sequential_rank")
            made[f"A_{branch}"] = Factor((rank, reads), bound=1.0 / math.sqrt(reads))
            made[f"B_{branch}"] = Factor((m, rank))
            if self.biases:
                made |= {f"c_{branch}": Factor((rank,)), f"d_{branch}": Factor((m,))}
        return made

    def saves_input(self, site: Site) -> bool:
        return "p" in self.branches

    def saved_elements(self, site: Site) -> int:
        outputs = site.out_features if "s" in self.branches else 0
        return self.rank + self.sequential_rank + outputs

    def dropout_bytes(self, at: AdapterQuery) -> int:
        ranks = self.rank, self.sequential_rank
        return sum(-(-rank * at.shape.positions // 8) for rank in ranks)

    def matrices_kept(self, at: AdapterQuery) -> int:
        ranks = self.rank + self.sequential_rank
        return self.learn_scale * ranks * at.site.out_features

    def operations(self, at: AdapterQuery) -> tuple[int, int]:
        n, m = at.site.in_features, at.site.out_features
        product = 2 * at.shape.positions * (self.rank * (n + m) + self.sequential_rank * 2 * m)
        return product, 2 * product
