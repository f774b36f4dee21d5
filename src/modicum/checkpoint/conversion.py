"""A run's checkpoint in the form of `torch.distributed.checkpoint`, and back.

PyTorch's own form has a pickle in it, the file `.metadata`. It is written here, by PyTorch, and
never read: what comes back was saved with `modicum.checkpoint.dcp.SafetensorsWriter`. Tensors keep
their views and names, `{"model": {"layers.0.weight": ...}}`. All else that makes a checkpoint one
that a run resumes from is JSON, in one text under the name `modicum`.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from modicum.checkpoint.dcp import SafetensorsReader
from modicum.checkpoint.loading import Checkpoint, saved_names
from modicum.checkpoint.manifest import FORMAT, MANIFEST, dtype_of, tensor_file, tensors_text
from modicum.checkpoint.publishing import part_folder, publish
from modicum.checkpoint.store import CheckpointStore
from modicum.checkpoint.tensor_file import FileLayout, streamed, write_file
from modicum.checkpoint.tensor_slices import TensorSlice
from modicum.core.errors import InputError
from modicum.core.files import disk_errors, sync
from modicum.core.run_folders import nearest_run

CheckpointForm = Literal["dcp", "modicum"]
_REST = "modicum"  # the name of what is not a tensor
_KEPT = ("step", "ranks", "notes", "views", "values")  # of a manifest


def convert(
    source: Path, target: Path, to: CheckpointForm, warn: Callable[[str], None] = lambda _: None
) -> Path:
    """Write a checkpoint again in another form: the complete new folder, or none at all.

    Args:
        source: for `dcp` a run folder, of which the newest checkpoint is taken, or a checkpoint's;
            for `modicum` a folder that `SafetensorsWriter` wrote.
        target: a folder that is not there yet.
        to: `dcp` for what PyTorch's `dcp.load` reads, `modicum` for what a run resumes from.
        warn: hears of damaged checkpoints that are passed over.

    Raises:
        InputError: there is no such checkpoint, it is of another form, `target` is there already,
            or the disk is full.
        Damaged: the checkpoint is not what was written.
    """
    if not source.is_dir():
        raise InputError("there is no such folder", file=source)
    if os.path.lexists(target):
        raise InputError("there is something already; give a new folder", file=target)
    if (source / ".metadata").exists():
        raise InputError(
            "is in PyTorch's own form, whose .metadata is a pickle, and nothing is unpickled here; "
            "save it with modicum.checkpoint.dcp.SafetensorsWriter instead",
            file=source,
        )
    part = part_folder(target, "convert")
    shutil.rmtree(part, ignore_errors=True)
    try:
        if to == "dcp":
            _to_dcp(_checkpoint(source, warn), part, target)
        else:
            _to_modicum(source, part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _checkpoint(source: Path, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint of a folder, or the newest of a run's, when its files have been checked."""
    if (source / MANIFEST).exists():
        return Checkpoint.of(source)
    runs = source / "checkpoints"
    newest = CheckpointStore(runs if runs.is_dir() else source).newest(warn)
    if newest is None:
        near = nearest_run(source)
        such = "" if near is None else f", such as {near}"
        problem = f"holds no checkpoint; give the folder of a run{such}, or a checkpoint's"
        raise InputError(problem, file=source)
    return newest


# To PyTorch's form


class _ReadWhenWritten(DefaultSavePlanner):
    """Reads each tensor at the moment when it is written: one at a time is in memory."""

    def __init__(self, views: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._views = views

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What is written under a name."""
        view, *key = self.mappings[index.fqn]
        return self._views[str(view)][str(key[0])] if key else super().lookup_object(index)


def _to_dcp(checkpoint: Checkpoint, part: Path, target: Path) -> None:
    content, views = checkpoint.content, checkpoint.state
    state: dict[str, Any] = {_REST: json.dumps({name: content[name] for name in _KEPT})}
    for name, tensor in content["tensors"].items():
        view, _, key = name.partition("/")
        empty = torch.empty(tensor["shape"], dtype=dtype_of(content, name), device="meta")
        state.setdefault(view, {})[key] = empty
    with disk_errors(target), _alone():
        writer = dcp.FileSystemWriter(part)
        dcp.save(state, storage_writer=writer, planner=_ReadWhenWritten(views))
        os.replace(part, target)
        sync(target.parent)


@contextmanager
def _alone() -> Iterator[None]:
    """`torch.distributed.checkpoint` without other processes, and with its errors as they began."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


# And back


def _to_modicum(source: Path, part: Path, target: Path) -> None:
    with _alone():
        tensors, rest = _read(source)
    pieces = dict(TensorSlice.of(name, tensor) for name, tensor in tensors.items())
    layout = FileLayout.of(list(pieces))
    with disk_errors(target):
        part.mkdir(parents=True)
        checksum = write_file(part / tensor_file(0), streamed(layout, pieces))
    files = {tensor_file(0): {"bytes": layout.size, "crc32": checksum}}
    manifest = {"format": FORMAT, **rest, "files": files}
    publish(part, target, manifest, tensors_text([list(layout.places)], pieces))


def _read(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors by view and name, as `view/name`, and what else a manifest says."""
    reader = SafetensorsReader(source)
    rest = _rest(reader)
    views, metadata = saved_names(rest), reader.read_metadata()
    paths = metadata.planner_data or {}
    state, names = {}, {}
    for flat, told in metadata.state_dict_metadata.items():
        if isinstance(told, TensorStorageMetadata):
            view, *key = map(str, paths.get(flat, (flat,)))
            if view not in views or len(key) != 1:
                raise InputError(f"{flat} is in none of the checkpoint's views", file=source)
            names[flat] = f"{view}/{key[0]}"
            state[flat] = torch.empty(told.size, dtype=told.properties.dtype)
    dcp.load(state, storage_reader=reader)
    return {names[flat]: tensor for flat, tensor in state.items()}, rest


def _rest(reader: SafetensorsReader) -> dict[str, Any]:
    try:
        told = json.loads(reader.values[_REST])
        return {name: told[name] for name in _KEPT}
    except (KeyError, TypeError, ValueError):
        raise InputError(
            f"has no entry {_REST!r} as `checkpoint convert` writes it, without which no run can "
            "resume from it",
            file=reader.path,
        ) from None
