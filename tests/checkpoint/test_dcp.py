from __future__ import annotations

import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from modicum.checkpoint import CheckpointStore, Damaged
from modicum.checkpoint.dcp import SafetensorsReader, SafetensorsWriter
from modicum.checkpoint.manifest import MANIFEST, tensor_file
from modicum.core.errors import InputError

# That there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def state() -> dict:
    return {
        "model": {"w": torch.arange(12.0).view(3, 4), "half": torch.ones(2).bfloat16()},
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 2),
        "progress": {"epoch": 4, "names": ["a", "b"], "none": None, "rate": 0.1, "worst": math.inf},
    }


def test_a_nested_state_comes_back(tmp_path):
    saved = state()
    dcp.save(saved, storage_writer=SafetensorsWriter(tmp_path / "one"))
    loaded = state()
    loaded["model"]["w"].zero_()
    loaded["model"]["half"].zero_()
    loaded["scalar"].zero_()
    loaded["progress"] |= {"epoch": 0, "names": [], "none": 1, "rate": 0}
    dcp.load(loaded, storage_reader=SafetensorsReader(tmp_path / "one"))
    assert loaded["progress"] == saved["progress"]
    assert loaded["scalar"] == 3
    assert torch.equal(loaded["model"]["w"], saved["model"]["w"])
    assert torch.equal(loaded["model"]["half"], saved["model"]["half"])


@pytest.mark.parametrize("flatten", [False, True])
def test_values_come_back_without_flattening_as_well(tmp_path, flatten):
    saved = {"w": torch.ones(2), "n": 3, "s": "é"}
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(saved, storage_writer=SafetensorsWriter(tmp_path / "one"), planner=planner)
    loaded = {"w": torch.zeros(2), "n": 0, "s": ""}
    dcp.load(
        loaded,
        storage_reader=SafetensorsReader(tmp_path / "one"),
        planner=DefaultLoadPlanner(flatten_state_dict=flatten),
    )
    assert (loaded["w"].tolist(), loaded["n"], loaded["s"]) == ([1, 1], 3, "é")


def test_a_state_is_rebuilt_from_the_folder_alone(tmp_path):
    dcp.save(state(), storage_writer=SafetensorsWriter(tmp_path / "one"))
    reader = SafetensorsReader(tmp_path / "one")
    found = _load_state_dict_from_keys(storage_reader=reader)
    assert found["model"]["w"].tolist() == state()["model"]["w"].tolist()
    assert found["progress"]["epoch"] == 4


def test_what_is_on_the_disk_is_json_and_safetensors(tmp_path):
    folder = tmp_path / "one"
    dcp.save(state(), storage_writer=SafetensorsWriter(folder))
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, tensor_file(0)]
    assert load_file(folder / tensor_file(0))["model.w"].tolist() == state()["model"]["w"].tolist()
    assert not zipfile.is_zipfile(folder / tensor_file(0))
    assert '"epoch": 4' in (folder / MANIFEST).read_text().replace("progress.", "")


PICKLELESS = """
import sys, warnings, torch, torch.distributed.checkpoint as dcp
from modicum.checkpoint.dcp import SafetensorsReader, SafetensorsWriter
warnings.simplefilter("ignore")
def refuse(*_, **__): raise SystemExit("something was pickled")
torch.save = torch.load = refuse
state = {"w": torch.ones(2), "n": 3}
dcp.save(state, storage_writer=SafetensorsWriter(sys.argv[1]))
dcp.load(state, storage_reader=SafetensorsReader(sys.argv[1]))
"""


@pytest.mark.expensive
def test_neither_side_pickles_on_the_way(tmp_path):
    command = [sys.executable, "-c", PICKLELESS, str(tmp_path / "one")]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.parametrize("value", [(1, 2), object()], ids=["tuple", "object"])
def test_a_value_that_json_would_change_is_refused(tmp_path, value):
    # DCP makes one error of those of all ranks, and says each rank's.
    with pytest.raises(CheckpointException, match=r"JSON"):
        dcp.save({"x": [value]}, storage_writer=SafetensorsWriter(tmp_path / "one"))
    assert not (tmp_path / "one").exists()


def test_a_checkpoint_of_a_store_is_read_too(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(3, {"model": {"w": torch.ones(3)}, "data": {"row": 7}})
    loaded = {"model/w": torch.zeros(3), "data/row": 0}
    dcp.load(loaded, storage_reader=SafetensorsReader(store.path(3)))
    assert (loaded["model/w"].tolist(), loaded["data/row"]) == ([1, 1, 1], 7)


def test_saving_again_replaces_the_folder(tmp_path):
    for number in (1, 2):
        dcp.save({"n": number}, storage_writer=SafetensorsWriter(tmp_path / "one"))
    loaded = {"n": 0}
    dcp.load(loaded, checkpoint_id=tmp_path / "one", storage_reader=SafetensorsReader("elsewhere"))
    assert loaded == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_folder_that_was_making_room_when_its_process_died_is_put_back(tmp_path, monkeypatch):
    folder, old = tmp_path / "one", tmp_path / ".one.old"
    dcp.save({"n": 1}, storage_writer=SafetensorsWriter(folder))
    folder.rename(old)
    loaded = {"n": 0}
    dcp.load(loaded, storage_reader=SafetensorsReader(folder))
    assert (loaded, folder.exists(), old.exists()) == ({"n": 1}, True, False)
    folder.rename(old)
    replace = os.replace

    def fails(source: Path, target: Path) -> None:
        if target == folder:  # before the new one is in place
            raise OSError(5, "Input/output error")
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(CheckpointException, match="Input/output error"):
            dcp.save({"n": 2}, storage_writer=SafetensorsWriter(folder))
    assert SafetensorsReader(folder).values == {"n": 1}
    dcp.save({"n": 2}, storage_writer=SafetensorsWriter(folder))
    assert SafetensorsReader(folder).values == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_reader_that_puts_the_old_one_back_meanwhile_does_not_end_the_save(tmp_path, monkeypatch):
    folder, replace = tmp_path / "one", os.replace
    dcp.save({"n": 1}, storage_writer=SafetensorsWriter(folder))
    read = []

    def looked_at(source: Path, target: Path) -> None:
        replace(source, target)
        if source == folder and not read:  # which has just made room
            read.append(SafetensorsReader(folder).values)

    monkeypatch.setattr(os, "replace", looked_at)
    dcp.save({"n": 2}, storage_writer=SafetensorsWriter(folder))
    assert read == [{"n": 1}]
    assert SafetensorsReader(folder).values == {"n": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_damage_is_found_unless_nobody_looks(tmp_path):
    dcp.save({"w": torch.ones(4)}, storage_writer=SafetensorsWriter(tmp_path))
    content = bytearray((tmp_path / tensor_file(0)).read_bytes())
    content[-1] ^= 1
    (tmp_path / tensor_file(0)).write_bytes(content)
    with pytest.raises(CheckpointException, match="its checksum is another"):
        dcp.load({"w": torch.ones(4)}, storage_reader=SafetensorsReader(tmp_path))
    loaded = {"w": torch.zeros(4)}
    dcp.load(loaded, storage_reader=SafetensorsReader(tmp_path, check=False))
    assert loaded["w"][:3].tolist() == [1, 1, 1]


def test_a_full_disk_leaves_the_folder_as_it_was(full_disk):
    folder: Path = full_disk / "one"
    dcp.save({"n": 1}, storage_writer=SafetensorsWriter(folder))
    with pytest.raises(CheckpointException, match="the disk is full"):
        dcp.save({"w": torch.ones(1 << 20)}, storage_writer=SafetensorsWriter(folder))
    loaded = {"n": 0}
    dcp.load(loaded, storage_reader=SafetensorsReader(folder))
    assert loaded == {"n": 1}


def test_classes_know_each_other():
    assert issubclass(Damaged, InputError)
    assert SafetensorsWriter.validate_checkpoint_id("/a/b")
    assert not SafetensorsReader.validate_checkpoint_id("s3://a/b")
