from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from modicum.checkpoint import CheckpointStore
from modicum.checkpoint.store import MANIFEST, TENSORS, Damaged
from modicum.core.errors import InputError

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def state(value: float) -> dict:
    return {"model": {"w": torch.full((3,), value)}, "progress": {"epoch": int(value)}}


def saved(folder: Path, steps: list[int], keep: int = 10) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep)
    for step in steps:
        store.save(step, state(step))
    return store


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    pattern = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensor = (pattern % 2).bool() if dtype == torch.bool else pattern.view(dtype)
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": {"x": tensor}})
    back = store.read(1).state["a"]["x"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bits(back) == bits(tensor)


def test_every_layout_comes_back(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    tensors = {
        "whole": base,
        "again": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "strided": base[::2, ::3],
        "expanded": torch.tensor([7.0]).expand(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "other_empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    store = CheckpointStore(tmp_path)
    store.save(1, {"a": tensors, "b": {"whole": base}, "nothing": {}})
    back = store.read(1).state
    assert back["a"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back["a"][name], tensor), name
    assert torch.equal(back["b"]["whole"], base)
    assert back["nothing"] == {}


def test_values_beside_tensors_come_back(tmp_path):
    values = {"n": 3, "x": 0.1, "s": "é/ü", "none": None, "list": [1, [2]], "a/b.c": True}
    store = CheckpointStore(tmp_path)
    store.save(7, {"view": values | {"t/u": torch.ones(1)}}, notes={"tokens": 5})
    back = store.read(7)
    assert {k: v for k, v in back.state["view"].items() if k != "t/u"} == values
    assert back.state["view"]["t/u"].item() == 1
    assert (back.step, back.notes) == (7, {"tokens": 5})


def test_only_the_newest_are_kept_and_only_after_the_new_one_is_there(tmp_path, monkeypatch):
    store = saved(tmp_path, [5, 10, 15], keep=2)
    assert store.steps() == [10, 15]

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("modicum.checkpoint.store.save_file", fail)
    with pytest.raises(InputError, match="the disk is full"):
        store.save(20, state(20))
    assert store.steps() == [10, 15]
    assert store.newest().step == 15


def test_a_full_disk_leaves_the_earlier_checkpoint(full_disk):
    store = saved(full_disk, [1])
    with pytest.raises(InputError, match="the disk is full") as caught:
        store.save(2, {"model": {"w": torch.zeros(1 << 20)}, "progress": {}})
    assert caught.value.exit_code == 2
    assert store.newest().step == 1
    assert [path.name for path in full_disk.iterdir()] == ["step-00000001"]
    store.save(3, state(3))
    assert store.newest().step == 3


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@pytest.mark.parametrize(
    "harm",
    [
        flip,
        Path.unlink,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-7]),
        lambda file: file.write_bytes(file.read_bytes() + b" x"),
        lambda file: file.write_bytes(b"[1]"),
    ],
    ids=["flipped", "missing", "empty", "cut", "longer", "other"],
)
def test_damage_is_named_and_the_checkpoint_before_is_used(tmp_path, name, harm):
    store = saved(tmp_path, [5, 10])
    harm(store.path(10) / name)
    warnings: list[str] = []
    newest = store.newest(warnings.append)
    assert newest.step == 5
    assert torch.equal(newest.state["model"]["w"], torch.full((3,), 5.0))
    assert len(warnings) == 1
    assert "step-00000010" in warnings[0]
    assert "damaged" in warnings[0]
    assert warnings[0].endswith("; the checkpoint before it is used")
    with pytest.raises(Damaged):
        store.read(10)


def test_each_byte_of_the_manifest_matters(tmp_path):
    store = saved(tmp_path, [5])
    file = store.path(5) / MANIFEST
    whole = file.read_bytes()
    for place in random.Random(0).sample(range(len(whole) - 1), 60):
        content = bytearray(whole)
        content[place] ^= 1
        file.write_bytes(content)
        try:
            back = store.read(5)
        except Damaged:
            continue
        # A space between two values may have become another blank character.
        assert chr(whole[place]).isspace()
        assert back.step == 5


def test_no_checkpoint_is_left(tmp_path):
    assert CheckpointStore(tmp_path / "none").newest() is None
    store = saved(tmp_path, [5])
    flip(store.path(5) / TENSORS)
    warnings: list[str] = []
    assert store.newest(warnings.append) is None
    assert warnings[0].endswith("; none is left")


def test_another_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    store = saved(tmp_path, [5])
    monkeypatch.setattr("modicum.checkpoint.store.FORMAT", 2)
    store.save(10, state(10))
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"another version of modicum \(found: 2\); allowed: 1"):
        store.newest()


def test_what_a_run_will_do_again_is_forgotten(tmp_path):
    store = saved(tmp_path, [5, 10, 15])
    store.forget_after(10)
    assert store.steps() == [5, 10]


def test_leftovers_of_killed_saves_are_swept(tmp_path):
    store = saved(tmp_path, [5])
    for name in (".step-00000010.part", ".step-00000005.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_bytes(b"half")
    assert store.newest().step == 5
    store.save(20, state(20))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000020"]


def test_strange_names_in_the_folder_are_no_checkpoints(tmp_path):
    store = saved(tmp_path, [5])
    (tmp_path / "step-new").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert store.steps() == [5]


def test_nothing_is_pickled(tmp_path):
    store = saved(tmp_path, [5])
    assert sorted(path.name for path in store.path(5).iterdir()) == [MANIFEST, TENSORS]
    assert json.loads((store.path(5) / MANIFEST).read_text())["step"] == 5


SAVE = """
import sys, torch
from pathlib import Path
from modicum.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2)
print("ready", flush=True)
for step in range(1, 100000):
    state = {"model": {str(i): torch.full((3000,), float(step)) for i in range(20)}}
    store.save(step, state)
"""


@pytest.mark.dear
def test_killed_at_any_moment_the_newest_is_whole(tmp_path):
    draw = random.Random(3)
    last = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.05, 0.3))
        process.kill()
        process.communicate()
        warnings: list[str] = []
        store = CheckpointStore(tmp_path, keep=2)
        newest = store.newest(warnings.append)
        if newest is None:
            assert last == 0
            continue
        # A save cut off by the kill leaves nothing that looks like a checkpoint.
        assert warnings == []
        assert newest.step == store.steps()[-1]
        assert all((t == newest.step).all() for t in newest.state["model"].values())
        last = newest.step
    assert last > 0
