"""The product of a layer whose weight has patches: they stand in it while it is used, no longer.

A patch is places of the weight and what is added there. It is written in before a product and what
was there is put back after it, forward and backward: to the bit, whatever fails in between. So the
base is the plain one for all who look at it, whatever loop trains, and where FSDP2 gathers weights
anew for the backward pass, the patch is in them again. A weight that stays patched is what merging
is for. Threads must not run one layer at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.base_weights import at_least_fp32
from modicum.adapters.patch_places import Places
from modicum.core.layers.computing_with import computing_with
from modicum.core.torch_private import transforms_run


@contextmanager
def written(stored: Tensor, places: Sequence[Places], values: Sequence[Tensor]) -> Iterator[None]:
    """Patches stand in a weight, in here; where several have an entry, their values add up.

    Args:
        stored: the full weight, as its layer stores it.
        values: of each patch, in the shape of its places. They are added in at least fp32, and the
            sum is rounded to the weight's dtype once.
    """
    # What autograd has kept of the weight is right again when this is left, so nothing is said to
    # it of the change.
    data = stored.data
    spots = [place.spot(data) for place in places]
    before = [spot.read() for spot in spots]
    try:
        for number, spot in enumerate(spots):
            spot.write(_total(number, before[number], places, values))
        yield
    finally:
        for spot, original in zip(spots, before, strict=True):
            spot.write(original)


def _total(
    number: int, original: Tensor, places: Sequence[Places], values: Sequence[Tensor]
) -> Tensor:
    """What stands at the entries of one of several patches: the same in each that has an entry."""
    total = at_least_fp32(original)
    for other, (place, value) in enumerate(zip(places, values, strict=True)):
        same = other == number
        total = total + (value if same else place.at(value, *places[number].rows_and_columns()))
    return total


@dataclass(frozen=True)
class Patched:
    """A layer with patches, as one product: `run` is the layer's own forward."""

    layer: nn.Module
    run: Callable[[Tensor], Tensor]
    places: tuple[Places, ...]

    def __call__(self, inputs: Tensor, values: Sequence[Tensor]) -> Tensor:
        """The layer's output with patches of these values: they, inputs and bias get gradients."""
        if transforms_run():
            # They want plain operations, and never a weight that changes in place.
            with computing_with(self.layer, {"weight": self.dense(values)}):
                return self.run(inputs)
        bias = self.layer._parameters.get("bias")
        outputs: Tensor = _Product.apply(inputs, bias, self, *values)
        return outputs

    def written(self, values: Sequence[Tensor]) -> Any:
        """The patches stand in the layer's weight, in the `with` block."""
        return written(self.layer.get_parameter("weight"), self.places, values)

    def dense(self, values: Sequence[Tensor]) -> Tensor:
        """The patched weight as a tensor of its own, stored as the layer's; it has gradients."""
        weight = self.layer.get_parameter("weight")
        total = at_least_fp32(weight)
        for place, value in zip(self.places, values, strict=True):
            first, second = place.rows_and_columns()
            index = (second, first) if place.site.transposed else (first, second)
            total = total.index_put(index, value.to(total.dtype), accumulate=True)
        return total.to(weight.dtype)


class _Product(torch.autograd.Function):
    """Keeps of the inputs what gradients need, and the values, which have not changed by then."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, bias: Tensor | None, patched: Patched, *values: Tensor
    ) -> Tensor:
        with patched.written(values):
            outputs = patched.run(inputs)
        needed = ctx.needs_input_grad[3:]
        dense = inputs.to(outputs.dtype)
        kept = [p.kept(dense) for p, need in zip(patched.places, needed, strict=True) if need]
        ctx.patched, ctx.dtype = patched, inputs.dtype
        ctx.twice = all(tensor is inputs for tensor in kept)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(*values, *kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, outgoing: Tensor) -> tuple[Tensor | None, ...]:
        patched: Patched = ctx.patched
        saved, count = list(ctx.saved_tensors), len(patched.places)
        values, kept = saved[:count], saved[count:]
        rows = outgoing.reshape(-1, outgoing.shape[-1])
        graph = torch.is_grad_enabled()
        if graph and not ctx.twice:
            raise RuntimeError("a patch of columns, or under autocast, has no second derivatives")
        of_inputs = of_bias = None
        if ctx.needs_input_grad[0]:
            with nullcontext() if graph else patched.written(values):
                weight = patched.layer.get_parameter("weight").detach()
                weight = (patched.dense(values) if graph else weight).to(rows.dtype)
                oriented = weight.T if patched.places[0].site.transposed else weight
                of_inputs = (
                    (rows @ oriented).view(*outgoing.shape[:-1], oriented.shape[1]).to(ctx.dtype)
                )
        if ctx.needs_input_grad[1]:
            of_bias = rows.sum(0).to(ctx.bias_dtype)
        of_values = list[Tensor | None]()
        for place, value, need in zip(
            patched.places, values, ctx.needs_input_grad[3:], strict=True
        ):
            inputs = kept.pop(0) if need else None
            if inputs is None:
                of_values.append(None)
            else:
                found = place.gradient(rows, inputs.reshape(-1, inputs.shape[-1]))
                of_values.append(found.to(value.dtype))
        return (of_inputs, of_bias, None, *of_values)
