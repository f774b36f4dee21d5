"""The hooks of a run, called as one.

A step program calls each member once; every hook that has it is called, in the order of slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modicum.core.contracts.run_hooks import MEMBERS, ExtraLoss, PassKind, members_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from modicum.core.contracts.surgery import Surgery


class RunHooks:
    """The hooks of a run, in order, called as one; each by the name of its state.

    >>> from modicum.core.contracts.run_hooks import RunHook
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

    def before_forward(self, share: float) -> None:
        """A micro-batch comes, of which the update has this share."""
        for hook in self._having["before_forward"]:
            hook.before_forward(share)

    @property
    def weigh_passes(self) -> bool:
        """Whether any asks for the shares of micro-batches."""
        return bool(self._having["before_forward"])

    @property
    def pair_passes(self) -> bool:
        """Whether each batch is to be run as one of twice the rows."""
        return bool(self._having["pair_loss"])

    def pair_loss(self, first: Any, second: Any, batch: Any) -> Tensor:
        """The sum of losses between two passes, of all that have one."""
        terms = [hook.pair_loss(first, second, batch) for hook in self._having["pair_loss"]]
        return torch.stack([term.float() for term in terms]).sum()

    def added_loss(self) -> float | None:
        """What methods themselves have added to the update's loss on this rank, if any does."""
        each = [hook.added_loss() for hook in self._having["added_loss"]]
        known = [value for value in each if value is not None]
        return sum(known) if known else None

    def extra_losses(self) -> list[ExtraLoss]:
        """The terms that there are."""
        terms = (hook.extra_loss() for hook in self._having["extra_loss"])
        return [term for term in terms if term is not None]

    def update_loss(self, loss: float) -> None:
        """The update's mean loss over all ranks."""
        for hook in self._having["update_loss"]:
            hook.update_loss(loss)

    def after_backward(self) -> None:
        """Gradients are final."""
        for hook in self._having["after_backward"]:
            hook.after_backward()

    @property
    def learn_from_gradients(self) -> bool:
        """Whether any that has a state may change it when gradients are final."""
        asked = (*self._having["update_loss"], *self._having["after_backward"])
        return any(hasattr(hook, "load_state_dict") for hook in asked)

    def before_optimizer(self, step: int) -> None:
        """Gradients are clipped."""
        for hook in self._having["before_optimizer"]:
            hook.before_optimizer(step)

    @property
    def reads_gradients(self) -> bool:
        """Whether any `after_optimizer` of the update at hand reads gradients."""
        return any(getattr(h, "reads_gradients", False) for h in self._having["after_optimizer"])

    @property
    def writes_weights(self) -> bool:
        """Whether any `after_optimizer` of the update at hand changes what is trained."""
        return any(getattr(h, "writes_weights", False) for h in self._having["after_optimizer"])

    def after_optimizer(self, step: int, optimizer: Optimizer | None) -> None:
        """The update was made."""
        for hook in self._having["after_optimizer"]:
            hook.after_optimizer(step, optimizer)

    def evaluation(self) -> AbstractContextManager[object]:
        """The contexts of all, the first one outermost."""
        return _entered(hook.evaluation() for hook in self._having["evaluation"])

    def findings(self) -> dict[str, list[dict[str, Any]]]:
        """The rows of each that has some, by its name."""
        return {name: rows for name, hook in self.named.items() if (rows := hook.findings())}

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

    def held(self) -> Iterator[Tensor]:
        """What each has from the start, outside the model."""
        for hook in self.named.values():
            yield from hook.held()

    def ended(self) -> dict[str, str]:
        """Why, of each that has ended for good, by its name."""
        named = self.named.items()
        return {name: why for name, hook in named if (why := getattr(hook, "ended_because", None))}

    def close(self) -> None:
        """Have each leave the model as it was; the last one first."""
        for hook in reversed(self.named.values()):
            hook.close()

    def stateful(self) -> dict[str, Any]:
        """Those that have a state, by the name of its view."""
        named = self.named.items()
        return {name: hook for name, hook in named if hasattr(hook, "load_state_dict")}


@contextmanager
def _entered(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
