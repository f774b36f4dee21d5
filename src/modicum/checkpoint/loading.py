"""A checkpoint that is there: what was noted in it, and its state, read when it is asked for.

Tensors are read one at a time and only as much of them as this rank needs, in whatever pieces they
were written. So any number of ranks takes up the state of any other.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from modicum.checkpoint.manifest import Damaged, check_files, dtype_of, pieces_of, read_manifest
from modicum.checkpoint.tensor_file import read_into
from modicum.checkpoint.tensor_slices import Box, box_of
from modicum.core.contracts.state import Like, StateRegistry, View
from modicum.core.errors import InputError
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, laid_like


def own_name(view: str, rank: int) -> str:
    """The name under which the state of a view that each rank has its own of is kept."""
    return f"{view}#{rank}"


def saved_names(content: Mapping[str, Any]) -> list[str]:
    """The names under which a manifest's views are kept, one a rank for those of each rank."""
    return [
        name
        for view, each in content["views"].items()
        for name in ([own_name(view, rank) for rank in range(content["ranks"])] if each else [view])
    ]


class SavedView(Mapping[str, Any]):
    """The state of one view in a checkpoint; a tensor is read each time it is asked for.

    Args:
        folder: the checkpoint's.
        content: of its manifest.
        name: the view's there.
        like: the tensors that entries are laid out as, as in `View`.
    """

    def __init__(
        self, folder: Path, content: Mapping[str, Any], name: str, like: Like = lambda _: None
    ) -> None:
        self._folder, self._content, self._prefix, self._like = folder, content, f"{name}/", like
        self._values: Mapping[str, Any] = content["values"].get(name, {})
        self._tensors = [
            full.removeprefix(self._prefix)
            for full in content["tensors"]
            if full.startswith(self._prefix)
        ]
        self._known = set(self._tensors)

    def __getitem__(self, key: str) -> Any:
        return self._tensor(key) if key in self._known else self._values[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._values

    def __len__(self) -> int:
        return len(self._tensors) + len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._known or key in self._values

    def _tensor(self, key: str) -> Tensor:
        name = self._prefix + key
        shape = tuple(self._content["tensors"][name]["shape"])
        like = self._like(key)
        if like is None or tuple(like.shape) != shape:
            return self._read(name, ((0,) * len(shape), shape), torch.device("cpu"))
        local = self._read(name, box_of(like), like.device)
        return laid_like(local, like) if is_sharded(like) else local

    def _read(self, name: str, box: Box, device: torch.device) -> Tensor:
        tensor = torch.empty(box[1], dtype=dtype_of(self._content, name), device=device)
        filled = 0
        for file, pieces in pieces_of(self._content, name).items():
            path = self._folder / file
            try:
                filled += read_into(tensor, box, path, pieces)
            except (OSError, SafetensorError, ValueError, RuntimeError) as error:
                raise Damaged(f"damaged: {error}", file=path) from None
        if filled != math.prod(box[1]):
            raise Damaged(f"damaged: {name} is not all there", file=self._folder)
        return tensor


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its step, and what was noted next to the state."""

    folder: Path
    step: int
    notes: Mapping[str, Any]
    content: Mapping[str, Any] = field(repr=False)
    ranks: Ranks = field(default_factory=Ranks, repr=False)

    @classmethod
    def of(cls, folder: Path, ranks: Ranks | None = None, *, check: bool = True) -> Checkpoint:
        """The checkpoint in a folder.

        Args:
            check: whether all files are compared with their checksums.

        Raises:
            Damaged: it is not what was written.
            InputError: another version of modicum wrote it, it may not be read, or it is a state
                that `SafetensorsWriter` wrote.
        """
        content = read_manifest(folder)
        if "views" not in content:
            raise InputError("holds what dcp.save wrote, and no run's checkpoint", file=folder)
        if check:
            check_files(folder, content)
        return cls(folder, content["step"], content["notes"], content, ranks or Ranks())

    @property
    def saved_by(self) -> int:
        """How many ranks wrote it."""
        return int(self.content["ranks"])

    @property
    def state(self) -> dict[str, SavedView]:
        """The state by view; what each rank has of its own is named `view#rank`."""
        names = saved_names(self.content)
        return {name: SavedView(self.folder, self.content, name) for name in names}

    def load(self, registry: StateRegistry, *, skip: Collection[str] = ()) -> None:
        """Take up the state, sharded as this run's tensors are; every rank calls this.

        Args:
            registry: whose views take it up.
            skip: views that are left as they are, whether they are in the checkpoint or not.

        Raises:
            InputError: a view has no state here, or there is state that nobody owns; or what a
                view says of its own state.
            Damaged: something cannot be read.
        """
        try:
            registry.check(self.content["views"], skip)
            for name, view in registry.views.items():
                if name not in skip:
                    view.write(self._of(view))
        except InputError as error:
            if error.file is not None:
                raise
            raise error.located(file=self.folder) from None

    def _of(self, view: View) -> Mapping[str, Any]:
        if view.per_rank != self.content["views"][view.name]:
            raise InputError(
                f"the checkpoint does not match this run: {view.name!r} is each rank's own in one "
                "of them and shared in the other"
            )
        if not view.per_rank:
            return SavedView(self.folder, self.content, view.name, view.like)
        if self.saved_by == self.ranks.size:
            own = SavedView(
                self.folder, self.content, own_name(view.name, self.ranks.rank), view.like
            )
            if view.suits is None or view.suits(own):
                return own
        if view.regroup is None:
            raise InputError(
                f"{view.name!r} was saved by {self.saved_by} ranks and cannot be taken up by "
                f"{self.ranks.size}; start as many as before"
            )
        names = [own_name(view.name, rank) for rank in range(self.saved_by)]
        return view.regroup([SavedView(self.folder, self.content, name) for name in names])
