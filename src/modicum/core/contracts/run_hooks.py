"""What a method may do at the places of a run: one protocol, every member of it optional.

A trainer calls the members at these places, a bare loop calls them by hand, and
`RunHook.callback()` has them called by `transformers.Trainer`: it is one object in all three. An
adapter, a linear form, a compressor, an optimizer, a schedule, a gradient transform, a policy on
saved activations: what a method binds to is a hook if its class is a `RunHook` and has one of the
members; `Method.run_hook` may give another object for it.

In the order of an update:

    before_update(step)
    before_forward(share)               # each micro-batch, with its share of the update's count
    with forward_context("train"):      # its forward pass and loss
        loss = ...                      # with pair_loss(), and the last one's with extra_loss()
    loss.backward()
    added_loss()                        # after the last one: what a method has added by itself
    update_loss(loss)                   # the task's mean loss, over all ranks
    after_backward()                    # gradients are the update's, summed over the ranks
    before_optimizer(step)              # they are clipped
    optimizer.step()
    after_optimizer(step, optimizer)    # weights are new, gradients are there yet
    optimizer.zero_grad()
    epoch_end(epoch)                    # where the update was an epoch's last
    surgery(step)                       # whether shapes change now (`core.contracts.surgery`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from transformers import TrainerCallback

    from modicum.core.contracts.surgery import Surgery

PassKind = Literal["train", "rehearse", "recompute", "evaluate"]
"""What a forward pass is for: an update; its memory alone, nothing being learned from it; once more
for a backward pass that kept nothing; without gradients."""

MEMBERS = (
    "before_update",
    "before_forward",
    "forward_context",
    "pair_loss",
    "added_loss",
    "extra_loss",
    "update_loss",
    "after_backward",
    "before_optimizer",
    "after_optimizer",
    "evaluation",
    "findings",
    "checkpoint",
    "epoch_end",
    "surgery",
)


@dataclass(frozen=True)
class ExtraLoss:
    """A term of an update's loss, next to the task's: its sum over its count, both over all ranks.

    Args:
        sum: this rank's, one element, with its graph.
        count: what it is a sum of on this rank: positions, layers, or 1 for a term of weights.
    """

    sum: Tensor
    count: float = 1.0


class RunHook:
    """A method at work in a run; a member that is left out does nothing.

    Attributes:
        reads_gradients: whether `after_optimizer` of the update at hand reads gradients or what the
            optimizer made of them: an update that was deferred is then done at once.
        writes_weights: whether `after_optimizer` of the update at hand changes what is trained;
            copies of it are then brought up once more.
        reads_output_gradients: whether it learns from gradients of layers' outputs, in the backward
            pass: where a trainer scales its losses, these are scaled too.
        ended_because: why the method has ended for good, so that from here on it does and spends
            nothing; None: it has not. All ranks have the same, and so has its state.
    """

    reads_gradients: bool = False
    writes_weights: bool = False
    reads_output_gradients: bool = False
    ended_because: str | None = None

    def before_update(self, step: int) -> None:
        """Update number `step`, from 1, begins: forget what was seen since the last one."""

    def before_forward(self, share: float) -> None:
        """A micro-batch comes that has this share of the update's count, over all ranks.

        The shares of an update add up to 1 over micro-batches and ranks. In a loop that takes means
        over ranks those of each rank do.
        """

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """What a forward pass and its loss run in."""
        return nullcontext()

    def pair_loss(self, first: Any, second: Any, batch: Any) -> Tensor:
        """The sum of losses between two passes of a batch; `batch.count` belongs to it.

        Who has this has each batch run as one of twice the rows, whose second half is the second
        pass: so recomputation makes what both drew. Its class has the trait `pairs_passes`, by
        which plans count the rows. The task's loss is that of the first pass.

        Args:
            first, second: the task's outputs of the passes.
        """
        raise TypeError(f"{type(self).__name__} defines no pair_loss()")

    def added_loss(self) -> float | None:
        """What the method itself has added to the update's loss, this rank's part, to be reported.

        Asked once an update, after its last backward pass; None: it does not do that.
        """
        return None

    def extra_loss(self) -> ExtraLoss | None:
        """A term of the update's loss; asked once an update, after its last forward pass."""
        return None

    def update_loss(self, loss: float) -> None:
        """The update's mean loss over all ranks, by the task alone; not called by other trainers.

        Under `transformers.Trainer` and Lightning no callback is shown the loss of an update.
        """

    def after_backward(self) -> None:
        """Gradients are final: sums over micro-batches and ranks, not yet clipped."""

    def before_optimizer(self, step: int) -> None:
        """Gradients are clipped, and the update is made."""

    def after_optimizer(self, step: int, optimizer: Optimizer | None) -> None:
        """The update was made, and its gradients are there yet; not called where it was skipped.

        Args:
            optimizer: PyTorch's, where the step program has one.
        """

    def evaluation(self) -> AbstractContextManager[object]:
        """What evaluations and samples run in; no update is deferred."""
        return nullcontext()

    def findings(self) -> list[dict[str, Any]]:
        """Rows for the report on what an evaluation showed, in plain values and alike in keys.

        Asked once after each evaluation, of all ranks; the first one's are kept.
        """
        return []

    def checkpoint(self) -> None:
        """A checkpoint is about to be written; no update is deferred."""

    def epoch_end(self, epoch: int) -> None:
        """Every row has been taken `epoch` times, or once more than that in part."""

    def surgery(self, step: int) -> Surgery | None:
        """How shapes change after update number `step`; None: they stay.

        No update is deferred. All ranks give the same answer, so it is made of what they share:
        full weights, or sums over ranks. A class that has this has the trait `changes_shapes`.
        """
        return None

    def held(self) -> Iterable[Tensor]:
        """Tensors that it has from the start, before the first update, outside the model."""
        return ()

    @property
    def members(self) -> tuple[str, ...]:
        """Those that do something."""
        return members_of(self)

    def close(self) -> None:
        """Leave the model as it was."""

    def hook_forward(self, model: nn.Module) -> Callable[[], None]:
        """Enter `forward_context` with every forward pass of a model, where nobody else can.

        Returns:
            What takes the hooks off again.
        """
        stack = ExitStack()

        def enter(module: nn.Module, inputs: Any) -> None:
            stack.enter_context(self.forward_context("train" if module.training else "evaluate"))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            stack.close()

        handles = [
            model.register_forward_pre_hook(enter),
            model.register_forward_hook(leave, always_call=True),
        ]

        def remove() -> None:
            for handle in handles:
                handle.remove()

        return remove

    def callback(self) -> TrainerCallback:
        """The hook for `transformers.Trainer(callbacks=[...])`; see `trainer_callback`."""
        from modicum.core.contracts.trainer_callback import callback_of

        return callback_of(lambda model, optimizer: self)

    def lightning_callback(self) -> Any:
        """The hook for Lightning's `Trainer(callbacks=[...])`; see `lightning_callback`."""
        from modicum.core.contracts.lightning_callback import lightning_callback_of

        return lightning_callback_of(lambda model, optimizer: self)


def members_of(candidate: object) -> tuple[str, ...]:
    """The members that a hook has of its own, other than the protocol's that do nothing.

    What is no `RunHook` has none: others have methods of these names that mean something else.
    """
    if not isinstance(candidate, RunHook):
        return ()
    own = {member: getattr(type(candidate), member, None) for member in MEMBERS}
    return tuple(m for m in MEMBERS if own[m] is not None and own[m] is not getattr(RunHook, m))
