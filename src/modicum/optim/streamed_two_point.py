"""Two points with the model's blocks on the host: at most three of them are on the device."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import is_idle
from modicum.core.errors import InputError
from modicum.core.layers.block_kinds import outermost_lists
from modicum.core.ranks.sharding import is_sharded
from modicum.core.streaming import BlockStreamer, PretendedLink
from modicum.optim.two_point import TwoPoint


def blocks_of_model(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model's outermost lists, in order, that have parameters.

    Raises:
        InputError: there are none.
    """
    lists = outermost_lists(model).values()
    blocks = [
        block
        for each in lists
        for block in each.children()
        if any(True for _ in block.parameters())
    ]
    if not blocks:
        problem = "the model has no list of blocks to move between host and device"
        raise InputError(problem, field="stream", value=True)
    return blocks


class StreamedTwoPoint(TwoPoint):
    """Two points, with the parameters of `blocks` at home on the host.

    A forward pass brings up one block after the other, and perturbs it on the device. A block's
    update waits for its next way up: it is made there and stored, and the values of a home, which
    are never perturbed, are the snapshot. So with `flush` the weights are those of `TwoPoint` with
    `snapshot`, to the bit, whose parameters are all on the device. Parameters outside the blocks
    stay there, with a copy of them during the passes.

    Each of an update's 2 K forward passes brings up each block once; it goes home once an update.
    Forward passes of one's own are possible after `flush`, without gradients.

    Args:
        parameters: the trained ones of `model`, by its names.
        model: whose blocks these are; the parameters of its blocks, frozen ones too, move.
        device: where it is computed; None: where the first parameter is.
        depth: blocks that come up in advance; depth + 2 are on the device at most.
        link: a pretended one, where there is no device.
        options: of `TwoPoint`.

    Raises:
        InputError: there are no blocks, one shares a parameter, or ranks have parts of it.

    Source: Wang et al., "ZO2", arXiv 2503.12668, section 5, by two passes one after the other where
    theirs advance together, so that blocks come up twice as often.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        model: nn.Module,
        device: torch.device | str | None = None,
        depth: int = 1,
        link: PretendedLink | None = None,
        **options: Any,
    ) -> None:
        self._blocks = blocks_of_model(model)
        self._owned = _owned(model, self._blocks)
        inside = {id(p) for owned in self._owned for p in owned.values()}
        trained = {id(parameter): name for name, parameter in reversed(dict(parameters).items())}
        resident = {n: p for n, p in parameters.items() if id(p) not in inside}
        super().__init__(resident, **(options | {"snapshot": True}))
        # Of each block, the trained parameters by the name that they have in the block.
        self._trained = [
            {own: trained[id(p)] for own, p in owned.items() if id(p) in trained}
            for owned in self._owned
        ]
        place = next(iter(parameters.values())).device if device is None else torch.device(device)
        self.streamer = BlockStreamer(self._owned, place, depth=depth, link=link)
        self._now: tuple[int, int, float] | None = None
        self._pending: tuple[int, float, Sequence[float]] = (0, 0.0, ())
        self._behind: set[int] = set()
        self._hooks: list[Any] = []
        for index, block in enumerate(self._blocks):
            self._bind(index, self.streamer.home(index))
            self._hooks += [
                block.register_forward_pre_hook(lambda *_, i=index: self._arrive(i)),
                block.register_forward_hook(lambda *_, i=index: self._leave(i), always_call=True),
            ]

    @torch.no_grad()
    def apply(self, step: int, rate: float, slopes: Sequence[float]) -> None:
        """Update what is on the device; the blocks' update is deferred to their next way up."""
        self._catch_up()
        super().apply(step, rate, slopes)
        self._pending = step, rate, tuple(slopes)
        self._behind = {i for i, names in enumerate(self._trained) if names and rate}

    def flush(self) -> None:
        """Make the updates that were deferred: from here on weights may be read, and changed."""
        self.streamer.forget()
        self._catch_up()
        self.streamer.wait()

    def close(self) -> None:
        """Flush, and end the threads; the model computes with its blocks where they are."""
        self.flush()
        for hook in self._hooks:
            hook.remove()
        self.streamer.close()

    def _visits(self, step: int) -> Generator[tuple[int, float]]:
        with closing(super()._visits(step)) as visits:
            try:
                for k, distance in visits:
                    self._now = step, k, distance
                    yield k, distance
            finally:
                self._now = None
        self._catch_up()

    def _arrive(self, index: int) -> None:
        """Bring up a block that is about to compute, in the weights of this pass."""
        if self._now is None:
            self._check_plain()
        with torch.no_grad():
            self._bind(index, self._brought(index))

    def _brought(self, index: int) -> Mapping[str, Tensor]:
        """A block's tensors on the device: updated, sent home, and perturbed as is due."""
        following = index + 1 if index + 1 < len(self._blocks) else None
        if following is None and self._now is not None:
            following = 0  # of the next pass
        tensors = self.streamer.take(index, following)
        if self._now is not None:
            if index in self._behind:
                self._behind.discard(index)
                self._advance_block(index, tensors)
                tensors = self.streamer.store(index)
            step, k, distance = self._now
            for own, name in self._moving(index):
                self._perturb(tensors[own], name, 0, step, k, distance)
        return tensors

    def _leave(self, index: int) -> None:
        """Give a block's buffer back: what is at home counts."""
        if self._owned[index] and index in self.streamer.taken:
            self._bind(index, self.streamer.home(index))
            self.streamer.release(index)

    def _check_plain(self) -> None:
        """Whether a forward pass that is none of an update's may run.

        Raises:
            InputError: weights are an update behind, or the pass is to have a backward one.
        """
        if self._behind:
            raise InputError("the blocks' weights are an update behind; call flush() first")
        if torch.is_grad_enabled():
            problem = "blocks that move between host and device have no backward pass"
            raise InputError(f"{problem}; use torch.no_grad()")

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Update at home the blocks that did not come up since."""
        if self._behind:
            self.streamer.forget()
            self.streamer.wait()
        while self._behind:
            index = self._behind.pop()
            self._advance_block(index, self.streamer.home(index))

    def _advance_block(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        for own, name in self._moving(index):
            self._advance(tensors[own], name, 0, *self._pending)

    def _moving(self, index: int) -> list[tuple[str, str]]:
        """Of a block's trained parameters that are not idle, the names there and in the model."""
        owned = self._owned[index]
        return [pair for pair in self._trained[index].items() if not is_idle(owned[pair[0]])]

    def _bind(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        for own, parameter in self._owned[index].items():
            parameter.data = tensors[own]


def _owned(model: nn.Module, blocks: Sequence[nn.Module]) -> list[dict[str, nn.Parameter]]:
    """The parameters of each block, by the names that they have there.

    Raises:
        InputError: one of them is shared with another block, or with what is outside, or sharded.
    """
    owned = [dict(block.named_parameters()) for block in blocks]
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [m._parameters.values() for m in model.modules() if id(m) not in inside]
    seen = {id(p) for parameters in outside for p in parameters if p is not None}
    for number, parameters in enumerate(owned):
        for name, parameter in parameters.items():
            if id(parameter) in seen:
                problem = f"block {number} shares {name}, and blocks move one by one"
                raise InputError(problem, field="stream", value=True)
            if is_sharded(parameter):
                problem = "ranks hold parts of the blocks, and blocks move in full"
                raise InputError(problem, field="stream", value=True)
        seen |= {id(p) for p in parameters.values()}
    return owned
