"""Adapters that see the steps of a run: they count, draw anew, or add a term to the loss.

What a forward pass counts is entered as a gradient is, into a tensor of the layer's own, when its
backward pass comes. So it is entered once, whether blocks run again or not and compiled or not;
what has no backward pass, such as an evaluation, enters nothing; and micro-batches add up. A term
of the loss has its gradient from the same place. It is computed within the layer's forward pass,
where weights that are sharded over ranks are gathered, at the micro-batch's share of the update, so
no loop has to know of it. A layer that one forward pass calls twice counts and adds twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.adapters.adapter_layer import AdapterLayer
from modicum.adapters.attachment import Attachment
from modicum.core.contracts.parameters import metadata
from modicum.core.contracts.run_hooks import RunHook
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks, joined


class _Noted(torch.autograd.Function):
    """Outputs as they are; in the backward pass a tally gets numbers, a term a gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, tally: Tensor, numbers: Tensor, term: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.like = None if term is None else (term.shape, term.dtype)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (numbers,) = ctx.saved_tensors
        if ctx.like is None:
            return gradient, numbers, None, None
        shape, dtype = ctx.like
        return gradient, numbers, None, torch.ones(shape, dtype=dtype, device=numbers.device)


class FollowingLayer(AdapterLayer):
    """An adapter's layer that takes part in the steps of a run, as long as `AdapterSteps` is there.

    Its `forward` gives its outputs to `noted`, with what it has counted. What it moves by that
    is a frozen tensor, which files and checkpoints keep as any other.

    Attributes:
        counted: how many numbers a forward pass counts.
        followed: whether somebody calls `begin` and `follow` now; without, nothing is counted or
            added.
        paired: whether the second half of a forward pass's rows is a second pass of the first.
    """

    followed: bool = False
    paired: bool = False
    _tally: Tensor
    _share: Tensor

    @property
    def counted(self) -> int:
        return 0

    def term(self) -> Tensor | None:
        """A term of the loss, of one element, made of what this layer has; None: there is none.

        It is the same whatever goes through the layer, and is added once an update.
        """
        return None

    def begin(self, step: int, *, seed: int) -> None:
        """Update number `step` begins: draw what it needs, by `core.random` from seed and step.

        Ranks draw alike then, and so does a run that resumes. What is drawn goes into tensors, in
        place: Python's numbers would have a compiled block compiled again. Factors that take turns
        are set idle here, by `turn_of`.
        """

    def follow(self, counts: Tensor) -> None:
        """The update was made.

        Args:
            counts: fp64 [counted] on the CPU, over its micro-batches and all ranks.
        """

    def noted(self, outputs: Tensor, counts: Tensor | None = None) -> Tensor:
        """The layer's outputs, with whose backward pass counts and the term's gradient come.

        Args:
            outputs: of a pass that trains; of any other they are given back.
            counts: [counted], of this pass; at most 2^24 in an update of a rank are exact.
        """
        if not (self.followed and self.training and torch.is_grad_enabled()):
            return outputs
        term, tally = self.term(), self._tally
        numbers = torch.zeros_like(tally)
        if counts is not None:  # rows that run only because other ranks have some do not count
            numbers[:-1] = counts.detach() * (self._share > 0)
        weighed = None
        if term is not None:
            weighed = self._share * term.reshape(1)
            numbers[-1:] = weighed.detach()
        noted: Tensor = _Noted.apply(outputs, tally, numbers, weighed)
        return noted

    def share(self, share: float) -> None:
        """Set the share of the update that the next micro-batch has, in place."""
        self._share.fill_(share)

    def clear(self) -> None:
        """Forget what was counted, and be where the layer is now."""
        device = next(self.parameters()).device
        if device != self._tally.device:
            self._tally = torch.zeros_like(self._tally, device=device, requires_grad=True)
            self._share = self._share.to(device)
        self._tally.grad = None

    def entered(self) -> Tensor:
        """What was entered since: the counts, and last the term at its shares."""
        found = self._tally.grad
        return torch.zeros_like(self._tally) if found is None else found

    def attend(self, *, paired: bool) -> None:
        """Take part in steps from here on."""
        device = next(self.parameters()).device
        self._tally = torch.zeros(self.counted + 1, device=device, requires_grad=True)
        self._share = torch.ones(1, device=device)
        self.followed, self.paired = True, paired


class AdapterSteps(RunHook):
    """An adapter's part in the steps of a run; `AttachedAdapter.steps` makes it.

    Trainers take it as the run hook that it is, and transformers' by `callback()`. A loop of one's
    own calls `update` once an update, after the optimizer's step; with several micro-batches an
    update, `before_forward(share)` before each.

    A method subclasses it to see gradients (`after_backward`), epochs (`epoch_end`) or outputs of
    two passes (`pair_loss`).

    Args:
        ranks: this process among those that share the batch; None: as torchrun says.

    Attributes:
        updates: how many were made.
    """

    def __init__(self, attached: Attachment, ranks: Ranks | None = None) -> None:
        self.attached, self.ranks, self.updates = attached, ranks or attached.ranks, 0
        found = (layer for _, layer in attached.layers())
        self.layers = [layer for layer in found if isinstance(layer, FollowingLayer)]
        self.adds = any(type(layer).term is not FollowingLayer.term for layer in self.layers)
        self._share = 1.0
        for layer in self.layers:
            layer.attend(paired="pair_loss" in self.members)
        self.before_update(1)

    def before_update(self, step: int) -> None:
        """Forget what was counted in passes that led to no update, and draw anew."""
        self.updates = step - 1
        for layer in self.layers:
            layer.clear()
            layer.begin(step, seed=self.attached.seed)

    def before_forward(self, share: float) -> None:
        """Add terms of the loss at a micro-batch's share, and count it unless that is 0."""
        for layer in self.layers if share != self._share else ():
            layer.share(share)
        self._share = share

    def added_loss(self) -> float | None:
        """The terms, at the shares of this rank's micro-batches."""
        if not self.adds:
            return None
        return float(torch.stack([layer.entered()[-1] for layer in self.layers]).sum())

    def after_optimizer(self, step: int, optimizer: Any) -> None:
        """Sum counts over ranks, and have layers move by them."""
        self.updates = step
        sizes = [layer.counted for layer in self.layers]
        if sum(sizes):
            own = torch.cat([layer.entered()[:-1].double().cpu() for layer in self.layers])
            for layer, counts in zip(self.layers, self._summed(own).split(sizes), strict=True):
                layer.follow(counts)

    def update(self) -> None:
        """What a loop of one's own calls after the optimizer's step."""
        self.after_optimizer(self.updates + 1, None)
        self.before_update(self.updates + 1)

    def _summed(self, counts: Tensor) -> Tensor:
        if self.ranks is None:
            with joined() as ranks:
                found = ranks.sum(*counts.tolist())
        else:
            found = self.ranks.sum(*counts.tolist())
        return torch.tensor(found, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        """How many updates were made; what layers move is in the adapter's own state."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Be after as many updates."""
        self.before_update(int(state["updates"]) + 1)

    def close(self) -> None:
        """Have layers count and add nothing more, and all parameters take part in updates."""
        for layer in self.layers:
            layer.followed = layer.paired = False
        for parameter in self.attached.parameters():
            if (turn := metadata(parameter).turn) is not None:
                turn.idle = False


def steps_of(attached: Attachment) -> AdapterSteps:
    """An adapter's part in steps.

    Raises:
        InputError: its method follows none.
    """
    hook = attached.method.run_hook(attached)
    if not isinstance(hook, AdapterSteps):
        problem = "this adapter counts nothing and adds nothing, so a loop has nothing to call"
        raise InputError(problem, value=attached.method.info.name)
    return hook
