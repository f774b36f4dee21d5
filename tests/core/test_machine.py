from __future__ import annotations

import json

import pytest
import torch

from modicum.core import control_groups
from modicum.core.cores import usable_cores
from modicum.core.errors import InputError
from modicum.core.machine import memory_bytes, pick_device, this_machine, versions


def test_the_record_of_this_machine_is_plausible_and_plain():
    machine = this_machine(torch.device("cpu"))
    record = json.loads(json.dumps(machine.as_json()))
    assert 0 < record["available_bytes"] <= record["memory_bytes"]
    assert record["cores"] == usable_cores() >= 1
    assert record["threads"] == torch.get_num_threads()
    assert 1e8 < record["flops"] < 1e15
    assert record["processor"]
    assert record["accelerator"] is None
    assert versions()["torch"] == torch.__version__


def test_threads_are_no_cores():
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores() + 1)
    try:
        machine = this_machine(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
    assert (machine.cores, machine.threads) == (usable_cores(), usable_cores() + 1)


def test_pages_of_files_are_room_in_every_group_around_a_process(tmp_path, monkeypatch):
    def group(folder, limit, used, stat):
        folder.mkdir(exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(stat)

    (tmp_path / "own").write_text("12:cpu:/elsewhere\n0::/outer/inner\n")
    monkeypatch.setattr(control_groups, "CGROUPS", tmp_path)
    monkeypatch.setattr(control_groups, "OWN_CGROUP", tmp_path / "own")
    total, free = memory_bytes()
    assert 9000 < free <= total  # no group says anything
    group(tmp_path, "max", 10**6, "")
    group(tmp_path / "outer", 9000, 8000, "anon 1500\ninactive_file 4000\nactive_file 2500\n")
    group(tmp_path / "outer" / "inner", "max", 800, "inactive_file 90\n")
    assert memory_bytes() == (9000, 7500)
    group(tmp_path / "outer" / "inner", 2000, 1900, "inactive_file 400\n")
    assert memory_bytes() == (2000, 500)
    (tmp_path / "outer" / "inner" / "memory.stat").unlink()
    assert memory_bytes() == (2000, 100)
    (tmp_path / "own").unlink()
    group(tmp_path, 10, 20, "")
    assert memory_bytes() == (10, 0)


@pytest.mark.parametrize("there", [True, False])
def test_auto_takes_cuda_where_it_is(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto").type == ("cuda" if there else "cpu")
    assert pick_device("cpu").type == "cpu"


def test_cuda_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"training\.device: PyTorch finds no CUDA"):
        pick_device("cuda")
