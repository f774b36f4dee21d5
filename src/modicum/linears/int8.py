"""int8: frozen weights in eight bits, at even steps."""

from __future__ import annotations

from modicum.core.contracts.method import Against, Info
from modicum.linears.base import LinearMethod
from modicum.linears.quantized import QuantizedLinear


class Int8Linear(QuantizedLinear):
    """A layer whose frozen weight is held at 256 even levels."""

    form = "int8"
    levels = tuple(step / 127 for step in range(-128, 128))


class Int8(LinearMethod):
    """Frozen weights that take about 8.14 bits an element (in = 4096).

    Prefer it to `nf4` where a byte an element fits: a weight drawn from a normal distribution comes
    back with an error of 0.6 % of its norm, where `nf4` loses 9 % and bf16 0.2 %. Groups of 64 and
    their scales are those of `nf4`; products are computed in the input's dtype, not in integers.

    Args:
        targets, exclude: see `LinearMethod`.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861,
    section 2.1, with linear levels.

    >>> import torch
    >>> from modicum.linears import Int8
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 3, bias=False))
    >>> expected = model(torch.eye(128)).detach()
    >>> formed = Int8(targets=("0",)).convert(model)
    >>> bool((model(torch.eye(128)) - expected).norm() < 0.01 * expected.norm())
    True
    """

    info = Info(
        name="int8",
        title="int8: frozen weights in eight bits",
        room="linears",
        paper="8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861",
        claim="scales of small blocks keep eight bits exact where some weights are much larger",
        traits=("quantized_base", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="holds",
        against=Against("better", "one scale a row"),
        run_on_gpu=True,
    )
    layer = Int8Linear
