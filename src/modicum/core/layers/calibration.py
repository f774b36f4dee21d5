"""The calibration engine: one pass over data that notes what layers see and what the loss asks.

Knows a model, batches and a loss; gives sums by layer, in float64, that compression, quantization
and pruning choose by. The model is left as it was found: its mode, its gradients, its parameters.
Nothing of an example is kept once its batch is done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modicum.core.digest import tensors_digest
from modicum.core.errors import InputError
from modicum.core.layers.statistics import Calibration
from modicum.core.layers.watch import LayerWatch
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks

__all__ = ["Calibration", "calibrate"]

Loss = Callable[[nn.Module, Any], Tensor]
Mask = Callable[[Any], Tensor]


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss,
    *,
    layers: Iterable[str] | None = None,
    statistics: Sequence[str] = ("fisher",),
    limit: int | None = None,
    mask: Mask | None = None,
    ranks: Ranks | None = None,
    cache: str | Path | None = None,
    progress: CountProgress | None = None,
) -> Calibration:
    """Go through `batches` once and note what the layers' statistics ask for.

    The model runs in evaluation mode, and no gradient of a parameter is computed; a backward pass
    is made only where a statistic asks for output gradients. A batch's rows (dimension 0 of its
    first tensor, and of what layers see) are the examples: none may influence another's loss, and
    rows that hold several documents are one example each. Calibrate before blocks are compiled.

    Args:
        batches: tensors, or mappings, sequences or dataclasses of them; this rank's share alone.
        loss: `loss(model, batch)`, one element: the sum of the examples' losses. A mean over
            batches of one size serves too, as a factor common to all does not change what matters.
        layers: full names of linear layers; None for every `nn.Linear`.
        statistics: names in `modicum.core.layers.statistics.STATISTICS`.
        limit: stop after the batch that brings this rank's examples to as many.
        mask: `mask(batch)`, bool [B, T], true at positions that count; moments leave out the
            others. A layer that does not see T positions of an example is counted in full. Fisher
            information needs none: where padding has no part in the loss it has no gradient.
        ranks: this process among others; sums are then those of all, on every rank.
        cache: a folder that keeps calibrations by a digest of model, data and settings; batches
            are then gone through twice. The mask is known there by its values, the loss by its name
            alone, a `partial` by what it binds too: tensors and modules by their numbers.
        progress: is called with the batches done, and of how many, where that is known.

    Raises:
        InputError: a layer is never called or sees no complete examples, the loss has no gradient,
            or a sum is not finite.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> batches = [torch.randn(8, 3) for _ in range(2)]
    >>> found = calibrate(model, batches, lambda model, batch: model(batch).square().sum())
    >>> found.examples, found.mean("fisher", "0").shape
    (16, torch.Size([3]))
    """
    ranks = ranks or Ranks()
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    names = names if layers is None else list(layers)
    watch = LayerWatch(model, names, statistics)
    kept: Path | None = None
    if cache is not None:
        settings = [names, *statistics, limit, *_named(loss), mask is not None]
        digest = _digest(model, batches, mask, settings, ranks)
        kept = Path(cache) / f"{digest}.safetensors"
        # Rank 0 alone need see the folder: the others have nothing to add to what it read.
        if ranks.broadcast(kept.is_file()):
            return watch.result(ranks, Calibration.load(kept) if ranks.first else None)
    total = len(batches) if isinstance(batches, Sequence) else None
    with undisturbed(model), watch.hooks():
        for number, batch in enumerate(batches, start=1):
            _take(watch, model, batch, loss, mask)
            if progress is not None:
                progress(number, total)
            if limit is not None and watch.examples >= limit:
                break
    found = watch.result(ranks)
    if kept is not None and ranks.first:
        found.save(kept)
    return found


def _take(
    watch: LayerWatch,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    mask: Mask | None,
) -> None:
    """Run one batch, so that it is noted."""
    examples = example_count(batch)
    if not examples:
        return
    with watch.batch(examples, None if mask is None else mask(batch).bool()):
        value = loss(model, batch)
    if watch.backward:
        if not value.requires_grad:
            problem = "the loss has no gradient: no layer that is watched takes part in it"
            raise InputError(problem, field="loss")
        value.backward()
    watch.finish()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients of parameters, for a `with` block; then all as before."""
    training = [module for module in model.modules() if module.training]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.eval()
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in trained:
            parameter.requires_grad_(True)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in a batch, or of a module, in its order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _tensors(each)


def example_count(batch: Any) -> int:
    """How many examples a batch has: rows of its first tensor.

    Raises:
        InputError: it holds no tensor.
    """
    found = next(_tensors(batch), None)
    if found is None:
        raise InputError("a batch holds no tensor", field="batches", value=type(batch).__name__)
    return found.shape[0]


def _named(loss: Any) -> list[str]:
    """What a loss is known by: its module and name, of a `partial` what it binds too."""
    if isinstance(loss, partial):
        bound = [loss.args, sorted(loss.keywords.items())]
        # Of a large tensor, and of a module, the text leaves numbers out.
        numbers = tensors_digest(("", tensor) for tensor in _tensors(bound))
        return [*_named(loss.func), repr(bound), numbers]
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return [named.__module__, named.__qualname__]


def _numbers(batches: Iterable[Any], mask: Mask | None) -> Iterator[tuple[str, Tensor]]:
    """The tensors of all batches, each followed by what counts of it."""
    for batch in batches:
        yield from (("", tensor) for tensor in _tensors(batch))
        if mask is not None and example_count(batch):
            yield "mask", mask(batch).bool()


def _digest(
    model: nn.Module, batches: Iterable[Any], mask: Mask | None, settings: Any, ranks: Ranks
) -> str:
    """A digest of the model's numbers, every rank's data and what counts of it, and settings."""
    if iter(batches) is batches:
        problem = "a cache needs batches that can be gone through twice; give a list"
        raise InputError(problem, field="batches", value=type(batches).__name__)
    named = [*model.named_parameters(), *model.named_buffers()]
    mine = tensors_digest([*named, *_numbers(batches, mask)], json.dumps(settings))
    return hashlib.sha256(json.dumps(ranks.gather(mine)).encode()).hexdigest()[:32]
