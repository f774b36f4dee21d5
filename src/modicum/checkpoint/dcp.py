"""Storage for `torch.distributed.checkpoint` in this project's format: safetensors and JSON.

    dcp.save(state, storage_writer=SafetensorsWriter(folder))
    dcp.load(state, storage_reader=SafetensorsReader(folder))

The default planners pickle what is not a tensor. Writer and reader go past that: such values are
kept as JSON in the manifest. A checkpoint of a `CheckpointStore` can be read in the same way; its
tensors are named `view/key`. In contrast to that store the calls here exchange plans over the
process group as `torch.distributed.checkpoint` does it, which pickles them on the way.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from modicum.checkpoint.dcp_reader import SafetensorsReader
from modicum.checkpoint.manifest import FORMAT, tensor_file, tensors_text
from modicum.checkpoint.publishing import part_folder, publish
from modicum.checkpoint.tensor_file import FileLayout, streamed, write_file
from modicum.checkpoint.tensor_slices import DTYPES, TensorSlice
from modicum.core.files import disk_errors

__all__ = ["SafetensorsReader", "SafetensorsWriter"]

_OWN_WORD = "dcp"


class SafetensorsWriter(StorageWriter):
    """Writes a checkpoint folder: complete, or nothing that looks like one.

    Args:
        path: the folder, which all ranks see; one that is there is replaced at the end.

    >>> import tempfile, torch, warnings, torch.distributed.checkpoint as dcp
    >>> folder = Path(tempfile.mkdtemp()) / "one"
    >>> with warnings.catch_warnings(action="ignore"):  # that no process group is there
    ...     _ = dcp.save({"w": torch.ones(2), "n": 3}, storage_writer=SafetensorsWriter(folder))
    ...     state = {"w": torch.zeros(2), "n": 0}
    ...     dcp.load(state, storage_reader=SafetensorsReader(folder))
    >>> state
    {'w': tensor([1., 1.]), 'n': 3}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = Path(path)

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self.path

    @property
    def _part(self) -> Path:
        return part_folder(self.path, _OWN_WORD)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, perhaps in another folder."""
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is set up before all plans are made."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """A plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file, in a new folder."""
        with disk_errors(self.path):
            shutil.rmtree(self._part, ignore_errors=True)
            self._part.mkdir(parents=True)
        return [
            dataclasses.replace(plan, storage_data=tensor_file(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file.

        Raises:
            InputError: the disk is full or cannot be written.
            TypeError: something is neither a tensor that safetensors can hold nor JSON.
        """
        pieces = {item.index: _piece(item) for item in plan.items if item.tensor_data is not None}
        tensors = {
            pieces[item.index]: _tensor(planner, item)
            for item in plan.items
            if item.tensor_data is not None
        }
        values = [
            WriteResult(item.index, 0, {"value": _json(item.index.fqn, planner, item)})
            for item in plan.items
            if item.type == WriteItemType.BYTE_IO
        ]
        name, layout = plan.storage_data, FileLayout.of(list(tensors))
        with disk_errors(self.path):
            checksum = write_file(self._part / name, streamed(layout, tensors))
        entry = {"file": name, "bytes": layout.size, "crc32": checksum}
        results = [
            WriteResult(index, piece.nbytes, entry | {"piece": dataclasses.asdict(piece)})
            for index, piece in pieces.items()
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(values + results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and put the folder in its place."""
        owned: list[list[TensorSlice]] = [[] for _ in results]
        files: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for rank, written in enumerate(results):
            for result in written:
                told = result.storage_data
                if "value" in told:
                    values[result.index.fqn] = told["value"]
                    continue
                owned[rank].append(TensorSlice(**told["piece"]))
                files[told["file"]] = {"bytes": told["bytes"], "crc32": told["crc32"]}
        for path in self._part.iterdir():
            if path.name not in files:  # of a rank that had no tensors to write
                path.unlink()
        manifest = {
            "format": FORMAT,
            "files": files,
            "values": {"": values},
            "paths": {name: list(path) for name, path in (metadata.planner_data or {}).items()},
        }
        tensors = tensors_text(owned, (piece for pieces in owned for piece in pieces))
        publish(self._part, self.path, manifest, tensors)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this machine."""
        return "://" not in str(checkpoint_id)


def _piece(item: WriteItem) -> TensorSlice:
    data = item.tensor_data
    assert data is not None
    names = {dtype: name for name, dtype in DTYPES.items()}
    if data.properties.dtype not in names:
        raise TypeError(
            f"{item.index.fqn} is {data.properties.dtype}, which safetensors cannot hold"
        )
    return TensorSlice(
        item.index.fqn,
        names[data.properties.dtype],
        tuple(data.size),
        tuple(data.chunk.offsets),
        tuple(data.chunk.sizes),
    )


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor


def _json(name: str, planner: SavePlanner, item: WriteItem) -> Any:
    """A value that is not a tensor, as it was before the planner would pickle it."""
    if not hasattr(planner, "lookup_object"):
        raise TypeError(f"{type(planner).__name__} cannot give {name} without pickling it")
    value = planner.lookup_object(item.index)
    if repr(json.loads(json.dumps(value))) != repr(value):
        raise TypeError(f"{name} is {value!r}, which is another value when it comes from JSON")
    return value
