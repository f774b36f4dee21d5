"""FWSVD: low-rank factors that are right where the task's loss depends on the weight."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from modicum.compress.low_rank_base import LowRankCompressor
from modicum.core.contracts.method import Against, Info, NonNegativeFloat
from modicum.core.contracts.search import LinearRange, SearchTable
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.layer_sites import Site


class FWSVD(LowRankCompressor):
    """SVD of a weight whose input features weigh as much as the Fisher information of their rows.

    For a weight W [out, in] the empirical Fisher information is the mean over examples of squared
    gradients, summed for each input feature i: I_i = sum_o E[(dL/dW_oi)^2]. The factors minimise
    sum_i (I_i / mean(I) + kappa) |W_i - (BA)_i|^2 exactly. A row of the paper, where z = xW, is a
    column of PyTorch's weight. Prefer it where a model was tuned for the task whose examples and
    labels are at hand, and is tuned again after it is compressed; without gradients, or without
    that recovery, factors that look at a layer's outputs do better.

    The paper has no damping, which is `damping=0`. On a model that has converged a few examples
    make most of the Fisher information, and then features that they do not need are thrown away, so
    that without recovery the result can be worse than a plain SVD; hence kappa = 1 here. The paper
    leaves the singular values with one factor; here both share them, the product is the same.

    Args:
        damping: kappa, what is added to the information of every input feature, of which the mean
            is 1.
        fisher: `examples` squares the gradient of each example, as the paper does; `tokens` counts
            each position as an example, which is cheaper and leaves out how they add up.
        share, rank, multiple, targets, exclude, examples: see `LowRankCompressor`.

    Source: Hsu et al., "Language model compression with weighted low-rank factorization", ICLR
    2022, arXiv 2207.00112, section 4.

    >>> import torch
    >>> from modicum.compress import FWSVD
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    >>> batches = [(torch.randn(32, 16), torch.randn(32, 16)) for _ in range(4)]
    >>> def loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().sum()
    >>> compressor = FWSVD(share=0.5)
    >>> calibration = compressor.calibrate(model, batches, loss)
    >>> compressed = compressor.fit(model, calibration)
    >>> compressed.report.bytes_before, compressed.report.bytes_after
    (8192, 3840)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # and train on, to recover
    """

    info = Info(
        name="fwsvd",
        title="FWSVD: low-rank factors weighted by Fisher information",
        room="compress",
        paper="Language model compression with weighted low-rank factorization, arXiv 2207.00112",
        claim="task accuracy close to the original's at higher compression than SVD; 9 to 30 % "
        "fewer parameters of models that are compact already",
        traits=("needs_trained_base", "mergeable", "exact_resume", "compiles"),
        evidence="against paper",
        claim_verdict="in part",
        against=Against("equal", "LoRD"),
        reason="better than a plain SVD at half of the parameters, and as good at 0.4 of them; "
        "LoRD, without gradients, is better in two cases of four",
        run_on_gpu=True,
        tiny={"share": 0.6, "examples": 16},
    )
    search = SearchTable({"share": LinearRange(0.1, 0.9, 0.5)}, size="share")

    damping: NonNegativeFloat = 1.0
    fisher: Literal["examples", "tokens"] = "examples"

    @property
    def statistics(self) -> tuple[str, ...]:
        return ("fisher",) if self.fisher == "examples" else ("token_fisher",)

    def metric(self, layer: Site, calibration: Calibration) -> Tensor:
        importance = calibration.mean(self.statistics[0], layer.name)
        mean = importance.mean()
        # A layer in which the loss has no interest at all is one in which nothing is preferred.
        return importance / mean + self.damping if mean > 0 else importance + 1.0
