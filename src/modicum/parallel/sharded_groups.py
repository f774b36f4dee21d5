"""What FSDP2 gathers at once: its parameters, and a copy of them that an exchange refreshes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.ranks.exchange import ShardExchange
from modicum.core.ranks.observed_calls import label_of, naming
from modicum.core.ranks.sharding import whole
from modicum.parallel.buffer_rows import BufferRows, laid_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


class CopiedGroup:
    """What FSDP2 gathers at once, and the copy of it that every rank holds.

    Args:
        shapes: of its parameters by name, in FSDP2's order.
    """

    def __init__(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], exchange: ShardExchange
    ) -> None:
        self.name, self.exchange = name, exchange
        self._names, self._rows = list(shapes), BufferRows(shapes.values(), exchange.ranks.size)
        self.label = label_of(self._names)
        self.copy: Tensor | None = None
        self.stale = False

    def gather(self, shard: Tensor) -> Tensor:
        """The copy [W, n], brought to this rank's row [n] of the weights, and the others', if new.

        The first time they are sent as they are.
        """
        with naming(self.label):
            if self.copy is None:
                assert len(shard) == self._rows.width, f"FSDP2 orders {self.name} in another way"
                self.copy = shard.new_empty(self._rows.shards, self._rows.width)
                self.exchange.spread(self.copy, shard)()
            elif self.stale:
                self.exchange.refresh(self.copy, shard, self.name)()
        self.stale = False
        return self.copy

    def read(self, mesh: DeviceMesh) -> dict[str, Any]:
        """The copy by parameter, of which each rank gives the rows that it owns."""
        if self.copy is None:
            return {}
        rank = self.exchange.ranks.rank
        return {
            f"copy/{name}": laid_out(
                self._rows.part(self.copy[rank], index, rank), self._rows.shapes[index], mesh
            )
            for index, name in enumerate(self._names)
        }

    def write(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take the copy up, if there is one."""
        self.copy, self.stale = None, self.name in state.get("stale", ())
        if f"copy/{self._names[0]}" not in state:
            return
        for index, name in enumerate(self._names):
            value = whole(state[f"copy/{name}"])
            if self.copy is None:
                size = self._rows.shards, self._rows.width
                self.copy = torch.zeros(size, dtype=value.dtype, device=device)
            self._rows.put(self.copy, index, value)


def shapes_of_groups(
    model: nn.Module, modules: Iterable[FSDPModule]
) -> Iterator[tuple[FSDPModule, dict[str, tuple[int, ...]]]]:
    """What is gathered at once, with the shapes of its parameters by name, in FSDP2's order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in modules:
        if not hasattr(module, "set_custom_all_gather"):
            raise InputError("an exchange on FSDP2 needs a newer PyTorch", value=torch.__version__)
        shapes = {names[id(p)]: tuple(p.shape) for p in own_parameters(cast(nn.Module, module))}
        if shapes:
            yield module, shapes


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that FSDP2 gathers with a module, in its order: those of what is in it first.

    What is in a module that is gathered by itself is left out; a shared parameter comes twice.
    """
    from torch.distributed.fsdp import FSDPModule

    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from own_parameters(child)
    yield from module.parameters(recurse=False)
