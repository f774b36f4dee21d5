"""The reading side of `modicum.checkpoint.dcp`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from modicum.checkpoint.manifest import check_files, pieces_of, read_manifest
from modicum.checkpoint.publishing import put_back
from modicum.checkpoint.tensor_file import read_into
from modicum.checkpoint.tensor_slices import DTYPES


class SafetensorsReader(StorageReader):
    """Reads a checkpoint folder; of tensors, what this rank needs.

    Args:
        path: the folder.
        check: whether all files are compared with their checksums first.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = True) -> None:
        super().__init__()
        self.path, self.check = Path(path), check
        self._content: dict[str, Any] = {}
        self._values: dict[str, Any] = {}

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self.path

    @property
    def values(self) -> dict[str, Any]:
        """What is not a tensor, by its name, as it is in the folder."""
        self._open()
        return self._values

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, perhaps in another folder."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)
        self._content, self._values = {}, {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What there is.

        Raises:
            Damaged: the checkpoint is not what was written.
        """
        self._open()
        known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            name: BytesStorageMetadata() for name in self._values
        }
        for name, tensor in self._content["tensors"].items():
            chunks = [
                ChunkStorageMetadata(torch.Size(box["offsets"]), torch.Size(box["sizes"]))
                for box in tensor["pieces"]
            ]
            properties = TensorProperties(dtype=DTYPES[tensor["dtype"]])
            known[name] = TensorStorageMetadata(properties, torch.Size(tensor["shape"]), chunks)
        paths = {name: tuple(path) for name, path in self._content.get("paths", {}).items()}
        meta = StorageMeta(checkpoint_id=self.path)
        return Metadata(known, planner_data=paths or None, storage_data={}, storage_meta=meta)

    def _open(self) -> None:
        if self._content:
            return
        put_back(self.path)
        content = read_manifest(self.path)
        if self.check:
            check_files(self.path, content)
        self._content = content
        for view, values in content["values"].items():
            prefix = f"{view}/" if view else ""
            self._values |= {prefix + key: value for key, value in values.items()}

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Ranks other than the coordinator read the manifest here."""
        self._open()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """A plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that the plan asks for.

        Raises:
            TypeError: the planner can take a value that is not a tensor from a pickle alone.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _put(planner, item, self._values[item.storage_index.fqn])
            else:
                self._read_tensor(planner, item)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_tensor(self, planner: LoadPlanner, item: ReadItem) -> None:
        index: MetadataIndex = item.storage_index
        origin = tuple(index.offset or (0,) * len(item.lengths))
        for file, pieces in pieces_of(self._content, index.fqn).items():
            wanted = [piece for piece in pieces if piece.offsets == origin]
            if not wanted:
                continue
            start = tuple(a + b for a, b in zip(origin, item.storage_offsets, strict=True))
            target = planner.resolve_tensor(item).detach()
            read_into(target, (start, tuple(item.lengths)), self.path / file, wanted)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this machine."""
        return "://" not in str(checkpoint_id)


def _put(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Put a value where the default planner's `load_bytes` puts what it unpickles."""
    if not isinstance(planner, DefaultLoadPlanner):
        raise TypeError(f"{type(planner).__name__} cannot take a value that is not pickled")
    name = item.dest_index.fqn
    if not planner.flatten_state_dict:
        planner.state_dict[name] = planner.original_state_dict[name] = value
        return
    *way, last = planner.mappings[name]
    place: Any = planner.original_state_dict
    for step in way:
        place = place[step]
    place[last] = value
