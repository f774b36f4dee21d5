"""A process group in Python, by which calls from C++ reach methods that are recorded.

C++ finds a group's methods past its class, where nothing can be put in their place. So it is given
another group, which forwards to the one that it would have used.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch.distributed as dist

# What C++ calls: DDP's reducer and its start, and functional collectives, by the names of several
# versions of torch.
FORWARDED = (
    *("allreduce", "allreduce_coalesced", "broadcast", "allgather", "barrier"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("_allgather_base", "all_gather_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall_base", "all_to_all_single"),
)


class ForwardingGroup(dist.ProcessGroup):
    """A group that does what another one does; it does not keep that one alive."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = ref(group)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The backend's, of the group behind."""
        return str(self._behind.name())

    @property
    def _behind(self) -> Any:
        return self._group()

    def _forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self._behind, name)(*arguments)


for _name in FORWARDED:

    def _forwarded(self: ForwardingGroup, *arguments: Any, _name: str = _name) -> Any:
        return self._forward(_name, *arguments)

    if hasattr(dist.ProcessGroup, _name):
        setattr(ForwardingGroup, _name, _forwarded)
