"""An adapter folded into a LoRA of a given rank, and how much of it that loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from modicum.adapters.adapted_layer import AdaptedLayer, worn
from modicum.adapters.adapter_layer import COPY, AdapterLayer
from modicum.adapters.attachment import Attachment
from modicum.adapters.lora import LoRA
from modicum.adapters.lora_layer import LoRALayer
from modicum.adapters.merging import merged_map
from modicum.adapters.names import plain_name
from modicum.core.errors import InputError
from modicum.core.layers.truncated_svd import truncated_svd

TOLERANCE = 0.01
_DIRECT = 1024  # the smaller width up to which LAPACK's SVD takes a second at most
_ITERATIONS = 4


@dataclass(frozen=True)
class Folding:
    """What a LoRA of rank r has of an adapter's change, and what it lacks.

    Attributes:
        rank: r; a layer that is narrower has its own width.
        weights: the norm of what is lost over that of the change, of all layers together.
        by_layer: the same of each layer, by its plain name; 0 where nothing changes.
        logits: the norm of the difference that this makes to the model's outputs on batches, over
            the norm of what the adapter changes there; None: there were no batches.
        factors: A [r, in] and B [out, r] of each layer, whose change is B A.
    """

    rank: int
    weights: float
    by_layer: Mapping[str, float]
    logits: float | None = None
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        text = f"a LoRA of rank {self.rank} loses {self.weights:.2g} of the change of the weights"
        if self.logits is None:
            return text
        return f"{text} and {self.logits:.2g} of that of the held-out logits"

    def check(self, tolerance: float) -> None:
        """Make sure that what is lost is at most `tolerance`: of logits where these are known.

        Raises:
            InputError: it is more.
        """
        lost = self.weights if self.logits is None else self.logits
        if not lost <= tolerance:
            raise InputError(
                f"{self}, and {tolerance:.2g} is allowed; give a higher rank or tolerance, use "
                'form="modicum", or merge it and save the model',
                field="rank",
                value=self.rank,
            )


@torch.no_grad()
def folded(attached: Attachment, rank: int, batches: Iterable[Any] | None = None) -> Folding:
    """The LoRA of a rank that is nearest to an adapter's change of each layer, by its SVD.

    Widths above 1,024 take a randomized SVD; the errors are of what it found. With sharded layers
    every rank calls this.

    Args:
        batches: what the model is called with, unpacked where it is a mapping or a tuple; None: the
            error of its outputs is not measured.

    Raises:
        InputError: the rank is no positive number; the adapter has no dense form, is merged, or
            also changes biases, for which a LoRA has no place; the change is not finite.

    Source: Eckart and Young, "The approximation of one matrix by another of lower rank",
    Psychometrika 1 (1936).

    >>> from modicum.adapters import LoRA
    >>> adapter = LoRA(rank=2).attach(nn.Sequential(nn.Linear(8, 8)))
    >>> nn.init.normal_(next(adapter.layers())[1].B).shape
    torch.Size([8, 2])
    >>> folded(adapter, 2).weights < 1e-6, folded(adapter, 1).weights > 0.01
    (True, True)
    """
    if type(rank) is not int or rank < 1:
        raise InputError("must be a positive integer", field="rank", value=rank)
    if "mergeable" not in attached.method.traits:
        raise InputError(
            f"{attached.method.info.name} has no dense form, so no LoRA is near it; use "
            'form="modicum"'
        )
    factors, errors, sizes = {}, {}, {}
    for name, layer in attached.layers():
        change = _change(attached, name, layer)
        exact = min(change.shape) <= _DIRECT
        left, values, right = truncated_svd(
            change,
            min(rank, *change.shape),
            None if exact else _ITERATIONS,
            seed=attached.seed,
            name=f"{plain_name(name)}/folded",
        )
        root = values.sqrt()
        a, b = root[:, None] * right, left * root
        factors[name] = a.contiguous(), b.contiguous()
        errors[name], sizes[name] = float((change - b @ a).norm()), float(change.norm())
    by_layer = {plain_name(n): e / sizes[n] if sizes[n] else 0.0 for n, e in errors.items()}
    size = _norm(sizes.values())
    lost = _norm(errors.values()) / size if size else 0.0
    logits = None if batches is None else _of_outputs(attached, factors, batches)
    return Folding(rank, lost, by_layer, logits, factors)


def _change(attached: Attachment, name: str, layer: AdapterLayer) -> Tensor:
    if layer.merged:
        problem = "the adapter is merged; unmerge it first, or save the model"
        raise InputError(problem, value=attached.name)
    weight, change = merged_map(attached.model.get_submodule(name), layer)
    for part in (change.weight, change.bias):
        if part is not None and not part.isfinite().all():
            problem = "its change of this layer is not finite, so it has no singular values"
            raise InputError(problem, value=plain_name(name))
    if change.bias is not None and change.bias.any():
        raise InputError(
            "it changes the bias of this layer too, for which a LoRA has no place; use "
            'form="modicum", or merge it and save the model',
            value=plain_name(name),
        )
    return torch.zeros_like(weight) if change.weight is None else change.weight


def _norm(values: Iterable[float]) -> float:
    return sum(value**2 for value in values) ** 0.5


def _of_outputs(
    attached: Attachment, factors: Mapping[str, tuple[Tensor, Tensor]], batches: Iterable[Any]
) -> float:
    """What the factors instead of the adapter do to outputs, over what the adapter does."""
    model, lost, changed, seen = attached.model, 0.0, 0.0, False
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for batch in batches:
            seen = True
            with _using(attached, lambda layer: layer):
                ours = _outputs(model, batch)
            with _using(attached, lambda layer: _as_lora(layer, factors)):
                theirs = _outputs(model, batch)
            with _using(attached, lambda layer: None):
                before = _outputs(model, batch)
            lost += float((theirs - ours).square().sum())
            changed += float((ours - before).square().sum())
    finally:
        for module, mode in training.items():
            module.training = mode
    if not seen:
        raise InputError("there is no batch to measure the error of", field="batches")
    return (lost / changed) ** 0.5 if changed else lost**0.5


def _outputs(model: nn.Module, batch: Any) -> Tensor:
    """What a model gives for a batch, in fp64: a tensor, the first of several, or its `logits`."""
    if isinstance(batch, Mapping):
        found = model(**batch)
    else:
        found = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    found = getattr(found, "logits", found)
    tensor = found[0] if isinstance(found, tuple | list) else found
    if not isinstance(tensor, Tensor):
        problem = "the model gives no tensor and no `logits` for it"
        raise InputError(problem, field="batches", value=type(tensor).__name__)
    return tensor.double()


def _as_lora(layer: AdapterLayer, factors: Mapping[str, tuple[Tensor, Tensor]]) -> AdapterLayer:
    """A layer with these factors instead of an adapter's own, and with its copies."""
    if layer.site.name not in factors:
        return layer
    a, b = factors[layer.site.name]
    made = LoRALayer(LoRA(rank=a.shape[0]), layer.site, layer.shared)
    made.A, made.B = nn.Parameter(a), nn.Parameter(b)
    for leaf, copy in layer.copies().items():
        made.register_parameter(f"{COPY}{leaf}", nn.Parameter(copy, requires_grad=False))
    made.put_on(layer.layer)
    return made


@contextmanager
def _using(
    attached: Attachment, instead: Callable[[AdapterLayer], AdapterLayer | None]
) -> Iterator[None]:
    """The model in which something else, or nothing, computes where the adapter is."""
    taken = worn(attached.model)
    name = next(f"folded_{n}" for n in range(len(taken) + 1) if f"folded_{n}" not in taken)
    changed: list[tuple[AdaptedLayer, tuple[str, ...]]] = []
    try:
        for site, layer in attached.everywhere():
            there, other = attached.model.get_submodule(site), instead(layer)
            assert isinstance(there, AdaptedLayer)
            changed.append((there, there.active))
            order = (
                there.active if attached.name in there.active else (*there.active, attached.name)
            )
            if other is None:
                there.active = tuple(each for each in order if each != attached.name)
            elif other is layer:
                there.active = order
            else:
                there.layers_by_adapter[name] = other.eval()
                there.active = tuple(name if each == attached.name else each for each in order)
        yield
    finally:
        for there, active in changed:
            there.active = active
            if name in there.layers_by_adapter:
                del there.layers_by_adapter[name]
