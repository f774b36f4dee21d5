"""Checkpoints of a state registry: safetensors and a JSON manifest, whole or absent.

A checkpoint is a folder `step-00000100`. It is written beside its place, synced and renamed, so
that one that is there is complete; checksums tell one that was damaged later. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from modicum.core.errors import InputError
from modicum.core.files import file_digest, publish_folder, write_json

MANIFEST, TENSORS, FORMAT = "manifest.json", "state.safetensors", 1
State = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: its step, and what was noted beside the state."""

    folder: Path
    step: int
    notes: Mapping[str, Any]
    state: State


class Damaged(InputError):
    """A checkpoint is not what was written."""


class CheckpointStore:
    """The checkpoints of a run, in `folder`, the newest `keep` of them.

    >>> import tempfile, torch
    >>> store = CheckpointStore(Path(tempfile.mkdtemp()), keep=2)
    >>> for step in (1, 2, 3):
    ...     _ = store.save(step, {"model": {"w": torch.full((2,), float(step))}})
    >>> newest = store.newest()
    >>> newest.step, newest.state["model"]["w"].tolist(), len(store.steps())
    (3, [3.0, 3.0], 2)
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, oldest first."""
        return sorted(
            int(path.name.removeprefix("step-"))
            for path in self.folder.glob("step-*")
            if path.name.removeprefix("step-").isdigit()
        )

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def save(
        self,
        step: int,
        state: Mapping[str, Mapping[str, Any]],
        notes: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint; older ones than the newest `keep` go only when it is in place.

        Raises:
            InputError: the disk is full or cannot be written; earlier checkpoints are intact.
        """
        target = self.path(step)
        self._sweep()
        tensors = {
            f"{view}/{key}": value.detach().contiguous().cpu()
            for view, values in state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }
        values = {
            view: {k: v for k, v in entries.items() if not isinstance(v, Tensor)}
            for view, entries in state.items()
        }
        with publish_folder(target) as temporary:
            save_file(_unshared(tensors), temporary / TENSORS)
            manifest = {
                "format": FORMAT,
                "step": step,
                "notes": dict(notes or {}),
                "values": values,
                "files": {TENSORS: file_digest(temporary / TENSORS)},
            }
            write_json(temporary / MANIFEST, manifest | {"digest": _digest(manifest)})
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def read(self, step: int) -> Checkpoint:
        """Read one checkpoint and check it.

        Raises:
            Damaged: it is, with the file and what is wrong with it.
            InputError: another version of modicum wrote it.
        """
        folder = self.path(step)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            digest = manifest.pop("digest")
            if digest != _digest(manifest):
                raise Damaged("damaged: its checksum is another", file=folder / MANIFEST)
            for name, expected in manifest["files"].items():
                if file_digest(folder / name) != expected:
                    raise Damaged("damaged: its checksum is another", file=folder / name)
            if manifest["format"] != FORMAT:
                raise InputError(
                    "was written by another version of modicum",
                    file=folder,
                    field="format",
                    value=manifest["format"],
                    allowed=str(FORMAT),
                )
            state = {view: dict(values) for view, values in manifest["values"].items()}
            for full, tensor in load_file(folder / TENSORS).items():
                view, key = full.split("/", 1)
                state[view][key] = tensor
        except PermissionError as error:
            raise InputError(f"cannot be read: {error.strerror}", file=folder) from None
        except FileNotFoundError as error:
            raise Damaged("damaged: this file is missing", file=error.filename) from None
        except UnicodeDecodeError:
            raise Damaged("damaged: not text", file=folder / MANIFEST) from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
            raise Damaged(f"damaged: {error}", file=folder) from None
        return Checkpoint(folder, manifest["step"], manifest["notes"], state)

    def newest(self, warn: Callable[[str], None] = lambda _: None) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are named to `warn` and passed over.

        Raises:
            InputError: another version of modicum wrote the newest, or it may not be read.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.read(step)
            except Damaged as error:
                last = step == steps[0]
                warn(
                    f"{error}; " + ("none is left" if last else "the checkpoint before it is used")
                )
        return None

    def forget_after(self, step: int) -> None:
        """Remove what a run that goes on from `step` does again: later checkpoints, all damaged."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later), ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what processes left that died while they saved."""
        for name in (".step-*.part", ".step-*.old"):
            for left in self.folder.glob(name):
                shutil.rmtree(left, ignore_errors=True)


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that each own their memory: safetensors refuses storages in common."""
    seen: set[int] = set()
    owned = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        owned[name] = tensor if whole and pointer not in seen else tensor.clone()
        seen.add(pointer)
    return owned


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
