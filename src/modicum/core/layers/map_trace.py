"""One forward pass in which labels follow the channels of each layer from operator to operator.

What the operators tell: which parameter makes a product, what its input was, what queries, keys
and values of an attention are, and what is added to what. Values are never looked at, but by a
mixture of experts, which must choose some. Knows nothing of what a head or a block is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modicum.core.layers.linear_forms import form_of
from modicum.core.layers.map_calls import ExpertsCall, NormCall, Trace, tensors
from modicum.core.layers.map_labels import Labels, Trail, laid, layers_along, mixed
from modicum.core.layers.map_products import LabelledProducts, plain
from modicum.core.layers.map_values import values_for
from modicum.core.torch_private import operators_shown


def trace(model: nn.Module, names: Mapping[int, str], run: Callable[[], Any]) -> Trace:
    """Run the model once and follow channels.

    Args:
        names: of parameters by their id; a tensor with several names has one here.
        run: calls the model and gives its output.
    """
    follower = _Follower(model, names)
    with torch.no_grad(), values_for(model), ExitStack() as stack:
        for handle in follower.hooks():
            stack.callback(handle.remove)
        with operators_shown(follower.see):
            output = run()
    follower.finish(output)
    return follower.found


class _Follower(LabelledProducts):
    """Notes which modules run, and takes norms and experts as one step each."""

    def hooks(self) -> Iterator[Any]:
        """Register what notes the calls of modules."""
        for name, module in self.model.named_modules():
            opaque = _kind(module)
            yield module.register_forward_pre_hook(partial(self._enter, name, opaque))
            yield module.register_forward_hook(
                partial(self._leave, name, opaque), with_kwargs=True, prepend=True
            )

    def _enter(self, name: str, opaque: str, module: nn.Module, args: Any) -> None:
        if not self._inside:
            self.found.called.append(name)
            self._path.append(name)
        if opaque or self._inside:
            self._inside.append(name)

    def _leave(
        self, name: str, opaque: str, module: nn.Module, args: Any, kwargs: Any, out: Any
    ) -> None:
        if self._inside:
            self._inside.pop()
        if self._inside:
            return
        self._path.pop()
        given = next((t for t in tensors((args, kwargs))), None)
        if opaque == "codes":
            self._lose([t for t in [self.trail(given)] if t], f"the codes of {name}", out)
        elif opaque and given is not None and isinstance(out, Tensor):
            (self._normed if opaque == "norm" else self._chosen)(name, module, given, out)

    def _normed(self, name: str, module: nn.Module, given: Tensor, out: Tensor) -> None:
        trail, size = self.trail(given), next(module.parameters()).numel()
        if trail is None:
            return
        if out.shape != given.shape:
            self._lose([trail], f"the module {name}", out)
            return
        before = self.origins.aligned(trail, given.ndim)
        if before is not None and before[0].size == size:
            self._use([trail], "a norm")
            origin = self.origins.new("norm", name, size)
            self.origins.tie(origin, before[0])
            self._set(out, Trail((Labels(laid(origin, out.shape, before[1])),)))
            self.found.norms.append(NormCall(name, origin, before[0], None, out.shape))
            return
        labels = trail.layers[0].labels if len(trail.layers) == 1 else None
        self.found.norms.append(NormCall(name, None, None, labels, out.shape))
        self._set(out, mixed([trail], out.shape, f"norm {name}"))

    def _chosen(self, name: str, module: nn.Module, given: Tensor, out: Tensor) -> None:
        trail = self.trail(given)
        known = layers_along(trail, given.ndim - 1)
        origin = self.origins.new("experts", name, out.shape[-1])
        self.found.experts.append(ExpertsCall(name, origin, known))
        if trail is not None and not plain(known):
            self._use([trail], "experts")
        self._set(out, Trail((Labels(laid(origin, out.shape, out.ndim - 1)),)))

    def finish(self, output: Any) -> None:
        """Note which origins the model gives as they are."""
        for tensor in tensors(output):
            for layer in (self.trail(tensor) or Trail()).layers:
                origins = {self.origins.of(int(v)).number for v in layer.labels.unique() if v >= 0}
                self.found.made += [self.origins.all[number] for number in sorted(origins)]


def _kind(module: nn.Module) -> str:
    """Whether a module is taken as one step: a norm or a scale, experts, codes; else ""."""
    if (form := form_of(module)) is not None and not form.trains:
        return "codes"
    own = list(module.parameters(recurse=False))
    if not own or any(True for child in module.children() for _ in child.parameters()):
        return ""
    if any(p.ndim == 3 for p in own) and all(p.ndim in (2, 3) for p in own):
        return "experts" if max(p.shape[0] for p in own) == min(p.shape[0] for p in own) else ""
    return "norm" if all(p.ndim == 1 for p in own) and len({p.numel() for p in own}) == 1 else ""
