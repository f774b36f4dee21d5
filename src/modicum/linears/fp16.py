"""fp16: frozen weights in the sixteen bits of their files, exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.method import Against, Info
from modicum.core.errors import InputError
from modicum.core.layers.form_layer import TensorShapes
from modicum.linears.base import LinearMethod
from modicum.linears.frozen import FrozenLinear


class FP16Linear(FrozenLinear):
    """A layer whose frozen weight is held in fp16, and computes in the dtype of its inputs.

    Attributes:
        halves: fp16 [out, in], as uint8 [out, 2 in].
    """

    form = "fp16"
    halves: nn.Parameter

    @classmethod
    def coded(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        return {"halves": (out_features, 2 * in_features)}

    @classmethod
    def frozen_weight(
        cls, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype, *how: str
    ) -> Tensor:
        """The weight of one product."""
        return held[0].view(torch.float16).to(dtype)

    def code(self, weight: Tensor, held: Sequence[Tensor]) -> None:
        halves = weight.to(held[0].device, torch.float16).contiguous()
        if not halves.isfinite().all() and weight.isfinite().all():
            raise InputError(
                "a weight is beyond what fp16 can hold; leave the layer out with `exclude`",
                field="weight",
                value=float(weight.abs().max()),
                allowed="at most 65504",
            )
        held[0].copy_(halves.view(torch.uint8))

    @classmethod
    def workspace(
        cls,
        in_features: int,
        out_features: int,
        item_bytes: int,
        device: str = "cpu",
        **arguments: Any,
    ) -> int:
        """Bytes of the weight while it is used."""
        return in_features * out_features * item_bytes


class FP16(LinearMethod):
    """Frozen weights that take 16 bits an element, for models whose files hold fp16.

    Half of fp32's bytes, and nothing is lost: fp16 has more digits than bf16, so its weights are no
    weights of bf16, and products in fp16 itself would need a loss scaler. Each product is computed
    in the dtype of its inputs, fp32 or bf16, with a weight that is made for it. Where files hold
    fp16, `training.precision: auto` and no form are asked for, and the adapter leaves the base as
    it is, a run takes this form by itself. `int8` takes half as much, and rounds.

    Args:
        targets, exclude: see `LinearMethod`.

    Source: IEEE 754-2019, binary16; that mixed precision needs a loss scaler: Micikevicius et al.,
    "Mixed Precision Training", arXiv 1710.03740, section 3.2.

    >>> import torch
    >>> from modicum.linears import FP16
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 3, bias=False)).half().float()
    >>> inputs = torch.randn(4, 128)
    >>> expected = model(inputs).detach()
    >>> formed = FP16(targets=("0",)).convert(model)
    >>> torch.equal(model(inputs), expected), sum(p.nbytes for p in model.parameters())
    (True, 768)
    """

    info = Info(
        name="fp16",
        title="fp16: frozen weights in the sixteen bits of their files",
        room="linears",
        paper="Mixed Precision Training, arXiv 1710.03740",
        claim="half of the bytes of fp32 for weights",
        traits=("quantized_base", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("better", "bf16 weights"),
        run_on_gpu=True,
    )
    layer = FP16Linear
