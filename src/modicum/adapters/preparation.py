"""What an adapter finds out from data before the first update, and where that is kept.

A method with the trait `prepares_from_data` looks at the model and at batches once: it may choose
each layer's sizes, and give first values to its tensors. What it found is JSON and tensors by site;
a run keeps it in its folder, and a saved adapter has it too, so nothing is found out twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import base_weights
from modicum.adapters.sites import Site
from modicum.core.errors import InputError
from modicum.core.files import publish_folder, read_json, write_json
from modicum.core.layers.calibration import Loss, undisturbed
from modicum.core.layers.gradient_probe import UseGradient, probe_gradients
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks

CONFIG, WEIGHTS = "preparation.json", "preparation.safetensors"


def _silent(done: int, total: int | None) -> None:
    """Progress that nobody asked for."""


@dataclass(frozen=True)
class PreparationContext:
    """What an adapter may look at before it begins.

    Args:
        model: with its trained weights, in evaluation mode, and without this adapter; nothing of it
            is trained.
        sites: where the adapter will be.
        batches: this rank's share of the training data, in the order of training; take as many as
            it needs.
        loss: `loss(model, batch)`, one element: the sum over the batch.
        scratch: a folder for files that are large and not kept; None: memory.
        weights: gives the full-precision weight of a layer by its name, as the model's file stores
            it; None: the model's own.
    """

    model: nn.Module
    sites: tuple[Site, ...]
    batches: Iterable[Any]
    loss: Loss
    ranks: Ranks = field(default_factory=Ranks)
    seed: int = 0
    progress: CountProgress = _silent
    scratch: Path | None = None
    weights: Callable[[str], Tensor] | None = None

    def weight(self, site: Site) -> Tensor:
        """W [out, in] of a site, in full precision where somebody gives that; not to be changed.

        Raises:
            InputError: the reader gives another shape.
        """
        base = self.model.get_submodule(site.name)
        if self.weights is None:
            return base_weights.read(base, site)
        return base_weights.given(self.weights, site, base)

    def gradients(self, use: UseGradient, examples: int) -> dict[str, dict[str, Tensor]]:
        """What `use` makes of each site's gradient [out, in]; see `probe_gradients`.

        Args:
            examples: how many to look at, over all ranks.
        """
        return probe_gradients(
            self.model,
            self.batches,
            self.loss,
            use,
            sites=self.sites,
            limit=-(-examples // self.ranks.size),
            ranks=self.ranks,
            folder=self.scratch,
            progress=self.progress,
        )


@dataclass(frozen=True)
class Preparation:
    """What a method found out from data.

    Args:
        values: JSON by site, which `Site.prepared` then has: ranks, for example.
        tensors: by site, first values of the adapter's tensors there by name, unsharded.
    """

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it as a folder, atomically.

        Raises:
            InputError: the disk is full or cannot be written.
        """
        flat = {
            f"{site}/{name}": tensor.detach().contiguous().cpu()
            for site, tensors in self.tensors.items()
            for name, tensor in tensors.items()
        }
        with publish_folder(folder) as temporary:
            save_file(flat, temporary / WEIGHTS, metadata={"format": "pt"})
            write_json(temporary / CONFIG, {site: dict(own) for site, own in self.values.items()})

    @classmethod
    def load(cls, folder: Path) -> Preparation:
        """Read what `save` wrote.

        Raises:
            InputError: it is missing, or cannot be read.
        """
        values = read_json(folder / CONFIG)
        try:
            flat = load_file(folder / WEIGHTS)
        except (SafetensorError, OSError) as error:
            raise InputError(f"cannot be read: {error}", file=folder / WEIGHTS) from None
        tensors: dict[str, dict[str, Tensor]] = {}
        for key, tensor in flat.items():
            site, _, name = key.rpartition("/")
            tensors.setdefault(site, {})[name] = tensor
        return cls(values, tensors)


def prepared_by(
    prepare: Callable[[PreparationContext], Preparation], context: PreparationContext
) -> Preparation:
    """What a method finds out; the model is left as it was, and what came of it is looked at.

    Raises:
        InputError: it speaks of a layer that is no site, its values are no JSON, or a tensor has
            values that are not finite.
    """
    with undisturbed(context.model):
        found = prepare(context)
    names = {site.name for site in context.sites}
    for name in (*found.values, *found.tensors):
        if name not in names:
            raise InputError("the preparation speaks of a layer without adapter", value=name)
    for name, tensors in found.tensors.items():
        for key, tensor in tensors.items():
            if not tensor.isfinite().all():
                problem = "what the data gave for it is not finite"
                raise InputError(problem, field=key, value=name)
    values = json.loads(json.dumps({site: dict(own) for site, own in found.values.items()}))
    return Preparation(values, found.tensors)
