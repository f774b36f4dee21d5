"""Which full model a small one has a part of: known to the model itself, and kept in its folder.

What is learned on a model that lost units can then be written for the model that has them all.
Survives training: the small model's folder says it anew, next to other weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from modicum.core.errors import InputError
from modicum.core.files import read_json, write_json
from modicum.core.layers.map_kept import Reduction
from modicum.core.torch_private import COMPILED_NAME
from modicum.core.weight_digests import changed_weights, weight_digests

COMPRESSION = "compression.json"  # next to the weights: by what they came, and what was kept
_NOTE = "_part_of_full_model"
_UNITS, _FOLDER, _DIGESTS, _OWN = "units", "full_model", "full_weights", "weights"


@dataclass(frozen=True)
class FullModel:
    """The model of which a small one has a part.

    Args:
        reduction: which of its units the small one has.
        folder: where its files are; None: nobody has said it.
        weights: the digests of its weight files, as `weight_digests` gives them.
    """

    reduction: Reduction
    folder: str | None = None
    weights: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            _FOLDER: self.folder,
            _DIGESTS: dict(self.weights),
            _UNITS: self.reduction.described(),
        }

    def write(self, folder: Path, about: Mapping[str, Any] | None = None) -> None:
        """Say it in a small model's folder, with the digests of the weights there.

        Args:
            about: what else the file is to say.
        """
        content = {**(about or {}), **self.as_json(), _OWN: weight_digests(folder)}
        write_json(folder / COMPRESSION, content)

    @classmethod
    def read(cls, folder: Path | None) -> FullModel | None:
        """What a small model's folder says; None where it is no part of another.

        Raises:
            InputError: the file is damaged, or is of other weights than those next to it.
        """
        file = None if folder is None else folder / COMPRESSION
        if folder is None or file is None or not file.is_file():
            return None
        said = read_json(file)
        if not isinstance(said, dict) or _UNITS not in said:
            return None
        place, digests, own = said.get(_FOLDER), _digests(said, _DIGESTS), _digests(said, _OWN)
        if not isinstance(place, str | None) or digests is None or own is None:
            raise InputError("does not say which model has all units, and by digests", file=file)
        try:
            reduction = Reduction.from_description(said[_UNITS])
        except InputError as error:
            raise error.located(file=file) from None
        if changed := changed_weights(folder, own):
            raise InputError(
                f"says which units the weights next to it have, and these are others "
                f"({changed[0]}); take the folder as the run left it",
                file=file,
            )
        return cls(reduction, place, digests)


@dataclass(frozen=True)
class LayerPart:
    """A layer that lost places, as a part of the layer that has them all.

    Args:
        name: of the layer in the full model.
        transposed: whether it stores W^T.
    """

    reduction: Reduction
    name: str
    transposed: bool

    def factors(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """See `Reduction.restored_factors`."""
        return self.reduction.restored_factors(self.name, a, b, transposed=self.transposed)

    def kept(self, a: Tensor) -> Tensor | None:
        """Which inputs of the full layer the small one has, for its A [r, in]; None: all."""
        dim = 0 if self.transposed else 1
        removed = self.reduction.removed_places(f"{self.name}.weight", dim)
        return self.reduction.places(f"{self.name}.weight", dim, a.shape[1] + len(removed))

    @property
    def digest(self) -> int:
        """A number below 2^62 that says which places were removed."""
        gone = [self.reduction.removed_places(f"{self.name}.weight", dim) for dim in (0, 1)]
        text = json.dumps([sorted(places.tolist()) for places in gone])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2


def note_full_model(model: nn.Module, full: FullModel | None) -> None:
    """Have a model know of which full one it is a part; None: of none.

    Raises:
        InputError: the units are those of another model.
    """
    if full is None:
        model.__dict__.pop(_NOTE, None)
        return
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for part in full.reduction.parts:
        for piece in part.units.slices:
            if piece.tensor.rpartition(".")[0] not in known:
                problem = "the units that it is said to have are those of another model"
                raise InputError(problem, value=piece.tensor)
    model.__dict__[_NOTE] = full


def full_model_of(model: nn.Module) -> FullModel | None:
    """Of which full model a model, or one in it, is known to be a part."""
    return next(iter(parts_of_full(model).values()), None)


def parts_of_full(model: nn.Module) -> Mapping[str, FullModel]:
    """By the name of the module that is a part of a full model, that model."""
    noted = ((path, module.__dict__.get(_NOTE)) for path, module in model.named_modules())
    return {path: full for path, full in noted if isinstance(full, FullModel)}


def part_of(notes: Mapping[str, FullModel], name: str, *, transposed: bool) -> LayerPart | None:
    """A layer as a part of the full model's; None where it lost nothing.

    Args:
        notes: of its model, from `parts_of_full`.
    """
    for path, full in notes.items():
        if path and not name.startswith(f"{path}."):
            continue
        inner = name.removeprefix(f"{path}.") if path else name
        plain = ".".join(each for each in inner.split(".") if each != COMPILED_NAME)
        tensor = f"{plain}.weight"
        if any(len(full.reduction.removed_places(tensor, dim)) for dim in (0, 1)):
            return LayerPart(full.reduction, plain, transposed)
    return None


def _digests(said: Mapping[str, Any], key: str) -> dict[str, str] | None:
    raw = said.get(key)
    if not isinstance(raw, dict):
        return None
    return raw if all(isinstance(each, str) for pair in raw.items() for each in pair) else None
