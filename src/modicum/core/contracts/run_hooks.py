"""What a method may do at the places of a run: one protocol, every member of it optional.

A trainer calls the members at these places, a bare loop calls them by hand, and
`RunHook.callback()` has them called by `transformers.Trainer`: it is one object in all three. An
adapter, a linear form, a compressor, an optimizer, a schedule, a gradient transform, a policy on
saved activations: what a method binds to is a hook if its class is a `RunHook` and has one of the
members; `Method.run_hook` may give another object for it.

In the order of an update:

    before_update(step)
    with forward_context("train"):      # each micro-batch: forward pass and loss
        loss = ...                      # the last one's, with extra_loss()
    loss.backward()
    after_backward()                    # gradients are the update's, summed over the ranks
    before_optimizer(step)              # they are clipped
    optimizer.step()
    after_optimizer(step, optimizer)    # weights are new, gradients are there yet
    optimizer.zero_grad()
    epoch_end(epoch)                    # where the update was an epoch's last
    surgery(step)                       # whether shapes change now (`core.contracts.surgery`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    "forward_context",
    "extra_loss",
    "after_backward",
    "before_optimizer",
    "after_optimizer",
    "evaluation",
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
    """

    reads_gradients: bool = False

    def before_update(self, step: int) -> None:
        """Update number `step`, from 1, begins: forget what was seen since the last one."""

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """What a forward pass and its loss run in."""
        return nullcontext()

    def extra_loss(self) -> ExtraLoss | None:
        """A term of the update's loss; asked once an update, after its last forward pass."""
        return None

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


class RunHooks:
    """The hooks of a run, in order, called as one; each by the name of its state.

    >>> class Counts(RunHook):
    ...     updates = 0
    ...     def before_update(self, step):
    ...         self.updates = step
    >>> counts = Counts()
    >>> hooks = RunHooks({"counts": counts, "none": object(), "absent": None})
    >>> hooks.before_update(3)
    >>> counts.updates, list(hooks.named)
    (3, ['counts'])
    """

    def __init__(self, candidates: Mapping[str, object] | None = None) -> None:
        self.named: dict[str, Any] = {}
        self._having: dict[str, list[Any]] = {member: [] for member in MEMBERS}
        for name, candidate in (candidates or {}).items():
            self.add(name, candidate)

    def add(self, name: str, candidate: object) -> None:
        """Take a hook in, if it is one; after those that are there.

        Raises:
            ValueError: there is one of this name.
        """
        members = members_of(candidate)
        if not members:
            return
        if name in self.named:
            raise ValueError(f"two hooks are called {name}")
        self.named[name] = candidate
        for member in members:
            self._having[member].append(candidate)

    def remove(self, name: str) -> None:
        """Leave a hook out from here on."""
        gone = self.named.pop(name)
        for having in self._having.values():
            having[:] = [hook for hook in having if hook is not gone]

    def before_update(self, step: int) -> None:
        """An update begins."""
        for hook in self._having["before_update"]:
            hook.before_update(step)

    def forward_context(self, kind: PassKind) -> AbstractContextManager[object]:
        """The contexts of all, the first one outermost."""
        return _entered(hook.forward_context(kind) for hook in self._having["forward_context"])

    @property
    def enter_passes(self) -> bool:
        """Whether any has a context for forward passes."""
        return bool(self._having["forward_context"])

    def extra_losses(self) -> list[ExtraLoss]:
        """The terms that there are."""
        terms = (hook.extra_loss() for hook in self._having["extra_loss"])
        return [term for term in terms if term is not None]

    def after_backward(self) -> None:
        """Gradients are final."""
        for hook in self._having["after_backward"]:
            hook.after_backward()

    def before_optimizer(self, step: int) -> None:
        """Gradients are clipped."""
        for hook in self._having["before_optimizer"]:
            hook.before_optimizer(step)

    @property
    def reads_gradients(self) -> bool:
        """Whether any `after_optimizer` of the update at hand reads gradients."""
        return any(getattr(h, "reads_gradients", False) for h in self._having["after_optimizer"])

    def after_optimizer(self, step: int, optimizer: Optimizer | None) -> None:
        """The update was made."""
        for hook in self._having["after_optimizer"]:
            hook.after_optimizer(step, optimizer)

    def evaluation(self) -> AbstractContextManager[object]:
        """The contexts of all, the first one outermost."""
        return _entered(hook.evaluation() for hook in self._having["evaluation"])

    def checkpoint(self) -> None:
        """A checkpoint is about to be written."""
        for hook in self._having["checkpoint"]:
            hook.checkpoint()

    def epoch_end(self, epoch: int) -> None:
        """An epoch is over."""
        for hook in self._having["epoch_end"]:
            hook.epoch_end(epoch)

    @property
    def may_change_shapes(self) -> bool:
        """Whether any is asked for surgeries."""
        return bool(self._having["surgery"])

    def surgeries(self, step: int) -> list[Surgery]:
        """Those that are asked for after an update."""
        asked = (hook.surgery(step) for hook in self._having["surgery"])
        return [surgery for surgery in asked if surgery is not None]

    def close(self) -> None:
        """Have each leave the model as it was; the last one first."""
        for hook in reversed(self.named.values()):
            hook.close()

    def stateful(self) -> dict[str, Any]:
        """Those that have a state, by the name of its view."""
        named = self.named.items()
        return {name: hook for name, hook in named if hasattr(hook, "load_state_dict")}


def members_of(candidate: object) -> tuple[str, ...]:
    """The members that a hook has of its own, other than the protocol's that do nothing.

    What is no `RunHook` has none: others have methods of these names that mean something else.
    """
    if not isinstance(candidate, RunHook):
        return ()
    own = {member: getattr(type(candidate), member, None) for member in MEMBERS}
    return tuple(m for m in MEMBERS if own[m] is not None and own[m] is not getattr(RunHook, m))


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
