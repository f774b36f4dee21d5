"""What FSDP2 calls instead of its own collectives: an exchange's, or its own under a clock.

On a CPU FSDP2 waits for each of its collectives where it asks for it, so that is where its time on
the wire is. On an accelerator they run on streams of their own, and are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import WIRE, Clock
from modicum.core.ranks.observed_calls import naming

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Newer versions of PyTorch warn of the older names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocating:
    """A wire whose buffers are ordinary ones."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to send from, or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class ExchangeWire(_Allocating):
    """Gathers a group's weights, or sums its gradients, by an exchange of ours.

    Args:
        run: makes the full output of the input.
    """

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        self._run = run

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Fill the output; it is there when this returns."""
        output_tensor.copy_(self._run(input_tensor).view(-1))


class CountedWire(_Allocating):
    """A collective of PyTorch's whose time counts as that of the wire.

    Args:
        call: it, with the arguments that FSDP2 gives.
        label: whose values travel.
    """

    def __init__(self, clock: Clock, call: Callable[..., Any], label: str = "") -> None:
        self._clock, self._call, self._label = clock, call, label

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **options: Any) -> Any:
        """Do as FSDP2 would."""
        with self._clock(WIRE), naming(self._label):
            return self._call(output_tensor, input_tensor, **options)


def let_count(modules: Iterable[tuple[str, FSDPModule]], clock: Clock) -> None:
    """Have FSDP2's collectives count as the wire's, where this PyTorch lets one in between.

    Args:
        modules: what is gathered by itself, each with its name.
    """
    for label, module in modules:
        if hasattr(module, "set_custom_all_gather"):
            gather, scatter = (
                CountedWire(clock, each, label) for each in (_gather, _reduce_scatter)
            )
            module.set_custom_all_gather(cast(Any, gather))
            module.set_custom_reduce_scatter(cast(Any, scatter))
