from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from modicum.checkpoint import Checkpoint, CheckpointStore, Damaged
from modicum.checkpoint.conversion import convert
from modicum.checkpoint.dcp import SafetensorsWriter
from modicum.core.contracts.state import StateRegistry
from modicum.core.errors import InputError

# That there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def state() -> dict:
    return {
        "model": {
            "layers.0.weight": torch.arange(12.0).view(3, 4),
            "half": torch.ones(2).bfloat16(),
            "empty": torch.empty(0, 2),
        },
        "optimizer": {"count": torch.tensor(7), "kind": "adamw", "nested": {"a": [], "b": {}}},
        "words": {"only": [1, None, "é"]},
    }


def registry() -> StateRegistry:
    found = StateRegistry()
    for name, entries in state().items():
        found.add(name, lambda entries=entries: entries, lambda _: None)
    own = {"generator": torch.arange(3, dtype=torch.uint8), "position": 5}
    found.add("random", lambda: own, lambda _: None, per_rank=True)
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(3, {"model": {"w": torch.zeros(1)}})
    store.save(40, registry(), {"why": "a note"})
    return tmp_path / "run"


def loaded(folder: Path) -> dict:
    """What PyTorch's own reader finds in a folder."""
    found = state()
    found["optimizer"] = {"count": torch.tensor(0)}
    del found["words"]
    for tensor in found["model"].values():
        tensor.zero_()
    found |= {"random#0": {"generator": torch.zeros(3, dtype=torch.uint8)}, "modicum": ""}
    dcp.load(found, checkpoint_id=folder)
    return found


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.step, one.notes, one.saved_by) == (other.step, other.notes, other.saved_by)
    assert one.content["views"] == other.content["views"]
    assert one.state.keys() == other.state.keys()
    for name, view in one.state.items():
        assert set(view) == set(other.state[name])
        for key, value in view.items():
            again = other.state[name][key]
            if isinstance(value, torch.Tensor):
                assert (value.dtype, value.shape) == (again.dtype, again.shape)
                assert torch.equal(value, again)
            else:
                assert value == again


def test_plain_dcp_reads_a_run_s_newest_checkpoint(saved: Path, tmp_path: Path) -> None:
    target = convert(saved, tmp_path / "torch", "dcp")
    assert (target / ".metadata").exists()
    found = loaded(target)
    for name, tensor in state()["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    assert found["optimizer"]["count"] == 7
    assert found["random#0"]["generator"].tolist() == [0, 1, 2]
    assert '"step": 40' in found["modicum"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "torch"]


def test_what_safetensors_writer_saved_comes_back_as_a_checkpoint(
    saved: Path, tmp_path: Path
) -> None:
    source = saved / "checkpoints" / "step-00000040"
    dcp.save(
        loaded(convert(source, tmp_path / "torch", "dcp")),
        storage_writer=SafetensorsWriter(tmp_path / "ours"),
    )
    back = CheckpointStore(tmp_path / "back")
    convert(tmp_path / "ours", back.path(40), "modicum")
    newest = back.newest()
    assert newest is not None
    assert_same(newest, Checkpoint.of(source))
    newest.load(registry())


def test_pytorch_s_own_form_is_never_read(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "torch", "dcp")
    with pytest.raises(InputError, match=r"a pickle.*SafetensorsWriter") as error:
        convert(tmp_path / "torch", tmp_path / "back", "modicum")
    assert error.value.file == tmp_path / "torch"
    assert not (tmp_path / "back").exists()


def test_a_state_without_views_is_no_checkpoint(tmp_path: Path) -> None:
    folder, new = tmp_path / "ours", tmp_path / "new"
    dcp.save({"w": torch.ones(2)}, storage_writer=SafetensorsWriter(folder))
    with pytest.raises(InputError, match=r"no entry 'modicum'.*no run can resume"):
        convert(folder, new, "modicum")
    with pytest.raises(InputError, match="no run's checkpoint"):
        convert(folder, new, "dcp")
    text = '{"step": 1, "ranks": 1, "notes": {}, "views": {"model": false}, "values": {}}'
    strange = {"modicum": text, "model": {"w": torch.ones(1)}, "other": {"w": torch.ones(2)}}
    dcp.save(strange, storage_writer=SafetensorsWriter(folder))
    with pytest.raises(InputError, match=r"other\.w is in none of the checkpoint's views"):
        convert(folder, new, "modicum")
    assert not new.exists()


def test_places_that_are_wrong_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        convert(tmp_path / "nowhere", tmp_path / "new", "dcp")
    with pytest.raises(InputError, match="there is something already"):
        convert(saved, saved, "dcp")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="holds no checkpoint"):
        convert(tmp_path / "none", tmp_path / "new", "dcp")
    with pytest.raises(Damaged, match="missing"):
        convert(tmp_path / "none", tmp_path / "new", "modicum")
    [file] = (saved / "checkpoints" / "step-00000040").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    heard: list[str] = []
    convert(saved, tmp_path / "new", "dcp", heard.append)
    assert "the checkpoint before it is used" in heard[0]


@pytest.mark.parametrize("to", ["dcp", "modicum"])
def test_a_full_disk_is_one_message_and_leaves_nothing(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = saved
    if to == "modicum":
        source = tmp_path / "ours"
        dcp.save(
            loaded(convert(saved, tmp_path / "torch", "dcp")),
            storage_writer=SafetensorsWriter(source),
        )
    before = sorted(tmp_path.iterdir())

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="the disk is full"):
        convert(source, tmp_path / "new", to)
    assert sorted(tmp_path.iterdir()) == before
