"""DeAR: an all-reduce split in two, one half behind the backward, one behind the next forward."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from modicum.comm.base import Schedule, ScheduleQuery
from modicum.comm.deferred import IN_FLIGHT, Deferred
from modicum.comm.fusion import fuse, padded
from modicum.core.contracts.ledger import Entry, Ledger, Phase, Wire
from modicum.core.contracts.method import Against, Info, PositiveInt
from modicum.core.errors import InputError
from modicum.core.ranks.layout import REPLICATE, Layout
from modicum.core.ranks.pretended_link import Link
from modicum.core.ranks.ranks import Ranks


class DeAR(Schedule):
    """Reduce-scatter gradients during the backward pass, all-gather them during the next forward.

    A gradient's sum is needed only when its weight is used again. So the update of a weight is
    deferred until just before the module that holds it runs in the next forward pass, and the
    gathering of sums, group by group in forward order, hides behind that pass. Bytes and weights
    are those of plain data parallelism: nothing is approximate or late. Prefer it where an
    all-reduce takes longer than a backward pass, and not many times as long: with equal layers, a
    backward of twice the forward's time F and an all-reduce of A, an update takes max(F, A/2) +
    max(2F, A/2) in place of F + max(2F, A), at best 1.25 times less (A = 4F).

    Weights must be read by a module that holds them, or one around it, and by others only after
    `flush`; a stale weight that gets a gradient is an error. The optimizer's rule must look at one
    parameter at a time. Sums are made in the order of the ranks, so groups of any size give the
    same weights to the bit (on NCCL with more than two ranks, the order is NCCL's).
    Unlike the authors' code, the last update is not lost (`flush`), parameters without a gradient
    are left alone, and all groups' gatherings are queued at once, where theirs asks for one when
    the one before has arrived, which leaves the link idle while a long layer computes. Not for use
    inside `torch.compile`d modules, nor under `transformers.Trainer`, which wraps the model in
    PyTorch's DistributedDataParallel.

    Args:
        bucket_bytes: a group of layers is closed when its gradients have at least so many bytes.
        layers: close it after so many layers instead.
        tune: look for the best `bucket_bytes` in the first 55 updates, by Bayesian optimization.
            Tuning begins anew when a run is resumed. It needs the extra `tuning`, which is Optuna.

    Source: Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained
    All-Reduce Pipelining", ICDCS 2023, arXiv 2302.12445; defaults as in the authors' code.

    >>> import torch
    >>> from modicum.comm import DeAR
    >>> from modicum.core.ranks.ranks import joined
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> with joined():  # the ranks that torchrun has started
    ...     handle = DeAR(layers=1).wrap(model, optimizer)
    ...     for _ in range(10):
    ...         inputs = torch.randn(16, 8)
    ...         handle.backward((model(inputs) - inputs.sum(1, keepdim=True)).square().mean())
    ...         _ = handle.step(clip_norm=1.0)
    ...     handle.flush()  # before weights are read
    """

    info = Info(
        name="dear",
        title="DeAR: all-reduce split in two, hidden behind backward and forward",
        room="comm",
        paper="DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce "
        "Pipelining, arXiv 2302.12445",
        claim="up to 83% faster than the best of Horovod, PyTorch-DDP, MG-WFBP and ByteScheduler "
        "on 64 GPUs with 10 Gb/s Ethernet, without any change of the result",
        traits=(
            "crosses_wire",
            "defers_update",
            "needs_eager",
            "needs_whole_gradients",
            "exact_resume",
        ),
        evidence="verified against code",
        claim_verdict="in part",
        against=Against("equal", "PyTorch's DDP"),
        reason="the same weights; four sleeping ranks at 100 Mb/s: 1.1498 times DDP's speed (bar "
        "1.15), 0.95 where an all-reduce takes two forward passes; at 200 Mb/s as fast; two "
        "computing ranks on two cores: 0.94 to 1.10",
        tiny={"bucket_bytes": 20000},
    )

    bucket_bytes: PositiveInt = 25_000_000
    layers: PositiveInt | None = None
    tune: bool = False

    @model_validator(mode="after")
    def _one_size(self) -> DeAR:
        if self.tune and self.layers is not None:
            problem = "layers fixes the size that tune looks for; leave one of them out"
            raise InputError(problem, field="layers", value=self.layers)
        return self

    def strategy(
        self,
        ranks: Ranks,
        layout: Layout,
        *,
        reduction: Literal["sum", "mean"] = "sum",
        link: Link | None = None,
    ) -> Deferred:
        """Replicas whose updates are deferred into the next forward pass.

        Raises:
            InputError: weights are sharded.
        """
        if layout.shards > 1:
            raise InputError(
                "DeAR exchanges gradients of full replicas, and here ranks share weights or the "
                "optimizer's state; leave it out, or set parallel.strategy to ddp"
            )
        return Deferred(
            ranks,
            layout,
            bucket_bytes=self.bucket_bytes,
            layers=self.layers,
            tune=self.tune,
            mean=reduction == "mean",
            link=link,
        )

    def ledger(self, at: ScheduleQuery) -> Ledger:
        """Both halves of every group, and gradients that live on into the forward pass."""
        size, ranks = at.element_bytes, at.ranks
        groups = fuse(
            at.layers,
            nbytes=lambda elements: size * elements,
            bucket_bytes=self.bucket_bytes,
            count=self.layers,
        )
        buffers = [size * padded(sum(group), len(group), ranks) for group in groups]
        gradients, total = size * sum(map(sum, groups)), sum(buffers)
        sent = total - total // ranks
        several = ranks > 1
        # One group is complete, and sent, when the backward pass is over.
        flight = min(IN_FLIGHT, len(groups)) * max(buffers, default=0)
        # Gradients that add up over micro-batches are there in forward passes in any case.
        # Those of deferred updates go one layer after the other, as activations come.
        left = max(max(buffers, default=0), gradients - at.saved)
        put_off = min(gradients, left) if at.micro_batches == 1 else 0
        sending: Phase = "backward" if len(groups) > 1 else "step"
        return Ledger.of(
            Entry("gradient", put_off, ("forward",), "gradients of deferred updates"),
            Entry("gradient", total - gradients, ("forward", "backward", "step"), "flags, padding"),
            Entry("workspace", several * total // ranks, ("step", "forward"), "shards of sums"),
            Entry("workspace", several * flight, (sending,), "in flight"),
            Wire("reduce_scatter", sent, REPLICATE, len(groups)),
            Wire("all_gather", sent, REPLICATE, len(groups)),
        )
