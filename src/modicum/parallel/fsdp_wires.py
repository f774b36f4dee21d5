"""What FSDP2 calls instead of its own collectives: an exchange's, or our engines'.

On a CPU FSDP2 waits for each of its collectives where it asks for it. So there its gathers and sums
go by engines of ours, which travel while blocks compute. On an accelerator they run on streams of
their own, and are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from modicum.core.clock import WIRE, Clock
from modicum.core.ranks.call_queue import CollectiveHandle
from modicum.core.ranks.collectives import Collectives
from modicum.core.ranks.ranks import Ranks
from modicum.core.torch_private import gather_early
from modicum.parallel.laid_aside import LaidAside

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class OrdinaryBuffers:
    """A wire whose buffers are ordinary ones."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer to send from, or to receive into."""
        return torch.empty(*size, dtype=dtype, device=device)


class SumOnTheWire:
    """The sum that FSDP2 asked for last, which lands when the next one is asked for, or later.

    FSDP2 takes what it is given as the sharded gradients without looking at it, so on a CPU a sum
    may come while the next block's backward pass runs. More than one would keep full gradients of
    more than one block.

    Args:
        aside: where gradients are until the sum that they are added to has landed.

    Attributes:
        waits: whether every sum lands where it is asked for, as somebody uses it there.
    """

    def __init__(self, aside: LaidAside) -> None:
        self.waits, self._aside = True, aside
        self._pending: tuple[str, Tensor, Callable[[], Tensor]] | None = None

    def put(self, label: str, output: Tensor, pending: Callable[[], Tensor]) -> None:
        """Have `output` filled by what `pending` waits for; the one before must have landed."""
        assert self._pending is None, "the sum before is still on the wire"
        if self.waits:
            output.copy_(pending())
        else:
            self._aside.lay(label)
            self._pending = label, output, pending

    def land(self) -> None:
        """Wait for the sum that is on the wire, if one is."""
        if self._pending is None:
            return
        label, output, pending = self._pending
        self._pending = None
        output.copy_(pending())
        self._aside.add(label)


class ExchangeWire(OrdinaryBuffers):
    """Gathers a group's weights by an exchange of ours.

    Args:
        run: makes the full output of the input.
    """

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        self._run = run

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, **_: Any) -> None:
        """Fill the output; it is there when this returns."""
        output_tensor.copy_(self._run(input_tensor).view(-1))


class Engines:
    """An engine for each process group of FSDP2's, as it is first used."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._found = ranks, dict[int, Collectives]()

    def __call__(self, group: Any) -> Collectives:
        """The engine of a group."""
        if id(group) not in self._found:
            self._found[id(group)] = Collectives(self._ranks, group=group)
        return self._found[id(group)]

    def __iter__(self) -> Iterator[Collectives]:
        return iter(self._found.values())


class _Gathering(dist.Work):
    """A gather of an engine's, as PyTorch waits for one."""

    def __init__(self, handle: CollectiveHandle) -> None:
        super().__init__()
        self._handle = handle

    def wait(self, timeout: Any = None) -> bool:
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        return self._handle.done


class GatheringWire(OrdinaryBuffers):
    """Gathers a group's weights by the engine of its process group.

    Args:
        label: whose values travel.
    """

    def __init__(self, engines: Engines, label: str) -> None:
        self._engines, self._label = engines, label

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Fill the output: when this returns, or when it has been waited for."""
        engine = self._engines(group)
        handle = engine.all_gather(input_tensor.view(-1), output_tensor, label=self._label)
        if async_op:
            return _Gathering(handle)
        handle.wait()
        return None


class SummingWire(OrdinaryBuffers):
    """Sums of gradients by a reduce-scatter of ours.

    gloo's is an all-reduce inside, which sends twice as much as it must, and more.

    Args:
        clock: counts what it waits as that of the wire.
        begin: begins to sum a buffer over the ranks of a process group.
        last: where a sum is until it lands.
        label: whose gradients travel.
    """

    def __init__(
        self,
        clock: Clock,
        begin: Callable[[Tensor, Any], Callable[[], Tensor]],
        last: SumOnTheWire,
        label: str,
    ) -> None:
        self._clock, self._begin, self._last, self._label = clock, begin, last, label

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, **_: Any
    ) -> None:
        """Begin to sum; the output is filled when the sum lands."""
        assert op == dist.ReduceOp.SUM, f"FSDP2 asks for {op}"
        with self._clock(WIRE):
            self._last.land()
            self._last.put(self._label, output_tensor, self._begin(input_tensor, group))


def calls_travel() -> bool:
    """Whether this PyTorch lets FSDP2's calls on a CPU travel while blocks compute."""
    from torch.distributed.fsdp import FSDPModule

    needed = ("set_custom_all_gather", "set_custom_reduce_scatter", "_set_unshard_async_op")
    return all(hasattr(FSDPModule, name) for name in needed)


def let_sum(
    modules: Iterable[tuple[str, FSDPModule]], engines: Engines, ranks: Ranks, last: SumOnTheWire
) -> None:
    """Have FSDP2's sums go by our engines, on a CPU, where this PyTorch lets us.

    Args:
        modules: what is gathered by itself, each with its name.
        last: where a sum is until it lands.
    """

    def begin(label: str, buffer: Tensor, group: Any) -> Callable[[], Tensor]:
        return engines(group).reduce_scatter(buffer.view(-1), label=label).wait

    for label, module in modules:
        if hasattr(module, "set_custom_reduce_scatter"):
            wire = SummingWire(ranks.clock, partial(begin, label), last, label)
            module.set_custom_reduce_scatter(cast(Any, wire))


def let_gather(modules: Iterable[tuple[str, FSDPModule]], engines: Engines) -> None:
    """Have FSDP2's gathers go by our engines, on a CPU, where this PyTorch lets us.

    What is next is gathered while one computes: in the forward pass as the order of the modules
    says, in the backward pass as FSDP2 has seen it.

    Args:
        modules: what is gathered by itself, each with its name; in the order of their use.
    """
    modules = list(modules)
    for place, (label, module) in enumerate(modules):
        if not hasattr(module, "set_custom_all_gather"):
            continue
        module.set_custom_all_gather(cast(Any, GatheringWire(engines, label)))
        if gather_early(module):
            module.set_modules_to_forward_prefetch([m for _, m in modules[place + 1 : place + 2]])
