"""Data parallelism with weights, gradients and optimizer state cut over ranks: PyTorch's FSDP2.

Blocks gather their weights when they compute; gradients are summed and cut in one exchange. With
several replicas of the shards (hybrid sharding) that sum is then added up over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from modicum.core.layout import Layout
from modicum.core.ranks import Ranks
from modicum.core.strategy import Strategy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class Sharded(Strategy):
    """Every rank holds a part of each parameter, `layout.shards` of them a whole.

    Args:
        reshard_after_forward: whether a block gives its gathered weights back before its backward
            pass and gathers them again; if not, memory is taken for time.

    Source: Zhao et al., "PyTorch FSDP", VLDB 2023 (arXiv 2304.11277); `fully_shard`.
    """

    def __init__(self, ranks: Ranks, layout: Layout, reshard_after_forward: bool = True) -> None:
        super().__init__(ranks, layout)
        self.reshard_after_forward = reshard_after_forward

    def cut(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        device: torch.device,
        methods: Iterable[str] = (),
    ) -> None:
        """Cut every parameter along dimension 0; the model itself holds what no block does."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = self.layout.mesh(device.type)
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=self.reshard_after_forward)
        # What is used first and last stays gathered from the forward to the backward pass.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        for module in _sharded_modules(model):
            module.set_gradient_divide_factor(1.0)
            # Else a factor is applied to the gradients before they are summed.
            module.set_force_sum_reduction_for_comms(True)
        for name in methods:
            register_fsdp_forward_method(model, name)

    def rest(self, model: nn.Module) -> None:
        """Give gathered weights back, so that parameters are the sharded ones again."""
        for module in _sharded_modules(model):
            module.reshard()


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
