"""A model whose blocks lose units: the runtime that removes them, gives them back, and files it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from modicum.compress import files
from modicum.compress.base import Compressor
from modicum.compress.pruned_parts import PrunedPart, PrunerQuery, planned
from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.errors import InputError
from modicum.core.layers.calibration import Calibration
from modicum.core.layers.full_model import FullModel, note_full_model
from modicum.core.layers.map_edits import tensor_of
from modicum.core.layers.map_kept import KeptUnits, Reduction
from modicum.core.progress import CountProgress
from modicum.core.ranks.ranks import Ranks

Worth = Callable[[Calibration], Mapping[str, Tensor]]


@dataclass(frozen=True)
class PartReport:
    """What became of a part.

    Args:
        name: of the module around the units.
        kind: `neurons`, or `groups` of heads.
        units, kept: how many there were, and are.
        bytes_before, bytes_after: of the part's tensors.
        worth: the share of what all its units were worth that was kept; 1 where that was nothing.
    """

    name: str
    kind: str
    units: int
    kept: int
    bytes_before: int
    bytes_after: int
    worth: float


@dataclass(frozen=True)
class PruningReport:
    """What became of each part that lost units."""

    parts: tuple[PartReport, ...]

    @property
    def bytes_before(self) -> int:
        """Of the tensors of all these parts."""
        return sum(part.bytes_before for part in self.parts)

    @property
    def bytes_after(self) -> int:
        """Of what is left of them."""
        return sum(part.bytes_after for part in self.parts)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values."""
        sums = {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}
        return sums | {"parts": [asdict(part) for part in self.parts]}


class PrunedModel:
    """The handle to a model and the units that it loses; `UnitPruner.fit`, `wrap`, `bind` make it.

    Args:
        parts: what loses units.
        method: what chooses them; None where they were chosen before.
        worth: gives what the units of each part are worth, by the name of the units; None likewise.

    Attributes:
        plan: the widths of the blocks that lose units.
        reduction: which units are kept; None before `fit`, and where `wrap` made it small.
        report: what `fit` did; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: tuple[PrunedPart, ...],
        method: Compressor | None = None,
        worth: Worth | None = None,
    ) -> None:
        self.model, self.parts, self.method, self._worth = model, parts, method, worth
        self.plan = planned(parts, None)
        self.reduction: Reduction | None = None
        self.report: PruningReport | None = None
        self._small = False

    def wrap(self) -> None:
        """Make it small, its numbers undefined: to load numbers into, or on meta.

        Raises:
            InputError: it is small already.
        """
        self._check_full()
        _first_of(self.parts).apply(self.model)
        self._small = True

    def fit(
        self,
        calibration: Calibration,
        *,
        ranks: Ranks | None = None,
        progress: CountProgress | None = None,
    ) -> PruningReport:
        """Remove the units that are worth least; make optimizers afterwards.

        Several `ranks` that hold the same weights remove the same units.

        Args:
            progress: is called with the parts done, and of how many.

        Raises:
            InputError: the weights have no memory, it is small already, the calibration lacks what
                the method asks for, or a worth is not finite.
        """
        self._check_full()
        if self._worth is None:
            raise InputError("which units of this model go was chosen before")
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise InputError("this needs the trained weights, and this model has no memory")
        worth = {name: each.double().cpu() for name, each in self._worth(calibration).items()}
        for name, each in worth.items():
            if not each.isfinite().all():
                raise InputError("what its units are worth is not finite", value=name)
        ranks = ranks or Ranks()
        chosen = ranks.broadcast([_most(worth[p.units.name], p.keep) for p in self.parts])
        kept = [
            KeptUnits(part.units, tuple(places))
            for part, places in zip(self.parts, chosen, strict=True)
        ]
        before = [self._bytes(part) for part in self.parts]
        self.reduction = Reduction(tuple(kept))
        self.reduction.apply(self.model)
        self._small = True
        note_full_model(self.model, FullModel(self.reduction))
        rows = []
        for part, stays, bytes_before in zip(self.parts, kept, before, strict=True):
            own = worth[part.units.name]
            total = own.sum().item()
            share = own[list(stays.kept)].sum().item() / total if total else 1.0
            counts = part.units.count, part.keep
            names = part.units.name, part.units.kind
            rows.append(PartReport(*names, *counts, bytes_before, self._bytes(part), share))
            if progress is not None:
                progress(len(rows), len(self.parts))
        self.report = PruningReport(tuple(rows))
        return self.report

    def merge(self) -> None:
        """Give the model its full shapes, with zeros for what was removed; it computes the same.

        For files that know the full shapes alone.

        Raises:
            InputError: it is not small, or it is not known which units are left.
        """
        if self.reduction is None:
            raise InputError("which units of this model are left is not known")
        self.reduction.restore(self.model)
        note_full_model(self.model, None)
        self.reduction, self._small = None, False

    def ledger(self, shape: ModelQuery) -> Ledger:
        """What the small model spends beyond the full one, at the shape of a micro-batch."""
        if self.method is None:
            return Ledger.sum(part.ledger(shape) for part in self.parts)
        asked = (PrunerQuery(part, shape) for part in self.parts)
        return Ledger.sum(self.method.ledger(at) for at in asked)

    def facts(self) -> dict[str, Any]:
        """What was done, as plain values that go next to the model's files."""
        kept = {} if self.reduction is None else {"kept": self.reduction.as_json()}
        return kept | ({} if self.report is None else {"report": self.report.as_json()})

    def save(self, folder: str | Path, *, write: bool = True) -> Path:
        """Write the small model; `modicum.compress.load` reads it. See `files.save`."""
        kept = self.reduction.as_json() if self.reduction is not None else None
        return files.save(self.model, self.plan, self.method, folder, write=write, kept=kept)

    # State

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that lost units, by name."""
        return {name: tensor_of(self.model, name).detach() for name in self._names(self.parts)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Put numbers back into a model that was wrapped.

        Raises:
            InputError: names or shapes are others than this model's.
        """
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if shapes != given:
            different = sorted(name for name, _ in shapes.items() ^ given.items())[:3]
            problem = "these numbers are another model's"
            raise InputError(problem, value=", ".join(different))
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state[name])

    def close(self) -> None:
        """Leave the model as it is."""

    def _bytes(self, part: PrunedPart) -> int:
        return sum(tensor_of(self.model, name).nbytes for name in self._names((part,)))

    @staticmethod
    def _names(parts: tuple[PrunedPart, ...]) -> dict[str, None]:
        return dict.fromkeys(piece.tensor for part in parts for piece in part.units.slices)

    def _check_full(self) -> None:
        if self._small:
            raise InputError("the units of this model were removed already")


def _first_of(parts: tuple[PrunedPart, ...]) -> Reduction:
    """The reduction that keeps the first units of every part."""
    return Reduction(tuple(KeptUnits(part.units, tuple(range(part.keep))) for part in parts))


def _most(worth: Tensor, keep: int) -> list[int]:
    """The places of the `keep` largest, in order; of equal ones those that come first."""
    places: list[int] = worth.argsort(descending=True, stable=True)[:keep].sort().values.tolist()
    return places
