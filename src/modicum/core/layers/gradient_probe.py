"""The gradient probe: the gradients of weights that nobody trains, one layer at a time.

A layer's gradient is made of its inputs and of the gradient of its output, so the weight may be
quantized, sharded or frozen, and none has a `.grad`. What is summed over examples lies on the host
or on disk; on the device there is never more than one layer's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modicum.core.clock import WIRE
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Loss, example_count, undisturbed
from modicum.core.layers.layer_sites import Site
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks, peer_errors
from modicum.core.ranks.turns import by_turns

UseGradient = Callable[[str, Tensor], Mapping[str, Tensor]]


def probe_gradients(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    use: UseGradient,
    *,
    sites: Sequence[Site],
    limit: int | None = None,
    ranks: Ranks | None = None,
    folder: str | Path | None = None,
    progress: CountProgress | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Sum the gradients of linear layers' weights over `batches`, and give each to `use`.

    The model runs in evaluation mode, blocks that are recomputed too, and is left as it was. The
    gradient is that of the loss, so what has no part in it, padding for example, counts nothing. A
    layer that is called several times has the sum over its calls.

    Args:
        batches: this rank's share alone; dimension 0 of the first tensor are the examples.
        loss: `loss(model, batch)`, one element: the sum of the examples' losses.
        use: `use(name, gradient)` for one layer after the other, with the sum over all examples of
            all ranks: [out, in] as of `nn.Linear`, fp32 or fp64, on the layer's device. It gives
            what is to be kept of it: tensors by name. Ranks take turns, and agree to the bit.
        sites: the linear layers.
        limit: stop after the batch that brings this rank's examples to as many.
        ranks: this process among others.
        folder: sums are kept in files there meanwhile; None: in memory, 4 bytes an element.
        progress: is called with the batches done, and of how many, where that is known.

    Returns:
        What `use` gave, by layer.

    Raises:
        InputError: a site is no linear layer; there is no example; the loss has no gradient, at
            all or at a layer; a gradient is not finite; or `use` raises it.

    >>> model = nn.Sequential(nn.Linear(3, 2, bias=False))
    >>> site = Site("0", "linear", 3, 2)
    >>> probe_gradients(
    ...     model,
    ...     [torch.eye(3)],
    ...     lambda model, batch: model(batch).sum(),
    ...     lambda name, gradient: {"gradient": gradient},
    ...     sites=[site],
    ... )
    {'0': {'gradient': tensor([[1., 1., 1.],
            [1., 1., 1.]])}}
    """
    ranks, known = ranks or Ranks(), {site.name: site for site in sites}
    total = len(batches) if isinstance(batches, Sequence) else None
    with _place(folder) as place:
        sums, seen = _Sums(model, known, place), 0
        with undisturbed(model), sums.hooks():
            for number, batch in enumerate(batches, start=1):
                seen += _take(model, batch, loss)
                if progress is not None:
                    progress(number, total)
                if limit is not None and seen >= limit:
                    break
        if not int(ranks.sum(seen)[0]):
            raise InputError("there is no example to look at", field="batches", value=0)

        def make(name: str, gradient: Tensor) -> Mapping[str, Tensor]:
            _check(name, gradient)
            device = next(model.get_submodule(name).parameters()).device
            return use(name, gradient.to(device))

        names = list(known)
        return dict(by_turns(names, make, ranks, read=partial(sums.of_all, ranks)))


def _take(model: nn.Module, batch: Any, loss: Loss) -> int:
    """Run one batch forward and backward, and say how many examples it has."""
    examples = example_count(batch)
    if not examples:
        return 0
    with torch.enable_grad():
        value = loss(model, batch)
        if not value.requires_grad:
            problem = "the loss has no gradient: none of the layers takes part in it"
            raise InputError(problem, field="loss")
        value.backward()
    return examples


def _check(name: str, gradient: Tensor) -> None:
    """Make sure that a layer's gradient says something.

    Raises:
        InputError: it is not finite, or zero everywhere.
    """
    if not gradient.isfinite().all():
        raise InputError("its gradient is not finite; look at the data and the loss", value=name)
    if not gradient.count_nonzero():
        problem = "the loss has no gradient at this layer; leave it out with `exclude`"
        raise InputError(problem, field="targets", value=name)


class _Sums:
    """Each layer's sum on the host, and the hooks that add to it."""

    def __init__(self, model: nn.Module, sites: Mapping[str, Site], place: Path | None) -> None:
        self.sites, self.place = sites, place
        for name, site in sites.items():
            if site.kind != "linear":
                problem = f"gradients are summed at linear layers alone, not at this {site.kind}"
                raise InputError(f"{problem}; exclude it", field="targets", value=name)
        self.layers = {name: model.get_submodule(name) for name in sites}
        self.found: dict[str, Tensor] = {}
        # What starts the graph: nothing before the first layer is differentiated.
        self.anchor = torch.zeros((), requires_grad=True)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Note the layers' calls for the length of a `with` block."""
        handles = [
            layer.register_forward_hook(partial(self._called, name), with_kwargs=True)
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, name: str, _: nn.Module, given: Any, named: Any, output: Tensor) -> Tensor:
        inputs = (given[0] if given else next(iter(named.values()))).detach()
        noted: Tensor = _Noted.apply(output, inputs, self.anchor, partial(self._add, name))
        return noted

    def _add(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        dtype = self.sites[name].dtype
        x = inputs.reshape(-1, inputs.shape[-1]).to(dtype)
        delta = gradient.reshape(-1, gradient.shape[-1]).to(dtype)
        total = self._sum(name)
        if delta.device == total.device:
            total.addmm_(delta.T, x)
        else:
            total.add_((delta.T @ x).to(total.device))

    def _sum(self, name: str) -> Tensor:
        """The layer's sum so far."""
        site = self.sites[name]
        shape = site.out_features, site.in_features
        if self.place is not None:  # mapped for this use, so that no other layer's is in memory
            file = str(self.place / str(list(self.sites).index(name)))
            mapped = torch.from_file(file, shared=True, size=site.elements, dtype=site.dtype)
            return mapped.view(shape)
        if name not in self.found:
            self.found[name] = torch.zeros(shape, dtype=site.dtype)
        return self.found[name]

    def of_all(self, ranks: Ranks, name: str, mine: bool) -> Tensor | None:
        """A layer's sum over all ranks, which is forgotten here; None where it is not asked for."""
        total = self._sum(name)
        if not ranks.alone:
            with ranks.clock(WIRE), peer_errors():
                dist.all_reduce(total)
        self.found.pop(name, None)
        return total if mine else None


class _Noted(torch.autograd.Function):
    """A layer's output as it is; in the backward pass its input and gradient are given to `add`.

    The input is saved as autograd saves it: so a block that is recomputed keeps none, and layers
    that read one tensor keep it once.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, inputs: Tensor, anchor: Tensor, add: Any) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.add = add
        return output.clone()  # what follows may change it in place

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inputs,) = ctx.saved_tensors
        with torch.autocast(gradient.device.type, enabled=False):
            ctx.add(inputs, gradient)
        return gradient, None, None, None


@contextmanager
def _place(folder: str | Path | None) -> Iterator[Path | None]:
    """A folder for files that are gone afterwards, if they are asked for."""
    if folder is None:
        yield None
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="gradients-") as made:
        yield Path(made)
