"""DoRA: LoRA decides where each row of the weight points, and a trained number how long it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from modicum.adapters import base_weights
from modicum.adapters.adapted_layer import AdaptedLayer
from modicum.adapters.base import AdapterQuery, Factor, LayerChange
from modicum.adapters.deriving_layer import DerivingLayer
from modicum.adapters.dropping import dropped_with_bits
from modicum.adapters.fused import compute_dtype, low_rank, plus_low_rank
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.sites import Site
from modicum.adapters.widths import linear_only
from modicum.core.contracts.ledger import Work
from modicum.core.contracts.method import Against, Info
from modicum.core.ranks.sharding import whole


class DoRALayer(DerivingLayer, LoRALayer):
    """y = b + k (W x + s B A x), k = magnitude / ||W + s B A|| [out], whose norm takes no gradient.

    With dropout, y = W x + b + (k - 1) W x' + k s B A x', where x' is the dropped x.
    """

    method: DoRA
    of_held = True
    magnitude: Tensor
    magnitude_0: Tensor

    def derive(self, weight: Tensor) -> Mapping[str, Tensor]:
        return {"magnitude_0": torch.linalg.vector_norm(weight, dim=1)}

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        a, b = self.matrices()
        with nullcontext() if self.method.through_norm else torch.no_grad():
            norms = self.norms()
        # In fp32, as small changes of a number near one are lost in bf16.
        grown, bias = self.magnitude / norms - 1, self._bias()
        if not self.dropout:
            outputs = plus_low_rank(inputs, base, a, b, self.scale)
            return _stretched(outputs, outputs, grown, bias)
        seen, bits = dropped_with_bits(inputs.to(compute_dtype(inputs, a)), self.dropout)
        update = low_rank(inputs, None, a, b, self.scale, self.dropout, dropped=(seen, bits))
        outputs = base(inputs)
        # A base in bf16 reads what it would have read undropped.
        changed = base(seen.to(inputs.dtype)) + update
        return _stretched(outputs + update, changed, grown, bias).to(outputs.dtype)

    def _bias(self) -> Tensor | None:
        """The bias in what the layer gives: its own, or an adapter's copy of it."""
        layer = self.layer
        assert isinstance(layer, AdaptedLayer)
        return layer.copies().get("bias", layer._parameters.get("bias"))

    def norms(self) -> Tensor:
        """The norms of the rows of W + s B A [out], without a matrix of its size.

        Their squares are ||W||^2 + 2 s <W A^T, B> + s^2 <B A A^T, B> by rows, where W A^T is what
        the layer makes of A's rows. A row of zeros has the norm one, so it stays zero.
        """
        with torch.autocast(self.magnitude.device.type, enabled=False):
            a, b = (base_weights.at_least_fp32(each) for each in self.matrices())
            layer = self.layer
            assert isinstance(layer, AdaptedLayer)
            weight, bias = layer._parameters.get("weight"), self._bias()
            through = layer.plain(a if weight is None else a.to(weight.dtype)).to(b.dtype)
            through = through if bias is None else through - bias.to(b.dtype)
            cross = (through.T * b).sum(1)
            own = ((b @ (a @ a.T)) * b).sum(1)
            squares = self.magnitude_0**2 + 2 * self.scale * cross + self.scale**2 * own
            return squares.clamp_min(0).sqrt().where(squares > 0, 1.0)

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange:
        changed = weight + self.delta()
        norms = torch.linalg.vector_norm(changed, dim=1)
        factor = whole(self.magnitude) / norms.where(norms > 0, 1.0)
        return LayerChange(factor[:, None] * changed - weight)

    def delta(self) -> Tensor:
        a, b = (base_weights.at_least_fp32(whole(each)) for each in self.matrices())
        return self.scale * (b @ a)

    def as_lora(self) -> None:  # type: ignore[override]
        return None

    def as_peft(self) -> tuple[Tensor, Tensor, float]:
        return super().as_lora()


def _stretched(outputs: Tensor, changed: Tensor, grown: Tensor, bias: Tensor | None) -> Tensor:
    """outputs + grown (changed - bias), in the dtype of `outputs`; `changed` has the bias in it."""
    grown = grown.to(outputs.dtype)
    if bias is not None:
        outputs = outputs - grown * bias.to(outputs.dtype)
    return torch.addcmul(outputs, changed.to(outputs.dtype), grown)


class DoRA(LoRA):
    """LoRA on the directions of W's rows, and a trained length for each row.

    W' = diag(magnitude) (W + s B A) / ||W + s B A||, by rows; magnitude starts as ||W||, so the
    start is the base model. As published, the norm is a constant in the backward pass.
    Prefer it to LoRA at small ranks where a step may take a third longer: it reads the frozen
    layer's product once more for the norm, and with dropout once more for the dropped input.

    Norms are of the weight as the layer holds it, so a quantized base starts as it is too. They
    need no dense matrix: W A^T is the layer applied to A's rows. Merging is of the original W. Of
    several adapters it is applied first.

    Args:
        rank: r, the inner width of the product that turns the rows.
        alpha: that product is scaled by s = alpha / rank; None means s = 1.
        rank_stabilized: s = alpha / sqrt(rank) instead.
        through_norm: whether gradients go through the norm as well; the authors leave that out, as
            it costs memory and hardly changes what is learned.
        dropout, targets, exclude, also: see `Adapter`; embeddings cannot be targets.

    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv 2402.09353, sections 4
    and 4.3; with dropout as in PEFT, where (k - 1) W reads the dropped input too.

    >>> import torch
    >>> from modicum.adapters import DoRA
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 1))
    >>> adapter = DoRA(rank=4).attach(model)
    >>> optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    >>> inputs = torch.randn(64, 16)
    >>> for _ in range(10):
    ...     loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> adapter.merge()
    """

    info = Info(
        name="dora",
        title="DoRA: LoRA on the directions of rows, and a trained length for each",
        room="adapters",
        paper="DoRA: Weight-Decomposed Low-Rank Adaptation, arXiv 2402.09353",
        claim="better than LoRA on commonsense reasoning, visual instructions and image and video "
        "understanding, most at small ranks, without latency after merging",
        traits=(
            "adapts_base",
            "reads_base",
            "applies_first",
            "starts_near",
            "mergeable",
            "in_peft",
            "exact_resume",
            "compiles",
        ),
        traits_if=(("through_norm", False, "corrects_gradients"),),
        evidence="verified against code",
        claim_verdict="holds",
        against=Against("worse", "LoRA of the next rank"),
        reason="0.008 nats below LoRA of the same rank, and twice as far above the entropy as LoRA "
        "of the next rank, which trains 1.3 times as many numbers",
        run_on_gpu=True,
        tiny={"rank": 2},
    )
    layer = DoRALayer
    peft_switch = "use_dora"
    peft_tensors: ClassVar[Mapping[str, str]] = {"magnitude": "lora_magnitude_vector"}

    through_norm: bool = False

    def factors(self, site: Site) -> Mapping[str, Factor]:
        linear_only(site, "DoRA adapts linear layers, and this is an embedding")
        return {**super().factors(site), "magnitude": Factor((site.out_features,))}

    def derived(self, site: Site) -> Mapping[str, Factor]:
        return {"magnitude_0": Factor((site.out_features,))}

    def saved_elements(self, site: Site) -> int:
        return super().saved_elements(site) + site.out_features

    def work(self, at: AdapterQuery) -> tuple[Work, ...]:
        site, rank = at.site, self.at(at.site).rank
        norms = 2 * rank * (site.elements + rank * (site.in_features + site.out_features))
        again = 2 * at.shape.positions * site.elements if self.dropout else 0
        forward, *backward = super().work(at)
        return Work(forward.flops + norms + again), *backward, Work(again, phase="backward")
