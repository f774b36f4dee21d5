"""The layers' side of a calibration pass: what each is given, and the gradient of what it makes.

Knows hooks and calls; `modicum.core.layers.calibration` knows batches, ranks' data and files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.layers.statistics import Calibration, Statistic, by_example, statistic
from modicum.core.ranks.ranks import Ranks, peer_errors


@dataclass
class _Call:
    """One call of a layer: inputs [B, T, in], and output gradients once they have come."""

    inputs: Tensor
    gradient: Tensor | None = None


class LayerWatch:
    """The sums of named layers, and the calls among them that wait for their gradients."""

    def __init__(self, model: nn.Module, names: Sequence[str], statistics: Sequence[str]) -> None:
        self.layers = {name: model.get_submodule(name) for name in names}
        self.kinds: Mapping[str, Statistic] = {name: statistic(name) for name in statistics}
        self.backward = any(kind.needs_gradients for kind in self.kinds.values())
        self.examples = 0
        self._sums = {
            (kind, name): torch.zeros(known.shape(_width(layer)), dtype=torch.float64)
            for kind, known in self.kinds.items()
            for name, layer in self.layers.items()
        }
        self._positions = dict.fromkeys(names, 0)
        self._calls: dict[str, list[_Call]] = {}
        self._looking = False
        self._batch = 0
        self._mask: Tensor | None = None

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the layers for the length of a `with` block."""
        handles = [
            layer.register_forward_hook(partial(self._called, name), with_kwargs=True)
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def batch(self, examples: int, mask: Tensor | None) -> Iterator[None]:
        """The forward pass of a batch, for a `with` block; calls outside of one are not noted."""
        self._batch, self._mask, self._looking = examples, mask, True
        self.examples += examples
        try:
            with torch.set_grad_enabled(self.backward):
                yield
        finally:
            self._looking = False

    def finish(self) -> None:
        """The batch's backward pass is done: an output without a gradient had no part in it."""
        for name, calls in self._calls.items():
            self._add_gradients(name, [call for call in calls if call.gradient is not None])
        self._calls.clear()

    def _called(self, name: str, _: nn.Module, given: Any, named: Any, output: Tensor) -> Tensor:
        inputs = (given[0] if given else next(iter(named.values()))).detach()
        if self.backward and not output.requires_grad:
            # Nothing before this layer is differentiated, so its output starts the graph. It is
            # copied, since what follows may change it in place, which no leaf allows. A block that
            # is recomputed in the backward pass must save the same again.
            output = output.requires_grad_().clone()
        if not self._looking:
            return output
        call = _Call(by_example(inputs, self._batch, name))
        self._add_inputs(name, call.inputs)
        if self.backward:
            self._calls.setdefault(name, []).append(call)
            output.register_hook(partial(self._arrived, name, call))
        return output

    def _arrived(self, name: str, call: _Call, gradient: Tensor) -> None:
        call.gradient = by_example(gradient, self._batch, name)
        calls = self._calls[name]
        if all(other.gradient is not None for other in calls):
            self._add_gradients(name, calls)
            calls.clear()

    def _add_inputs(self, name: str, x: Tensor) -> None:
        if self._mask is not None and self._mask.shape == x.shape[:2]:
            x = x[self._mask.to(x.device)][None]
        self._positions[name] += x.shape[0] * x.shape[1]
        for kind, known in self.kinds.items():
            if not known.needs_gradients:
                self._add(kind, name, x, x)

    def _add_gradients(self, name: str, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        # A layer that is called more than once has one gradient, the sum over its calls.
        x = torch.cat([call.inputs for call in calls], dim=1)
        delta = torch.cat([call.gradient for call in calls if call.gradient is not None], dim=1)
        for kind, known in self.kinds.items():
            if known.needs_gradients:
                self._add(kind, name, x, delta)

    def _add(self, kind: str, name: str, x: Tensor, delta: Tensor) -> None:
        with torch.autocast(x.device.type, enabled=False):  # a statistic is wide whatever is around
            part = self.kinds[kind].of(x, delta)
        self._sums[kind, name] = self._sums[kind, name].to(part.device).add_(part)

    def result(self, ranks: Ranks, known: Calibration | None = None) -> Calibration:
        """What all ranks saw together; `known` replaces what this one saw.

        Raises:
            InputError: no example reached a layer, or a sum is not finite.
        """
        mine = known or Calibration(self._sums, self.examples, self._positions)
        counts = [mine.examples, *(mine.positions[name] for name in self.layers)]
        parts = [mine.sums[key].cpu().flatten() for key in self._sums]
        flat = torch.cat([torch.tensor(counts, dtype=torch.float64), *parts])
        if not ranks.alone:
            with peer_errors():
                dist.all_reduce(flat)
        counts = [int(count) for count in flat[: len(counts)].tolist()]
        positions = dict(zip(self.layers, counts[1:], strict=True))
        for name, count in positions.items():
            if not count:
                problem = "no example reached this layer; leave it out"
                raise InputError(problem, field="layers", value=name)
        sums = {}
        pieces = flat[len(counts) :].split([part.numel() for part in parts])
        for (kind, name), piece in zip(self._sums, pieces, strict=True):
            if not piece.isfinite().all():
                problem = (
                    f"the {kind} of this layer is not finite; calibrate in float32 or bfloat16"
                )
                raise InputError(problem, value=name)
            sums[kind, name] = piece.view(self._sums[kind, name].shape).clone()
        return Calibration(sums, counts[0], positions)


def _width(layer: nn.Module) -> int:
    """A layer's input features; the `Conv1D` of GPT-2 has them in its weight's shape alone."""
    known = getattr(layer, "in_features", None)
    return int(known if known is not None else layer.get_parameter("weight").shape[0])
