"""Bottlenecks behind a block, or behind or next to a module whose output is added to one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modicum.adapters.adapter_layer import AdapterLayer, LayerChange
from modicum.adapters.dropping import dropped


class SerialLayer(AdapterLayer):
    """y = z + s up(GELU(down(dropout(z)))), where z is what the module gives, [..., width].

    GELU is in its tanh form. In fp16 the parts are computed in fp32, as products of small factors
    would be zero there.

    Attributes:
        scale: s.
        parallel: whether `down` is given what the module reads instead.
    """

    @property
    def scale(self) -> float:
        return 1.0

    @property
    def parallel(self) -> bool:
        return False

    @abstractmethod
    def down(self, outputs: Tensor) -> Tensor:
        """[..., width] to [..., bottleneck], with a bias."""

    @abstractmethod
    def up(self, hidden: Tensor) -> Tensor:
        """[..., bottleneck] to [..., width], with a bias."""

    def forward(self, inputs: Tensor, base: Callable[[Tensor], Tensor]) -> Tensor:
        outputs = base(inputs)
        read = inputs if self.parallel else outputs
        kind = outputs.device.type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        if torch.float16 not in (outputs.dtype, autocast):
            return self._added(read, outputs)
        with torch.autocast(kind, enabled=False):
            return self._added(read.float(), outputs.float()).to(outputs.dtype)

    def _added(self, read: Tensor, outputs: Tensor) -> Tensor:
        probability = self.method.dropout
        hidden = self.down(dropped(read, probability) if self.training and probability else read)
        more = self.up(F.gelu(hidden, approximate="tanh"))
        return outputs.add(more, alpha=self.scale).to(outputs.dtype)

    def change(self, weight: Tensor, bias: Tensor | None) -> LayerChange | None:
        return None
