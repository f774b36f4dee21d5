"""An exchange of matrices as the communication hook of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.matrix_exchange import MatrixExchange, PendingSums

BucketAnswer = torch.futures.Future[Tensor]


class DDPHook:
    """Sums the gradients of a model in DistributedDataParallel by an exchange, as their mean.

    Every bucket's call is issued by the thread of the backward pass, in one order; sums are awaited
    when the last bucket has begun. An update counts as made when the next backward pass begins,
    unless its sums were not finite, or `discard` was called: then what is owed stays as it was.
    Checkpoints keep `views` of the exchange, each rank its own. `MatrixMethod.ddp_hook` makes one.

    Args:
        model: in DistributedDataParallel, without a hook of its own. Parameters that take no part
            in a backward pass count as zeros, as DDP has them.

    Raises:
        InputError: the model is not in DistributedDataParallel, or has ranks of another number.

    >>> from modicum.comm import PowerSGD
    >>> from modicum.core.ranks.ranks import joined
    >>> def example():                                  # in a script that torchrun starts
    ...     with joined() as ranks:
    ...         model = DistributedDataParallel(torch.nn.Linear(64, 64))
    ...         hook = PowerSGD(rank=4).ddp_hook(model)
    """

    def __init__(self, exchange: MatrixExchange, model: nn.Module) -> None:
        if not isinstance(model, DistributedDataParallel):
            problem = "a hook is for a model in DistributedDataParallel"
            raise InputError(problem, value=type(model).__name__)
        if exchange.ranks.size != dist.get_world_size():
            raise InputError(
                "the exchange knows other ranks than the process group; bind it to all of them",
                value=exchange.ranks.size,
                allowed=str(dist.get_world_size()),
            )
        self.exchange = exchange
        self._names = {id(parameter): name for name, parameter in trainable(model.module)}
        self._waiting: list[tuple[PendingSums, Any, BucketAnswer]] = []
        self._to_commit = False
        exchange.connect()
        model.register_comm_hook(None, self._hook())

    def discard(self) -> None:
        """The last update was not made: call it where an optimizer's step is passed over."""
        self.exchange.discard()
        self._to_commit = False

    def _hook(self) -> Callable[[Any, Any], BucketAnswer]:
        # DDP reads the annotations of what it is given.
        def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            return self._sent(bucket)

        hook.__annotations__ = {"bucket": dist.GradBucket, "return": BucketAnswer}
        return hook

    def _sent(self, bucket: dist.GradBucket) -> BucketAnswer:
        if not self._waiting:
            self.settle()
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        answer: BucketAnswer = torch.futures.Future()
        self._waiting.append((self.exchange.begin(gradients, names), bucket, answer))
        if bucket.is_last():
            self._land()
        return answer

    def settle(self) -> None:
        """Commit the last update, if it was one: before a checkpoint is saved."""
        if self._to_commit:
            self.exchange.commit()
        else:
            self.exchange.discard()
        self._to_commit = False

    def _land(self) -> None:
        self.exchange.turn()
        waiting, self._waiting, self._to_commit = self._waiting, [], True
        for pending, bucket, answer in waiting:
            for total, place in zip(pending.land().values(), bucket.gradients(), strict=True):
                assert total is not None
                place.copy_(total.full() / self.exchange.ranks.size)
            # Sums are the same on all ranks, and so is what follows from them.
            self._to_commit &= bool(bucket.buffer().isfinite().all())
            answer.set_result(bucket.buffer())
