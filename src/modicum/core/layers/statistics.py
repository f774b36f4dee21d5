"""What a calibration notes of linear layers y = W x: formulas over inputs and output gradients.

Inputs are [B, T, in] and output gradients [B, T, out], of B examples of T positions each. Products
are fp32 or wider whatever the model computes in, sums over examples and batches float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from modicum.core.contracts.ledger import ModelQuery
from modicum.core.errors import InputError
from modicum.core.files import publish_file

_COUNTS = "modicum.calibration"


@dataclass(frozen=True)
class Statistic:
    """A sum that is noted of a layer.

    Args:
        of: `of(inputs, output_gradients)`, the batch's part of the sum, float64.
        shape: of the sum, for a layer of so many input features.
        needs_gradients: whether it asks for output gradients, and so for a backward pass.
        by_position: whether it is a sum over positions; else over examples.
    """

    of: Callable[[Tensor, Tensor], Tensor]
    shape: Callable[[int], tuple[int, ...]]
    needs_gradients: bool
    by_position: bool


def fisher(inputs: Tensor, gradients: Tensor) -> Tensor:
    """The squared weight gradients of each example, summed over examples and output features: [in].

    An example's gradient is dW = sum_t delta_t x_t^T, so what is squared is a sum over its
    positions. No dW is formed where it is cheaper to go through G = delta delta^T [T, T]: the
    square sums of dW's columns are the diagonal of x^T G x.

    >>> x, delta = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[[1.0], [-1.0]]])
    >>> fisher(x, delta).item(), token_fisher(x, delta).item()  # positions that cancel
    (0.0, 2.0)
    """
    x, delta = _wide(inputs), _wide(gradients)
    positions, ins, outs = x.shape[1], x.shape[2], delta.shape[2]
    if positions * (ins + outs) <= ins * outs:
        rows = ((delta @ delta.mT @ x) * x).sum(dim=1).clamp_(min=0)  # rounding may go below 0
        return rows.double().sum(dim=0)
    total = x.new_zeros(ins, dtype=torch.float64)
    for one, its in zip(x, delta, strict=True):
        total += (its.mT @ one).square_().sum(dim=0).double()
    return total


def token_fisher(inputs: Tensor, gradients: Tensor) -> Tensor:
    """The same with every position as an example of its own: sum x_i^2 |delta|^2, [in].

    It leaves out how positions of an example add up or cancel, is exact for one position, and costs
    no more than reading the two tensors.
    """
    squares = _wide(gradients).square().sum(dim=2, keepdim=True)
    return (_wide(inputs).square() * squares).double().sum(dim=(0, 1))


def moment(inputs: Tensor, gradients: Tensor) -> Tensor:
    """The uncentred second moment of the inputs, sum x x^T over positions: [in, in]."""
    x = inputs.flatten(0, 1).double()
    return x.mT @ x


def square(inputs: Tensor, gradients: Tensor) -> Tensor:
    """The squares of the inputs, summed over positions: [in], the diagonal of `moment`."""
    return _wide(inputs).square().double().sum(dim=(0, 1))


def noting_bytes(in_features: int, out_features: int, shape: ModelQuery) -> int:
    """Bytes in which a layer's inputs and gradients of a batch become part of any statistic.

    Both are joined over the layer's calls, made fp32, and multiplied into two more of the inputs'
    shape; each example has a matrix over its positions.
    """
    item = shape.weight_bytes
    copies = item + (4 if item < 4 else 0)
    each = copies * (in_features + out_features) + 8 * in_features + 4 * shape.tokens
    return shape.positions * each


STATISTICS: dict[str, Statistic] = {
    "fisher": Statistic(fisher, lambda ins: (ins,), needs_gradients=True, by_position=False),
    "token_fisher": Statistic(
        token_fisher, lambda ins: (ins,), needs_gradients=True, by_position=False
    ),
    "moment": Statistic(moment, lambda ins: (ins, ins), needs_gradients=False, by_position=True),
    "square": Statistic(square, lambda ins: (ins,), needs_gradients=False, by_position=True),
}


def statistic(name: str) -> Statistic:
    """The statistic of that name.

    Raises:
        InputError: there is none.
    """
    if name not in STATISTICS:
        raise InputError(
            "no statistic of a layer has this name",
            field="statistics",
            value=name,
            allowed=", ".join(STATISTICS),
            candidates=STATISTICS,
        )
    return STATISTICS[name]


@dataclass(frozen=True)
class Calibration:
    """What a pass over data found.

    Args:
        sums: float64 on the CPU by (statistic, layer), over all examples of all ranks.
        examples: how many were seen.
        positions: how many positions (tokens) each layer saw, without what was masked.
    """

    sums: Mapping[tuple[str, str], Tensor]
    examples: int
    positions: Mapping[str, int]

    def mean(self, name: str, layer: str) -> Tensor:
        """A layer's statistic over what it counts: examples for Fisher, positions for moments.

        Raises:
            InputError: the pass did not note this statistic of this layer.
        """
        if (name, layer) not in self.sums:
            known = sorted({kind for kind, _ in self.sums})
            raise InputError(
                f"the calibration did not note the {name} of this layer; calibrate again with both",
                value=layer,
                allowed=f"{', '.join(known)} of {', '.join(self.positions)}",
                candidates=self.positions,
            )
        counted = self.positions[layer] if statistic(name).by_position else self.examples
        return self.sums[name, layer] / counted

    def save(self, file: str | Path) -> Path:
        """Write one safetensors file atomically.

        Raises:
            InputError: the disk is full or cannot be written.
        """
        file = Path(file)
        counts = {"examples": self.examples, "positions": dict(self.positions)}
        tensors = {f"{name}/{layer}": total for (name, layer), total in self.sums.items()}
        with publish_file(file) as temporary:
            save_file(tensors, temporary, metadata={_COUNTS: json.dumps(counts)})
        return file

    @classmethod
    def load(cls, file: str | Path) -> Calibration:
        """Read what `save` wrote.

        Raises:
            InputError: there is no such file, or it is no calibration.
        """
        if not Path(file).is_file():
            raise InputError("there is no such file", file=file)
        try:
            with safe_open(file, framework="pt") as opened:
                counts = json.loads(opened.metadata()[_COUNTS])
                named = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, TypeError, ValueError):
            raise InputError("this file holds no calibration", file=file) from None
        sums = {(key.partition("/")[0], key.partition("/")[2]): named[key] for key in named}
        return cls(sums, counts["examples"], counts["positions"])


def by_example(tensor: Tensor, examples: int, layer: str) -> Tensor:
    """A layer's input or output as [B, T, features], of B `examples`.

    Models may fold positions into dimension 0, row after row, as long as B divides it.

    Raises:
        InputError: B does not.
    """
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    if rows % examples:
        raise InputError(
            f"this layer sees {rows} rows in a batch of {examples} examples, so which row is whose "
            "is not known; leave the layer out",
            field="layers",
            value=layer,
        )
    return tensor.reshape(examples, -1, tensor.shape[-1])


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
