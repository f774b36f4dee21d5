from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import strategies
from safetensors.torch import load_file

import modicum.checkpoint.publishing
from modicum.checkpoint import CheckpointStore, Damaged
from modicum.checkpoint.manifest import MANIFEST, read_manifest, tensor_file, write_manifest
from modicum.core.contracts.state import StateRegistry
from modicum.core.errors import InputError
from modicum.core.files import write_json

TENSORS = tensor_file(0)

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


def saved(folder: Path, steps: list[int], keep: int = 10, **how: bool) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep, **how)
    for step in steps:
        store.save(step, state(step))
    store.wait()
    return store


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype, asynchronous):
    pattern = torch.arange(256, dtype=torch.uint8).repeat(2)
    tensor = (pattern % 2).bool() if dtype == torch.bool else pattern.view(dtype)
    store = CheckpointStore(tmp_path, asynchronous=asynchronous)
    store.save(1, {"a": {"byte": torch.tensor(1, dtype=torch.uint8), "x": tensor}})
    store.wait()
    back = store.read(1).state["a"]["x"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_layout_comes_back(tmp_path, asynchronous):
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
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "é/ü.@#": torch.ones(3),
    }
    store = CheckpointStore(tmp_path, asynchronous=asynchronous)
    store.save(1, {"a": tensors, "b": {"whole": base}, "nothing": {}})
    store.wait()
    back = store.read(1).state
    assert back["a"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back["a"][name], tensor), name
    assert torch.equal(back["b"]["whole"], base)
    assert dict(back["nothing"]) == {}


def test_values_beside_tensors_come_back(tmp_path):
    values = {"n": 3, "x": 0.1, "s": "é/ü", "none": None, "list": [1, [2]], "a/b.c": True}
    store = CheckpointStore(tmp_path)
    store.save(7, {"view": values | {"t/u": torch.ones(1)}}, notes={"tokens": 5})
    back = store.read(7)
    assert {k: v for k, v in back.state["view"].items() if k != "t/u"} == values
    assert back.state["view"]["t/u"].item() == 1
    assert (back.step, back.notes) == (7, {"tokens": 5})


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_only_the_newest_are_kept_and_only_after_the_new_one_is_there(
    tmp_path, monkeypatch, asynchronous
):
    store = saved(tmp_path, [5, 10, 15], keep=2, asynchronous=asynchronous)
    assert store.steps() == [10, 15]
    monkeypatch.setattr("modicum.checkpoint.publishing.write_manifest", no_space)
    with pytest.raises(InputError, match="the disk is full"):
        saved(tmp_path, [20], asynchronous=asynchronous)
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


@pytest.mark.parametrize("asked", ["save", "poll", "wait"])
def test_a_disk_that_is_full_in_the_background_is_told_when_next_asked(full_disk, asked):
    store = saved(full_disk, [1], asynchronous=True)
    store.save(2, {"model": {"w": torch.zeros(1 << 20)}, "progress": {}})
    store._work.thread.join()
    with pytest.raises(InputError, match="the disk is full"):
        store.save(3, state(3)) if asked == "save" else getattr(store, asked)()
    assert [path.name for path in full_disk.iterdir()] == ["step-00000001"]
    assert store.newest().step == 1


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


@pytest.mark.parametrize("name", [MANIFEST, TENSORS])
@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=40)
def test_no_change_of_bytes_goes_unseen(name, data):
    with tempfile.TemporaryDirectory() as folder:
        store = saved(Path(folder), [5])
        file = store.path(5) / name
        whole = file.read_bytes()
        place = data.draw(strategies.integers(0, len(whole)))
        cut = data.draw(strategies.integers(0, 3))
        file.write_bytes(
            whole[:place] + data.draw(strategies.binary(max_size=3)) + whole[place + cut :]
        )
        if file.read_bytes() != whole:
            with pytest.raises(Damaged, match="damaged"):
                store.read(5)


def test_each_byte_of_the_manifest_matters(tmp_path):
    store = saved(tmp_path, [5])
    file = store.path(5) / MANIFEST
    whole = file.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 60):
        content = bytearray(whole)
        content[place] ^= 1
        file.write_bytes(content)
        with pytest.raises(Damaged):
            store.read(5)


def test_no_checkpoint_is_left(tmp_path):
    assert CheckpointStore(tmp_path / "none").newest() is None
    store = saved(tmp_path, [5, 10])
    flip(store.path(5) / TENSORS)
    (store.path(10) / MANIFEST).unlink()
    warnings: list[str] = []
    with pytest.raises(Damaged, match=r"^every checkpoint is damaged") as caught:
        store.newest(warnings.append)
    assert f"{store.path(5) / TENSORS} (its checksum is another)" in str(caught.value)
    assert f"{store.path(10) / MANIFEST} (this file is missing)" in str(caught.value)
    assert warnings == []


def test_another_format_is_not_taken_for_damage(tmp_path, monkeypatch):
    store = saved(tmp_path, [5])
    monkeypatch.setattr("modicum.checkpoint.saving.FORMAT", 3)
    store.save(10, state(10))
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"another version of modicum \(found: 3\); allowed: 2"):
        store.newest()


def test_the_first_format_is_not_taken_for_damage(tmp_path):
    store = saved(tmp_path, [5])
    manifest = {"format": 1, "step": 10, "notes": {}, "values": {}, "files": {}, "digest": "0"}
    store.path(10).mkdir()
    write_json(store.path(10) / MANIFEST, manifest)
    with pytest.raises(InputError, match=r"another version of modicum \(found: 1\); allowed: 2"):
        store.newest()


@pytest.mark.parametrize("other", ["../other.safetensors", "/other.safetensors"])
def test_tensors_are_in_files_of_the_folder_that_have_checksums(tmp_path: Path, other: str) -> None:
    folder = saved(tmp_path, [5]).path(5)
    content = read_manifest(folder)
    tensors = content.pop("tensors")
    for piece in (piece for each in tensors.values() for piece in each["pieces"]):
        piece["file"] = other
    for files in (content["files"], {other: {}}):
        write_manifest(folder / MANIFEST, content | {"files": files}, json.dumps(tensors))
        with pytest.raises(Damaged, match="none of the folder's"):
            read_manifest(folder)


def test_a_folder_whose_number_is_none_is_no_checkpoint(tmp_path: Path) -> None:
    store = saved(tmp_path, [5])
    (tmp_path / "step-²").mkdir()
    assert store.steps() == [5]


def test_what_a_run_will_do_again_is_forgotten(tmp_path):
    store = saved(tmp_path, [5, 10, 15])
    store.forget_after(10)
    assert store.steps() == [5, 10]


def test_leftovers_of_killed_saves_are_swept(tmp_path):
    store = saved(tmp_path, [5])
    for name in (".step-00000010.0a1b.part", ".step-00000005.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / TENSORS).write_bytes(b"half")
    assert store.newest().step == 5
    saved(tmp_path, [20])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000020"]


def test_a_checkpoint_that_was_making_room_when_its_process_died_is_put_back(tmp_path):
    saved(tmp_path, [5])
    (tmp_path / "step-00000005").rename(tmp_path / ".step-00000005.old")
    store = saved(tmp_path, [7])
    assert store.steps() == [5, 7]
    assert store.read(5).step == 5


def test_it_is_put_back_before_the_newest_is_looked_for(tmp_path):
    store = saved(tmp_path, [5, 10])
    (tmp_path / "step-00000010").rename(tmp_path / ".step-00000010.old")
    (tmp_path / ".step-00000015.0a1b.part").mkdir()  # of a save that may be under way
    assert store.newest().step == 10
    assert store.steps() == [5, 10]
    assert (tmp_path / ".step-00000015.0a1b.part").exists()


def test_a_step_saved_again_replaces_the_first(tmp_path):
    store = saved(tmp_path, [5], asynchronous=True)
    store.save(5, state(6))
    store.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert store.newest().state["progress"]["epoch"] == 6


def test_the_last_save_is_in_place_at_once_and_takes_no_copy(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.save(5, state(6), last=True)
    assert (store.steps(), store.staging_bytes) == ([5], 0)
    assert store.newest().state["progress"]["epoch"] == 6


def test_what_changes_after_an_asynchronous_save_is_not_saved(tmp_path, monkeypatch):
    begin = threading.Event()
    write_file = modicum.checkpoint.publishing.write_file

    def late(*arguments, **named):
        begin.wait(20)
        return write_file(*arguments, **named)

    monkeypatch.setattr("modicum.checkpoint.publishing.write_file", late)
    store = CheckpointStore(tmp_path, asynchronous=True)
    live = {"model": {"w": torch.ones(5000), "seen": [1]}, "more": {"b": torch.ones(3).bfloat16()}}
    notes = {"rows": [1]}
    store.save(1, live, notes)
    assert (store.steps(), store.last) == ([], 1)
    live["model"]["w"].zero_()
    live["model"]["seen"].append(2)
    live["more"]["b"].zero_()
    notes["rows"].append(2)
    begin.set()
    store.wait()
    back = store.newest()
    assert back.state["model"]["w"].sum() == 5000
    assert back.state["more"]["b"].sum() == 3
    assert (back.state["model"]["seen"], back.notes) == ([1], {"rows": [1]})


def test_saves_in_a_row_reuse_the_memory_and_take_other_shapes(tmp_path):
    store = CheckpointStore(tmp_path, keep=9, asynchronous=True)
    assert store.staging_bytes == 0
    for step, size in ((1, 10), (2, 10), (3, 5000), (4, 3)):
        store.save(step, {"m": {"w": torch.full((size,), float(step))}})
        if step == 1:
            memory = store._staging
        if step == 2:
            assert store._staging is memory
            assert store.staging_bytes == 4096 + 40
    store.wait()
    found = [store.read(step).state["m"]["w"] for step in store.steps()]
    assert [(len(w), w.unique().tolist()) for w in found] == [
        (10, [1.0]), (10, [2.0]), (5000, [3.0]), (3, [4.0])
    ]  # fmt: skip


def test_what_came_into_place_is_told_once(tmp_path):
    store = CheckpointStore(tmp_path, keep=1, asynchronous=True)
    store.save(1, state(1))
    store.save(2, state(2))
    store.wait()
    first, second = store.poll()
    assert (first.step, second.step) == (1, 2)
    assert second.path == tmp_path / "step-00000002"
    assert second.bytes == (second.path / TENSORS).stat().st_size
    assert second.seconds > 0
    assert store.poll() == []


def test_a_value_that_is_not_json_is_refused_at_once(tmp_path):
    store = CheckpointStore(tmp_path, asynchronous=True)
    with pytest.raises(TypeError):
        store.save(1, {"m": {"x": object()}})
    with pytest.raises(TypeError, match=r"m/x is torch\.complex128, which safetensors"):
        store.save(1, {"m": {"x": torch.ones(1, dtype=torch.complex128)}})


def test_a_registry_is_loaded_view_by_view(tmp_path):
    box, other = {"x": torch.ones(2), "n": 1}, {"y": 5}
    registry = StateRegistry()
    registry.add("box", lambda: dict(box), box.update)
    registry.add("data", lambda: dict(other), other.update)
    store = CheckpointStore(tmp_path)
    store.save(1, registry)
    box["x"], box["n"], other["y"] = torch.zeros(2), 2, 6
    store.newest().load(registry, skip={"data"})
    assert box["x"].tolist() == [1, 1]
    assert (box["n"], other["y"]) == (1, 6)
    store.newest().load(registry)
    assert other["y"] == 5


def test_a_registry_with_other_views_is_refused(tmp_path):
    store = saved(tmp_path, [5])
    registry = StateRegistry()
    registry.add("model", dict, lambda _: None)
    registry.add("more", dict, lambda _: None)
    message = r"step-00000005.*no state for \['more'\].*nobody asks for: \['progress'\]"
    with pytest.raises(InputError, match=message):
        store.newest().load(registry)
    store.newest().load(registry, skip={"more", "progress"})


def test_a_view_that_was_shared_is_not_taken_for_each_ranks_own(tmp_path):
    store = saved(tmp_path, [5])
    registry = StateRegistry()
    registry.add("model", dict, lambda _: None)
    registry.add("progress", dict, lambda _: None, per_rank=True)
    with pytest.raises(InputError, match="'progress' is each rank's own in one of them"):
        store.newest().load(registry)


def test_a_tensor_that_cannot_be_read_any_more_is_named(tmp_path):
    store = saved(tmp_path, [5])
    found = store.newest()
    (store.path(5) / TENSORS).write_bytes(b"x" * 100)
    with pytest.raises(Damaged, match=f"{TENSORS}: damaged"):
        found.state["model"]["w"]


def test_strange_names_in_the_folder_are_no_checkpoints(tmp_path):
    store = saved(tmp_path, [5])
    (tmp_path / "step-new").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert store.steps() == [5]


def test_nothing_is_pickled(tmp_path):
    store = saved(tmp_path, [5])
    assert sorted(path.name for path in store.path(5).iterdir()) == [MANIFEST, TENSORS]
    manifest = json.loads((store.path(5) / MANIFEST).read_text())
    assert (manifest["format"], manifest["step"], manifest["ranks"]) == (2, 5, 1)
    assert load_file(store.path(5) / TENSORS)["model/w"].tolist() == [5, 5, 5]


SAVE = """
import sys, torch
from pathlib import Path
from modicum.checkpoint import CheckpointStore
store = CheckpointStore(Path(sys.argv[1]), keep=2, asynchronous=sys.argv[2] == "True")
print("ready", flush=True)
for step in range(1, 100000):
    state = {"model": {str(i): torch.full((30000,), float(step)) for i in range(20)}}
    store.save(step, state)
"""


@pytest.mark.expensive
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_any_moment_the_newest_is_whole(tmp_path, asynchronous):
    draw = random.Random(3)
    last = 0
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVE, str(tmp_path), str(asynchronous)],
            stdout=subprocess.PIPE,
            text=True,
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
