"""What hooks add up: a layer's inputs and the gradients of its outputs, over positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.torch_private import padding_of


@dataclass(frozen=True)
class Positions:
    """What `Sums` remembers of an input: its sum, how many positions, and which of them.

    Args:
        places: of a sample; 1 but for convolutions.
    """

    total: Tensor
    count: Tensor | int
    mask: Tensor | None
    stride: int
    places: int = 1


class Sums:
    """Sums over positions of one layer's inputs and output gradients, in a slice of a flat tensor.

    The slice is [sum of inputs (in) | positions | sum of output gradients (out)]; without room for
    the last they are left out. Positions are all leading dimensions; of a convolution they are
    samples and places, and an input is a patch, so that it lies as the weight's rows do. Sums are
    in the slice's precision, whatever the layer computes in.

    Args:
        module: the layer.
        sums: its slice.
        samples: of each batch, take every n-th sample (of dimension 0), so that at most so many
            are left; None for all. A first slice would be biased where batches are sorted.
        over_places: whether gradients are averaged over a convolution's places before they are
            summed over samples.
    """

    def __init__(
        self,
        module: nn.Module,
        sums: Tensor,
        samples: int | None = None,
        *,
        over_places: bool = False,
    ) -> None:
        weight = module._parameters["weight"]
        assert weight is not None
        self.module, self.sums, self.samples = module, sums, samples
        self.over_places = over_places
        self.in_features, self.features = math.prod(weight.shape[1:]), weight.ndim - 1

    def on_input(self, inputs: Tensor, mask: Tensor | None) -> Positions:
        """The input's sum over positions, and their count."""
        inputs = self._batched(inputs)
        stride = max(1, math.ceil(len(inputs) / self.samples)) if self.samples else 1
        mask = None if mask is None else self._fitting(mask.bool(), inputs)[::stride]
        inputs = inputs[::stride]
        leading = inputs.shape[: inputs.ndim - self.features]
        total, places = _sum(inputs, mask, range(len(leading)), self.sums.dtype), 1
        if isinstance(self.module, nn.Conv2d):
            patches = _patches(self.module, total)
            total, places = patches.sum(1), patches.shape[1]
        if mask is None:
            return Positions(total, math.prod(leading) * places, None, stride, places)
        each = math.prod(leading[mask.ndim :]) * places
        return Positions(total, mask.sum() * each, mask, stride, places)

    def on_output_gradient(self, gradient: Tensor, remembered: Positions) -> None:
        """Add the input's sum, its count, and the gradient's sum over the same positions."""
        width = self.in_features
        self.sums[:width] += remembered.total
        self.sums[width] += remembered.count
        if len(self.sums) > width + 1:
            gradient = self._batched(gradient)[:: remembered.stride]
            channel = 1 if isinstance(self.module, nn.Conv2d) else gradient.ndim - 1
            others = (dim for dim in range(gradient.ndim) if dim != channel)
            total = _sum(gradient, remembered.mask, others, self.sums.dtype)
            self.sums[width + 1 :] += total / remembered.places if self.over_places else total

    def _batched(self, tensor: Tensor) -> Tensor:
        """With a dimension for samples, where there is but one."""
        return tensor.unsqueeze(0) if tensor.ndim == self.features else tensor

    def _fitting(self, mask: Tensor, inputs: Tensor) -> Tensor:
        """The mask over the leading dimensions of the inputs.

        Raises:
            InputError: it fits none of them.
        """
        leading = inputs.shape[: inputs.ndim - self.features]
        if mask.shape == leading[: mask.ndim]:
            return mask
        if mask.numel() == math.prod(leading):  # positions in one row, or in another order of dims
            return mask.reshape(leading)
        raise InputError(
            f"a layer's input has the leading dimensions {tuple(leading)}; give a mask that fits "
            "them, or leave the layer out",
            field="mask",
            value=tuple(mask.shape),
        )


def _sum(values: Tensor, mask: Tensor | None, dims: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The sum over `dims`, of what the mask over the leading dimensions lets through."""
    if mask is not None:
        missing = values.ndim - mask.ndim
        # Filled, not multiplied: what stands at a padded place may be no number.
        values = values.masked_fill(~mask.reshape(mask.shape + (1,) * missing), 0)
    return values.sum(tuple(dims), dtype=dtype)


def _patches(module: nn.Conv2d, image: Tensor) -> Tensor:
    """What the kernel sees of an image [c, h, w] at each place: [c kh kw, places]."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(image.unsqueeze(0), padding_of(module), mode=mode)
    return F.unfold(padded, module.kernel_size, module.dilation, stride=module.stride)[0]
