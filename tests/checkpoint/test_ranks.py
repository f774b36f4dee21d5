"""Checkpoints of several ranks: written in parts, and taken up by any other number and layout."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts import LAYOUTS
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import modicum.checkpoint.publishing
import modicum.checkpoint.saving
import modicum.checkpoint.store
from modicum.checkpoint import CheckpointStore
from modicum.checkpoint.dcp import SafetensorsReader, SafetensorsWriter
from modicum.checkpoint.manifest import MANIFEST, tensor_file
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.contracts.state import StateRegistry, model_view, optimizer_view, random_view
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import is_sharded, whole


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tie, buffers, and a part in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.hidden = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.narrow = nn.Linear(7, 3, dtype=torch.bfloat16)
        self.single = nn.Linear(3, 1, bias=False)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


class Training:
    def __init__(self, ranks: Ranks, layout: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        count, shard = LAYOUTS[layout]
        assert count == ranks.size
        if shard > 1:
            mesh = Layout.of(count, shard).mesh("cpu")
            fully_shard(self.model.narrow, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        groups = optimizer_groups(self.model, learning_rate=0.1, weight_decay=0.1)
        self.optimizer = torch.optim.AdamW(groups)
        self.position = {"row": 0}
        self.registry = StateRegistry()
        self.registry.add_view(model_view(self.model))
        self.registry.add_view(optimizer_view(self.optimizer))
        self.registry.add_view(random_view(7, ranks))
        self.registry.add("data", lambda: dict(self.position), self.position.update)
        torch.manual_seed(100 * seed + ranks.rank)

    def step(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            if parameter.requires_grad:
                gradient = torch.linspace(-1, 1 + number, parameter.numel()).view(parameter.shape)
                gradient = gradient.to(parameter.dtype)
                if is_sharded(parameter):
                    mesh, placements = parameter.device_mesh, parameter.placements
                    gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
                parameter.grad = gradient
        self.optimizer.step()
        self.model.norm.running_mean.add_(0.5)
        self.model.norm.num_batches_tracked.add_(1)
        self.position["row"] += 3

    def state(self) -> dict[str, object]:
        """All that the ranks hold in common, whole."""
        return {
            f"{name}/{key}": whole(value).clone() if isinstance(value, torch.Tensor) else value
            for name, view in self.registry.read().items()
            if name != "random"
            for key, value in view.items()
        }


def save(ranks: Ranks, folder: Path, layout: str, asynchronous: bool) -> dict[str, object]:
    training = Training(ranks, layout, seed=1)
    store = CheckpointStore(folder, ranks=ranks, asynchronous=asynchronous)
    for step in (1, 2):
        training.step()
        store.save(step, training.registry, {"step": step})
    before = training.state()
    training.step()  # a save that is under way does not see it
    store.wait()
    told = [(published.step, published.path) for published in store.poll()]
    assert told == ([(1, store.path(1)), (2, store.path(2))] if ranks.first else [])
    assert store.last == 2
    return before


def load(ranks: Ranks, folder: Path, layout: str) -> dict[str, object]:
    training = Training(ranks, layout, seed=2)
    checkpoint = CheckpointStore(folder, ranks=ranks).newest()
    assert (checkpoint.step, checkpoint.notes) == (2, {"step": 2})
    checkpoint.load(training.registry)
    for parameter in training.model.parameters():
        for value in training.optimizer.state.get(parameter, {}).values():
            assert is_sharded(value) == (is_sharded(parameter) and value.ndim > 0)
    assert training.model.head.weight is training.model.embedding.weight
    found = training.state()
    training.step()
    return found


def same(one: dict[str, object], other: dict[str, object]) -> bool:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype, name
            assert torch.equal(value, other[name]), name
        else:
            assert value == other[name], name
    return True


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("alone", "fsdp 2"),
        ("ddp 2", "fsdp 2"),
        ("ddp 2", "fsdp 4"),
        ("fsdp 2", "ddp 2"),
        ("fsdp 4", "ddp 2"),
        ("fsdp 4", "alone"),
        ("fsdp 2", "fsdp 4"),
        ("fsdp 4", "fsdp 3"),
        ("hybrid 4", "fsdp 2"),
        ("ddp 4", "hybrid 4"),
        ("fsdp 2", "fsdp 2"),
    ],
)
def test_state_goes_from_any_layout_to_any_other(pool, tmp_path, saved, loaded):
    before = pool.run(save, tmp_path, saved, True, ranks=LAYOUTS[saved][0])
    after = pool.run(load, tmp_path, loaded, ranks=LAYOUTS[loaded][0])
    assert "optimizer/single.weight/exp_avg" in before[0]
    assert "model/frozen.weight" not in before[0]
    assert before[0]["data/row"] == 6
    assert all(same(before[0], found) for found in after)


@pytest.mark.ranks
@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2"])
def test_ranks_that_wait_write_the_same_as_ranks_that_do_not(pool, tmp_path, layout):
    contents = []
    for asynchronous in (True, False):
        folder = tmp_path / str(asynchronous)
        pool.run(save, folder, layout, asynchronous)
        files = sorted((folder / "step-00000002").iterdir())
        assert [file.name for file in files] == [MANIFEST, tensor_file(0), tensor_file(1)]
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
        contents.append([file.read_bytes() for file in files])
    assert contents[0] == contents[1]


@pytest.mark.ranks
def test_replicas_share_the_writing(pool, tmp_path):
    pool.run(save, tmp_path, "ddp 2", False)
    names, sizes = [], []
    for rank in range(2):
        with safe_open(tmp_path / "step-00000002" / tensor_file(rank), "pt") as file:
            shared = [name for name in file.keys() if not name.startswith("random")]  # noqa: SIM118
            sizes.append(sum(file.get_tensor(name).nbytes for name in shared))
            names.append(set(shared))
    assert not names[0] & names[1]
    assert abs(sizes[0] - sizes[1]) <= 8


def random_numbers(ranks: Ranks, folder: Path, take_up: bool) -> list[float]:
    registry = StateRegistry()
    registry.add_view(random_view(7, ranks))
    store = CheckpointStore(folder, ranks=ranks)
    torch.manual_seed(ranks.rank)
    if not take_up:
        store.save(1, registry)
        return torch.rand(3).tolist()
    torch.rand(5)
    store.newest().load(registry)
    return torch.rand(3).tolist()


@pytest.mark.ranks
def test_generators_go_on_rank_by_rank_or_begin_afresh(pool, tmp_path):
    drawn = pool.run(random_numbers, tmp_path, False)
    assert drawn[0] != drawn[1]
    assert pool.run(random_numbers, tmp_path, True) == drawn
    three = pool.run(random_numbers, tmp_path, True, ranks=3)
    assert len({*map(tuple, three), *map(tuple, drawn)}) == 5
    assert pool.run(random_numbers, tmp_path, True, ranks=3) == three


def counted(ranks: Ranks, folder: Path, regrouping: bool) -> int:
    store = CheckpointStore(folder, ranks=ranks)
    box = {"count": 10 * (ranks.rank + 1), "tensor": torch.tensor([ranks.rank])}
    registry = StateRegistry()

    def total(states):
        return {
            "count": sum(state["count"] for state in states),
            "tensor": torch.cat([state["tensor"] for state in states]),
        }

    registry.add(
        "box", lambda: box, box.update, per_rank=True, regroup=total if regrouping else None
    )
    if not store.steps():
        store.save(1, registry)
    box.update(count=0, tensor=None)
    store.newest().load(registry)
    return box["count"], box["tensor"].tolist()


@pytest.mark.ranks
def test_a_method_says_how_its_own_state_of_each_rank_is_regrouped(pool, tmp_path):
    assert pool.run(counted, tmp_path, False) == [(10, [0]), (20, [1])]
    assert pool.run(counted, tmp_path, True, ranks=3) == [(30, [0, 1])] * 3
    with pytest.raises(AssertionError, match="'box' was saved by 2 ranks and cannot be taken up"):
        pool.run(counted, tmp_path, False, ranks=3)


def save_on_a_full_disk(ranks: Ranks, folder: Path, full: int) -> str:
    store = CheckpointStore(folder, ranks=ranks, asynchronous=True)
    state = {"m": {str(i): torch.ones(100) for i in range(8)}}
    store.save(1, state)
    store.wait()
    write = modicum.checkpoint.publishing.write_file

    def no_space(path, content, **how):
        write(path, content, **how)
        raise OSError(28, "No space left on device")

    if ranks.rank == full:
        modicum.checkpoint.publishing.write_file = no_space
    try:
        store.save(2, state)
        with pytest.raises(InputError) as caught:
            store.wait()
    finally:
        modicum.checkpoint.publishing.write_file = write
    assert store.newest().step == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    ranks.broadcast(None)
    return str(caught.value)


@pytest.mark.ranks
@pytest.mark.parametrize("full", [0, 1])
def test_a_disk_that_is_full_on_one_rank_is_told_on_all(pool, tmp_path, full):
    for message in pool.run(save_on_a_full_disk, tmp_path, full, ranks=3):
        assert "the disk is full" in message


def save_where_no_report_has_room(ranks: Ranks, folder: Path) -> str:
    store = CheckpointStore(folder, ranks=ranks)
    report = modicum.checkpoint.saving.report

    def no_room(part, rank, content):
        if content["error"] is None:
            assert (part / tensor_file(rank)).exists()
            raise InputError("the disk is full")
        assert not (part / tensor_file(rank)).exists()
        report(part, rank, content)

    modicum.checkpoint.saving.report = no_room  # which rank 0 does not write
    try:
        with pytest.raises(InputError) as caught:
            store.save(1, {"m": {str(i): torch.ones(100) for i in range(8)}})
    finally:
        modicum.checkpoint.saving.report = report
    ranks.broadcast(None)
    assert list(folder.iterdir()) == []
    return str(caught.value)


@pytest.mark.ranks
def test_a_rank_without_room_for_its_report_makes_some_and_ends_the_save(pool, tmp_path):
    for message in pool.run(save_where_no_report_has_room, tmp_path, timeout=60):
        assert message.endswith("the disk is full")


def save_of_which_ranks_report_nothing(ranks: Ranks, folder: Path) -> str:
    def no_room(part, rank, content):
        raise InputError("the disk is full")

    modicum.checkpoint.saving.report = no_room  # which rank 0 does not write
    modicum.checkpoint.store.TIMEOUT = timedelta(seconds=0.5)
    store = CheckpointStore(folder, ranks=ranks, asynchronous=True)
    store.save(1, {"m": {str(i): torch.ones(100) for i in range(8)}})
    with pytest.raises(InputError) as caught:
        store.wait()
    return str(caught.value)


@pytest.mark.ranks
def test_a_save_under_way_does_not_wait_for_ever_for_a_rank_that_cannot_report(pool, tmp_path):
    first, other = pool.run(save_of_which_ranks_report_nothing, tmp_path, timeout=60)
    pool.close()  # these ranks are no longer what they were
    assert first.endswith("rank 1 has not written its part")
    assert other == "the disk is full"


def damaged(ranks: Ranks, folder: Path) -> tuple[int, list[str]]:
    store = CheckpointStore(folder, ranks=ranks)
    warnings: list[str] = []
    newest = store.newest(warnings.append)
    return newest.step, warnings


@pytest.mark.ranks
def test_damage_in_any_ranks_file_is_named_and_all_use_the_one_before(pool, tmp_path):
    pool.run(save, tmp_path, "fsdp 2", True)
    file = tmp_path / "step-00000002" / tensor_file(1)
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)
    (first, warnings), other = pool.run(damaged, tmp_path)
    assert (first, other) == (1, (1, []))
    assert f"step-00000002/{tensor_file(1)}: damaged: its checksum is another" in warnings[0]


def die_while_saving(ranks: Ranks, folder: Path, victim: int) -> None:
    store = CheckpointStore(folder, ranks=ranks, asynchronous=True)
    state = {"m": {str(i): torch.ones(100) for i in range(8)}}
    store.save(1, state)
    store.wait()
    write = modicum.checkpoint.publishing.write_file

    def deadly(path, content, **how):
        next(iter(content))
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    if ranks.rank == victim:
        modicum.checkpoint.publishing.write_file = deadly
    store.save(2, state)
    if ranks.rank == victim:
        time.sleep(20)
    # Not `wait`, in which a rank would learn over the wire that the other is gone.
    store.leave(0.5)
    modicum.checkpoint.publishing.write_file = write


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(pool, tmp_path, victim):
    pool.run(die_while_saving, tmp_path, victim, lost=(victim,))
    assert CheckpointStore(tmp_path).steps() == [1]
    assert pool.run(damaged, tmp_path) == [(1, []), (1, [])]
    pool.run(save, tmp_path, "ddp 2", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def through_dcp(ranks: Ranks, folder: Path, layout: str, write: bool) -> dict[str, object]:
    training = Training(ranks, layout, seed=1 if write else 2)
    training.step()
    if write:
        state = {name: dict(view) for name, view in training.registry.read().items()}
        del state["random"]
        dcp.save(state, storage_writer=SafetensorsWriter(folder))
        dist.barrier()
        return training.state()
    state = {name: dict(view) for name, view in training.registry.read().items()}
    del state["random"]
    state["data"]["row"] = 0
    dcp.load(state, storage_reader=SafetensorsReader(folder))
    training.position.update(state["data"])
    return training.state()


@pytest.mark.ranks
def test_dcp_goes_from_two_shards_to_four_and_back_to_replicas(pool, tmp_path):
    folder = tmp_path / "one"
    before = pool.run(through_dcp, folder, "fsdp 2", True)
    assert sorted(path.name for path in folder.iterdir()) == [
        MANIFEST, tensor_file(0), tensor_file(1)
    ]  # fmt: skip
    for layout in ("fsdp 4", "ddp 2"):
        after = pool.run(through_dcp, folder, layout, False, ranks=LAYOUTS[layout][0])
        assert all(same(before[0], found) for found in after)
    assert json.loads((folder / MANIFEST).read_text())["values"] == {"": {"data.row": 3}}
    assert "model.hidden.weight@4,0" in load_file(folder / tensor_file(1))
