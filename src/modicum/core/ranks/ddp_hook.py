"""An exchange of matrices as the communication hook of PyTorch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from modicum.core.contracts.parameters import trainable
from modicum.core.errors import InputError
from modicum.core.ranks.matrix_exchange import MatrixExchange
from modicum.core.ranks.pending_sums import PendingSums
from modicum.core.ranks.sent_kinds import refuse_sparse

BucketAnswer = torch.futures.Future[Tensor]


class DDPHook:
    """Sums the gradients of a model in DistributedDataParallel by an exchange, as their mean.

    Every bucket's call is issued by the thread of the backward pass, in one order; sums are awaited
    when the last bucket has begun. An update counts as made when the next backward pass begins,
    unless its sums were not finite, or `discard` was called: then what is owed stays as it was.
    Checkpoints keep `views` of the exchange, each rank its own. `MatrixMethod.ddp_hook` makes one.

    Args:
        model: in DistributedDataParallel over all ranks, without a hook of its own. With
            `find_unused_parameters` those that only other ranks use count as zeros here; of those
            that no rank uses what is owed stays as it was.
        scaler: the `GradScaler` that multiplies the losses: what is owed follows its scale. Without
            it, what is owed of gradients of a changing scale would be in the old one.

    Raises:
        InputError: the model is not in DistributedDataParallel, or that is over some of the ranks,
            or the exchange has ranks of another number, or does not take a parameter; or another
            rank has another exchange, or trains other parameters.

    >>> from modicum.comm import PowerSGD
    >>> from modicum.core.ranks.ranks import joined
    >>> def example():                                  # in a script that torchrun starts
    ...     with joined() as ranks:
    ...         model = DistributedDataParallel(torch.nn.Linear(64, 64))
    ...         hook = PowerSGD(rank=4).ddp_hook(model)
    """

    def __init__(
        self,
        exchange: MatrixExchange,
        model: nn.Module,
        *,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            problem = "a hook is for a model in DistributedDataParallel"
            raise InputError(problem, value=type(model).__name__)
        if exchange.ranks.size != dist.get_world_size():
            raise InputError(
                "the exchange knows other ranks than the process group; bind it to all of them",
                value=exchange.ranks.size,
                allowed=str(dist.get_world_size()),
            )
        over = dist.get_process_group_ranks(model.process_group)
        if over != list(range(dist.get_world_size())):
            raise InputError(
                "the hook sums over all ranks, and the model's DistributedDataParallel is over "
                "some of them; give it neither process_group nor device_mesh",
                value=over,
                allowed="all ranks",
            )
        exchange.meet(model.module)
        exchange.check(trainable(model.module))
        self.exchange, exchange.means = exchange, True
        self._scaler, self._scale = scaler, 0.0  # 0: no update was seen yet
        self._names = {id(parameter): name for name, parameter in trainable(model.module)}
        # Of this update, its passes without sums included, as DDP counts them.
        self._used: set[str] = set()
        for name, parameter in trainable(model.module):
            parameter.register_hook(partial(_note_used, self._used, name))
        self._waiting: list[tuple[PendingSums, Any, BucketAnswer]] = []
        self._to_commit = False
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
        refuse_sparse([(", ".join(names), bucket.buffer())])
        gradients = dict(zip(names, _places(bucket), strict=True))
        answer: BucketAnswer = torch.futures.Future()
        self._waiting.append((self.exchange.begin(gradients, self._used), bucket, answer))
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
        if self._scaler is not None:
            scale = self._scaler.get_scale()
            if self._scale and scale != self._scale:
                self.exchange.rescale(scale / self._scale)
            self._scale = scale

    def _land(self) -> None:
        self.exchange.turn()
        waiting, self._waiting, self._to_commit = self._waiting, [], True
        self._used.clear()
        for pending, bucket, answer in waiting:
            for total, place in zip(pending.land().values(), _places(bucket), strict=True):
                if total is None:  # DDP gives such a parameter no gradient
                    place.zero_()
                else:
                    place.copy_(total.full() / self.exchange.ranks.size)
            # Sums are the same on all ranks, and so is what follows from them.
            self._to_commit &= bool(bucket.buffer().isfinite().all())
            answer.set_result(bucket.buffer())


def _places(bucket: dist.GradBucket) -> list[Tensor]:
    """The gradients of a bucket as they lie in it: in the order of a parameter without gaps.

    What DDP's own `gradients` gives is in the parameter's shape, and row by row whatever its order.
    """
    places = []
    for parameter, flat in zip(bucket.parameters(), bucket.gradients(), strict=True):
        strides = torch.empty_like(parameter, device="meta").stride()
        if strides == parameter.stride():
            flat = flat.as_strided(parameter.shape, strides, flat.storage_offset())
        places.append(flat)
    return places


def _note_used(used: set[str], name: str, gradient: Tensor | None) -> None:
    """Note that a parameter has a gradient; None, which functions may give, is none as for DDP.

    The model keeps this, also when its exchange is let go: so it refers to names alone.
    """
    if gradient is not None:
        used.add(name)
