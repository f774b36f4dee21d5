"""The base of the layers that hold a linear map in a form of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import ParameterMetadata, describe_parameter
from modicum.core.random import normal_
from modicum.core.ranks.sharding import elements_before, own_part

# Of each tensor of a layer: how many rows it has, and the bytes of one.
StoredRows = tuple[tuple[int, int], ...]
# Of each tensor of a layer, by its name, the shape.
TensorShapes = Mapping[str, tuple[int, ...]]


class FormLayer(nn.Module):
    """y = x W^T + b, where W [out, in] is held in another form than as a matrix.

    A form says which tensors it has (`shapes`), how it computes (`forward`), which weight that is
    (`to_dense`) or why there is none (`why_not_dense`), and how a weight comes into it (`fitted`).
    Its arguments are keywords of `__init__` and of all that is said by shape, and `arguments` gives
    them back. Without more, the base makes its tensors, trained and with a row for what `dim` 0
    counts, and draws them.

    Attributes:
        trains: whether its tensors take gradients.
        exact: whether `write` and `to_dense` give back any weight, to the layer's dtype.
        begins_dense: whether a new layer is made of the weight that a dense one would begin with.
        projects: whether a layer that is made of the weight of another represents it too.
        bias: [out], or None.
    """

    trains: ClassVar[bool] = True
    exact: ClassVar[bool] = False
    begins_dense: ClassVar[bool] = False
    projects: ClassVar[bool] = True
    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, shape in self.shapes(in_features, out_features, **arguments).items():
            empty = torch.empty(shape, device=device, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty))
        for name, shape in self.indices(in_features, out_features, **arguments).items():
            zeros = torch.zeros(shape, dtype=torch.int32, device=device)
            self.register_buffer(name, zeros)
        for name, shape in self.resting(in_features, out_features, **arguments).items():
            self.register_buffer(name, torch.zeros(shape, device=device, dtype=dtype))
        offset = torch.empty(out_features, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if offset is None else nn.Parameter(offset))

    @property
    def constant_names(self) -> tuple[str, ...]:
        """The names of buffers that no forward or backward pass writes to: all that it has."""
        return tuple(self._buffers)

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of the parts of W to each of which `shift` can add a number."""
        return None

    @property
    def outputs_a_row(self) -> int:
        """Of a layer that `write` can fill, how many outputs share a row of its tensors.

        The last row may have fewer.
        """
        return 1

    @classmethod
    def shapes(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """Of the tensors that a file holds of the weight: the layer's own, by their names."""
        raise NotImplementedError(f"{cls.__name__} does not say what shapes its tensors have")

    @classmethod
    def indices(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """Of buffers of integers, int32, that files and checkpoints hold too, by name.

        `fitted` gives them. They are not trained, and every rank holds all of them.
        """
        return {}

    @classmethod
    def resting(cls, in_features: int, out_features: int, **arguments: Any) -> TensorShapes:
        """Of buffers in the layer's dtype that products read and no update trains, by name.

        As with `indices`, files and checkpoints hold them, and every rank all of them.
        """
        return {}

    @classmethod
    def learned(cls, in_features: int, out_features: int, **arguments: Any) -> int | None:
        """Elements for which the backward pass has a product; None: those that products read."""
        return None

    def describe(self, like: ParameterMetadata) -> None:
        """Say what its tensors are to optimizers, in place of a weight that is `like`."""
        for tensor in self.parameters():
            describe_parameter(tensor, like)

    @classmethod
    def why_not_dense(cls, **arguments: Any) -> str | None:
        """Why no dense weight computes what a layer with these arguments does; None: one does."""
        return None

    @classmethod
    def stored(
        cls, in_features: int, out_features: int, item_bytes: int, **arguments: Any
    ) -> StoredRows | None:
        """Rows of each tensor and the bytes of one, where those are not what `shapes` says."""
        return None

    @classmethod
    def workspace(
        cls,
        in_features: int,
        out_features: int,
        item_bytes: int,
        device: str = "cpu",
        **arguments: Any,
    ) -> int:
        """Bytes that a layer takes for as long as its product is computed."""
        return 0

    @classmethod
    def between(cls, in_features: int, out_features: int, **arguments: Any) -> int:
        """Elements a position that are kept between a layer's products."""
        return 0

    @classmethod
    def final(cls, in_features: int, out_features: int, **arguments: Any) -> int:
        """Elements of the tensors whose products come after all that is kept, for recomputation.

        Here those of the last tensor.
        """
        return math.prod(list(cls.shapes(in_features, out_features, **arguments).values())[-1])

    def arguments(self) -> dict[str, Any]:
        """Those that make another layer like this one."""
        return {}

    @classmethod
    def from_dense(cls, weight: Tensor, bias: Tensor | None = None, **arguments: Any) -> Self:
        """The layer that represents `weight` [out, in], as far as the form can.

        `bias` [out] is not copied.
        """
        outs, ins = weight.shape
        layer = cls(ins, outs, False, weight.device, weight.dtype, **arguments)
        layer.fit(weight)
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias))
        return layer

    @torch.no_grad()
    def fit(self, weight: Tensor) -> None:
        """Put what a weight [out, in] becomes into the layer; of a sharded one, this rank's rows.

        Every rank gives the full weight.
        """
        for name, value in self.fitted(weight).items():
            part, before = own_part(getattr(self, name))
            part.copy_(value[before : before + part.shape[0]])

    def fitted(self, weight: Tensor) -> Mapping[str, Tensor]:
        """The tensors of this layer that represent `weight` [out, in] best, by name."""
        raise NotImplementedError(f"{type(self).__name__} is made of no dense weight")

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [..., in] to [..., out]."""
        raise NotImplementedError

    def to_dense(self) -> Tensor:
        """The weight [out, in] that the tensors represent; where they are sharded, sharded too."""
        raise NotImplementedError(f"{type(self).__name__} does not say which weight it represents")

    def write(self, weight: Tensor) -> None:
        """Put another weight into the layer; a form that defines this can hold any."""
        raise NotImplementedError(f"{type(self).__name__} does not hold any weight")

    def shift(self, change: Tensor) -> Mapping[str, Tensor] | None:
        """The tensors that a change of W adds to without loss, by name, with their new values.

        Nothing is written. None: the form cannot take this change as it is.

        Args:
            change: [out, in], unsharded; of a layer that is sharded a rank gives its own rows.
        """
        return None

    def read_as(self, convolution: nn.Conv2d) -> None:
        """Read inputs as this convolution does, whose weight as a matrix the layer holds."""
        raise NotImplementedError(f"{type(self).__name__} is a linear layer")

    def frozen_tensors(self) -> tuple[Tensor, ...] | None:
        """What W is made of, where it takes no gradient and is made anew for each product."""
        return None

    def frozen_how(self) -> tuple[str, ...]:
        """What `frozen_weight` must know of this layer next to its tensors; words without colon."""
        return ()

    @classmethod
    def frozen_weight(
        cls, held: tuple[Tensor, ...], columns: int, dtype: torch.dtype, *how: str
    ) -> Tensor:
        """W [out, columns] in `dtype`, of what `frozen_tensors` and `frozen_how` gave."""
        raise NotImplementedError(f"{cls.__name__} has no tensors that are frozen")

    def initialise(self, *, std: float, seed: int, name: str) -> None:
        """Draw all tensors but the bias, so that W is on average as large as with entries of `std`.

        A function of seed, the layer's name and the place in the tensor, whoever holds it. A form
        that `begins_dense` is made of the weight that a dense layer of that name would be given,
        of which there is one at a time.
        """
        if self.begins_dense:
            like = next(self.parameters(recurse=False))
            weight = torch.empty(
                self.out_features, self.in_features, dtype=like.dtype, device=like.device
            )
            self.fit(normal_(weight, seed=seed, name=f"{name}.weight", std=std))
            return
        dense = self.in_features * self.out_features
        own = {n: p for n, p in self.named_parameters(recurse=False) if n != "bias"}
        each = std * math.sqrt(dense / sum(p.numel() for p in own.values()))
        self.draw(own, std=each, seed=seed, name=name)

    def draw(
        self, tensors: Mapping[str, nn.Parameter], *, std: float, seed: int, name: str
    ) -> None:
        """Fill this rank's part of each of these with normal numbers."""
        for leaf, parameter in tensors.items():
            before = elements_before(parameter)
            part = own_part(parameter)[0]
            normal_(part, seed=seed, name=f"{name}.{leaf}", std=std, offset=before)

    def extra_repr(self) -> str:
        """The sizes, as `nn.Linear` shows them."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        more = "".join(f", {name}={value}" for name, value in self.arguments().items())
        return f"{sizes}{more}, bias={self.bias is not None}"
