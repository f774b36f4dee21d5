"""What FSDP2 calls instead of its own collectives: an exchange's, our sums, gathers under a clock.

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
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.observed_calls import naming
from modicum.core.ranks.ranks import Ranks

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

# Newer versions of PyTorch warn of the older name.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


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


class SummingWire(_Allocating):
    """Sums of gradients by our own reduce-scatter, in the group that FSDP2 names.

    gloo's is an all-reduce inside, which sends twice as much as it must, and more.

    Args:
        clock: counts its time as that of the wire.
        engine_of: the engine of a process group.
        label: whose gradients travel.
    """

    def __init__(
        self, clock: Clock, engine_of: Callable[[Any], Collectives], label: str = ""
    ) -> None:
        self._clock, self._engine_of, self._label = clock, engine_of, label

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        """Fill the output; it is there when this returns."""
        assert op == dist.ReduceOp.SUM, f"FSDP2 asks for {op}"
        with self._clock(WIRE):
            engine = self._engine_of(group)
            summed = engine.reduce_scatter(input_tensor.view(-1), label=self._label).wait()
            output_tensor.copy_(summed)


def let_count(modules: Iterable[tuple[str, FSDPModule]], ranks: Ranks) -> list[Collectives]:
    """Have FSDP2's gathers count as the wire's, and its sums go by our engine, on a CPU.

    Args:
        modules: what is gathered by itself, each with its name.
        ranks: this process among the others.

    Returns:
        The engines, one for each group as it is first used; none where this PyTorch lets nobody in
        between.
    """
    engines: list[Collectives] = []
    groups: dict[int, Collectives] = {}

    def engine_of(group: Any) -> Collectives:
        if id(group) not in groups:
            groups[id(group)] = Collectives(ranks, group=group)
            engines.append(groups[id(group)])
        return groups[id(group)]

    modules = list(modules)
    let_count_gathers(modules, ranks)
    for label, module in modules:
        if hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(cast(Any, SummingWire(ranks.clock, engine_of, label)))
    return engines


def let_count_gathers(modules: Iterable[tuple[str, FSDPModule]], ranks: Ranks) -> None:
    """Have FSDP2's gathers count as the wire's, on a CPU, where this PyTorch lets us."""
    for label, module in modules:
        if hasattr(module, "set_custom_all_gather"):
            module.set_custom_all_gather(cast(Any, CountedWire(ranks.clock, _gather, label)))
