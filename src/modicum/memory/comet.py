"""COMET: stored inputs of convolutions, compressed as far as the gradient's noise allows."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from modicum.core.contracts.method import Against, Info, PositiveFloat, PositiveInt
from modicum.core.layers.saved_tensors import Shares
from modicum.memory.base import ActivationPolicy, Seen, SharesRange

# Bytes an element while a piece is compressed and restored, as measured, by whether it has four
# bytes or fewer; and the elements of a piece on a CPU.
_WORKSPACE, _PIECE = {True: (29, 20), False: (34, 18)}, 1 << 17


class COMET(ActivationPolicy):
    """Error-bounded compression of what convolutions keep, each layer with a bound of its own.

    An error of at most e in the stored input a of a convolution makes noise of standard deviation
    sigma = e / sqrt(3) sqrt(R sum(L^2)) in each entry of the weight gradient of an output channel,
    where R is the share of a that is not zero and L the loss's gradient at the output; it reaches
    no other gradient. Every W updates S = sqrt(sum(L^2)) (the median over channels), R and the mean
    magnitude M of the weight's momentum are measured, and the bound is set to where sigma is a
    hundredth of M: e = sqrt(3) 0.01 M / (S sqrt(R)). The sums are those of the full update, over
    micro-batches and ranks, as the gradient's noise is.

    Covered are the inputs of trained convolutions, and what ReLU and max-pooling save of the same
    storages: a ReLU needs signs alone, pooling a shape. Inputs of norms stay as they are, so with a
    norm after every convolution less than half of the bytes are covered. Blocks that are recomputed
    keep nothing that could be compressed, and compiled blocks do not show what they compute.

    The law takes errors for independent. In large even areas of an image they are all alike, and
    noise is louder than it says: on digits by half in the first layers, early in training.

    Prefer it where activations of convolutions decide whether a batch fits, and the time for
    compressing is there.

    Args:
        tolerance: the noise that is allowed, as a part of M.
        every: W, updates between two measurements.
        warmup: W_0, the update that is measured first; before it bounds are `finest_bits`.
        finest_bits: a bound is at least largest / 2^this; the width of a number at most, so.
        coarsest: a bound is at most this part of the largest magnitude of the input.

    Source: Jin et al., "COMET", PVLDB 15(4), 2022, arXiv 2111.09562. Their public code has a fixed
    bound and puts decompressed values back at once; this follows the paper. The constants 0.01 and
    1000 are the paper's. In place of its empirical law sigma = 0.32 L sqrt(N R) e stands the exact
    one, which the sums above give. The lower clamp, the safe bound of the warm-up, is ours.

    >>> import torch
    >>> from modicum.memory import COMET
    >>> relu, pool = torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    >>> first, second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3)
    >>> model = torch.nn.Sequential(first, relu, pool, second, relu)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    >>> comet = COMET(every=10, warmup=2).attach(model)
    >>> for _ in range(4):
    ...     with comet.context():
    ...         loss = model(torch.randn(8, 3, 32, 32)).square().mean()
    ...     loss.backward()
    ...     comet.observe(optimizer)
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    ...     comet.after_step()
    >>> comet.measured.values < 0.3, comet.measured.signs < 0.1
    (True, True)
    """

    info = Info(
        name="comet",
        title="COMET: stored inputs of convolutions under an error bound",
        room="memory",
        paper="COMET: A Novel Memory-Efficient Deep Learning Training Framework by Using "
        "Error-Bounded Lossy Compression, arXiv 2111.09562",
        claim="up to 13.5 times less activation memory than without it, with little or no loss of "
        "accuracy, for five convolutional networks on ImageNet",
        traits=(
            "compresses_saved",
            "needs_convolutions",
            "follows_optimizer",
            "needs_eager",
            "exact_resume",
        ),
        evidence="against paper",
        claim_verdict="in part",
        against=Against("worse", "1 random bit"),
        reason="11 times fewer bytes at no loss of accuracy, though noise is 1.16 of its law's in "
        "one layer (bar 1.15); 1 random bit, 2 with its mask, is as good in 0.79 of the bytes",
        run_on_gpu=True,
        tiny={"warmup": 2, "every": 2},
    )

    tolerance: PositiveFloat = 0.01
    every: PositiveInt = 1000
    warmup: PositiveInt = 50
    finest_bits: Annotated[int, Field(ge=2, le=24)] = 8
    coarsest: Annotated[float, Field(gt=0, le=1)] = 0.1

    def first_bound(self, largest: float) -> float:
        return largest * 2.0**-self.finest_bits

    def measures(self, update: int) -> bool:
        return update >= self.warmup and (update - self.warmup) % self.every == 0

    def next_bound(self, seen: Seen) -> float:
        allowed = self.tolerance * seen.momentum
        bound = math.sqrt(3) * allowed / (seen.gradient * math.sqrt(seen.nonzero))
        return min(max(bound, self.first_bound(seen.largest)), self.coarsest * seen.largest)

    def shares(self, element_bytes: int) -> SharesRange:
        bit, workspace = 1 / (8 * element_bytes), _WORKSPACE[element_bytes >= 4]

        def left(numbers: float) -> Shares:
            # A bit an element, a byte for 64 of them, and so many bits of numbers.
            return Shares(min(1.0, bit * (1.125 + numbers)), bit, *workspace, _PIECE)

        # Not even a bit where all are zeros. After a ReLU half of them are, and most others are far
        # from the largest; in half precision bins are narrower, as what comes back is rounded.
        typical = 0.5 * (self.finest_bits - (1.25 if element_bytes >= 4 else 0.25))
        return SharesRange(left(-1.0), left(typical), left(self.finest_bits))
