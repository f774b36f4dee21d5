"""What goes into linear and convolution layers, and the gradients of what comes out of them.

Statistics are taken in hooks, from tensors that are there anyway; none of these is kept. An
accumulator sees a layer's input in the forward pass, and may give back a little to remember; it
sees that again, with the output's gradient, in the backward pass. What enters its sums there is
counted once: a forward pass that has no backward one (evaluation, generation) is not counted, nor
is the second forward pass of a recomputed block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from modicum.core.contracts.parameters import matrices, trainable
from modicum.core.layers.targets import named


@dataclass(frozen=True)
class CapturedLayer:
    """A layer y = W x + b, W [out_features, in_features]; of a convolution x is a patch, c kh kw.

    Args:
        name: the (first) module's.
        modules: those that have this weight: more than one where weights are tied.
        weight, bias: names of the trained parameters; no bias where modules disagree on it.
    """

    name: str
    modules: tuple[nn.Module, ...]
    weight: str
    bias: str | None
    out_features: int
    in_features: int


def trained_layers(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter] | None = None,
    exclude: Sequence[str] = (),
) -> list[CapturedLayer]:
    """The linear and (ungrouped) 2-D convolution layers whose weight is trained, in order.

    The output head of a language model is left out (see `parameters.matrices`), and so is a
    weight that a module of another kind uses too, such as a tied embedding.

    Args:
        parameters: what is trained, by the model's names; None: what takes gradients.
        exclude: full names, last names or patterns of layers to leave out.

    >>> [layer.weight for layer in trained_layers(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))]
    ['0.weight']
    """
    trained = dict(trainable(model)) if parameters is None else parameters
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append((name, module))
    inner = matrices(model)
    found = []
    for key, users_of in users.items():
        (name, first), modules = users_of[0], tuple(module for _, module in users_of)
        weight = first._parameters.get("weight")
        if weight is None or id(weight) != key or names[key] not in trained:
            continue
        if not all(_known(module) and module._parameters["weight"] is weight for module in modules):
            continue
        if weight.ndim == 2 and names[key] not in inner:
            continue
        if any(named(one, exclude) for one, _ in users_of):
            continue
        biases = {id(module._parameters.get("bias")) for module in modules}
        bias = names.get(biases.pop()) if len(biases) == 1 else None
        widths = weight.shape[0], math.prod(weight.shape[1:])
        found.append(
            CapturedLayer(name, modules, names[key], bias if bias in trained else None, *widths)
        )
    return found


def _known(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


class Accumulator(Protocol):
    """Takes statistics of one layer, without autograd."""

    def on_input(self, inputs: Tensor, mask: Tensor | None) -> Any:
        """See the layer's input; what is returned comes back with the output's gradient."""

    def on_output_gradient(self, gradient: Tensor, remembered: Any) -> None:
        """See the gradient of the layer's output, of the same call as what is remembered."""


class Capture:
    """Hooks that show accumulators what passes through their layers.

    A module that is called several times shows each call, and several modules may share an
    accumulator. Compiled code runs the hooks too, but a block that is compiled and recomputed may
    then save other tensors in its second forward pass, which is an error: capture from eager ones.

    Attributes:
        on: whether forward passes are shown; the user's switch, see `capturing`.
        wanted: the same, as the owner of the accumulators sees it.
        mask: bool over the input's leading dimensions, [B] or [B, T]: positions that count; None
            for all. It holds for forward passes that begin while it is set.

    >>> class Largest:
    ...     def on_input(self, inputs, mask):
    ...         return inputs.max().item()
    ...     def on_output_gradient(self, gradient, remembered):
    ...         print(remembered, gradient.max().item())
    >>> layer = nn.Linear(2, 2)
    >>> capture = Capture([(layer, Largest())])
    >>> layer(torch.tensor([[1.0, 3.0]])).sum().backward()
    3.0 1.0
    >>> capture.close()
    """

    on: bool = True
    wanted: bool = True
    mask: Tensor | None = None

    def __init__(self, accumulators: Iterable[tuple[nn.Module, Accumulator]]) -> None:
        self._handles = [
            module.register_forward_hook(partial(self._forward, accumulator), with_kwargs=True)
            for module, accumulator in accumulators
        ]

    @contextmanager
    def capturing(self, on: bool = True, mask: Tensor | None = None) -> Iterator[None]:
        """Capture, or do not, in a `with` block around forward and backward."""
        before = self.on, self.mask
        self.on, self.mask = on, mask
        try:
            yield
        finally:
            self.on, self.mask = before

    def close(self) -> None:
        """Take the hooks off the layers."""
        for handle in self._handles:
            handle.remove()

    def _forward(
        self,
        accumulator: Accumulator,
        module: nn.Module,
        inputs: tuple[Any, ...],
        named: Mapping[str, Any],
        output: Tensor,
    ) -> None:
        if not (self.on and self.wanted and output.requires_grad):
            return
        seen: Tensor = inputs[0] if inputs else named["input"]
        with torch.no_grad():
            remembered = accumulator.on_input(seen.detach(), self.mask)
        # On the output itself, a hook sees the full gradient of this call, also where the output
        # is changed in place afterwards; and in a recomputed forward pass, whose outputs take no
        # gradient, it is never run.
        output.register_hook(partial(_backward, accumulator.on_output_gradient, remembered))


@torch.no_grad()
def _backward(show: Callable[[Tensor, Any], None], remembered: Any, gradient: Tensor) -> None:
    show(gradient.detach(), remembered)
