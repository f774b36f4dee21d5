"""Ordered factors of a convolution: one to as many channels as there are components, and a 1x1."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from modicum.linears.ordered import OrderedLinear


class OrderedConv2d(OrderedLinear):
    """A convolution by the matrix up^T down, W [out, in * kernel places], components in order.

    Two convolutions: by `down` as kernels, with the stride, padding and dilation of the one that it
    replaces, then by `up` at each place. It has one group, and pads with zeros.

    Attributes:
        down: [r, in * height * width of the kernel].
        up: [r, out].
        kernel: its height and width.

    >>> import torch
    >>> convolution = nn.Conv2d(3, 4, 3, padding=1)
    >>> layer = OrderedConv2d.of(convolution, rank=4)
    >>> images = torch.ones(2, 3, 5, 5)
    >>> torch.allclose(layer(images), convolution(images), atol=1e-5)
    True
    """

    kernel: tuple[int, ...] = (1, 1)
    _how: dict[str, Any]

    @classmethod
    def of(cls, convolution: nn.Conv2d, rank: int) -> OrderedConv2d:
        """The layer that represents a convolution, as far as its rank can; it shares the bias."""
        bias = None if convolution.bias is None else convolution.bias.detach()
        layer = cls.from_dense(convolution.weight.detach().flatten(1), bias, rank=rank)
        layer.read_as(convolution)
        return layer

    def read_as(self, convolution: nn.Conv2d) -> None:
        """Read inputs as this convolution does."""
        self.kernel = convolution.kernel_size
        names = "stride", "padding", "dilation"
        self._how = {name: getattr(convolution, name) for name in names}

    def forward(self, inputs: Tensor) -> Tensor:
        """Map images [..., in, H, W] to [..., out, H', W']; with no component left, to the bias."""
        down, up = self.prefix()
        if not len(down):  # a convolution has a channel
            down, up = self.down[:1] * 0, self.up[:1]
        kernels = down.unflatten(1, (-1, *self.kernel))
        thin = F.conv2d(inputs, kernels, None, **self._how)
        return F.conv2d(thin, up.mT[:, :, None, None], self.bias)
