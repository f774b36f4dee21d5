from __future__ import annotations

import json

import pytest
import torch

from modicum.core.errors import InputError
from modicum.core.machine import pick_device, this_machine, versions


def test_the_record_of_this_machine_is_plausible_and_plain():
    machine = this_machine(torch.device("cpu"))
    record = json.loads(json.dumps(machine.as_json()))
    assert 0 < record["available_bytes"] <= record["memory_bytes"]
    assert record["cores"] == torch.get_num_threads()
    assert 1e8 < record["flops"] < 1e15
    assert record["processor"]
    assert record["accelerator"] is None
    assert versions()["torch"] == torch.__version__


@pytest.mark.parametrize("there", [True, False])
def test_auto_takes_cuda_where_it_is(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto").type == ("cuda" if there else "cpu")
    assert pick_device("cpu").type == "cpu"


def test_cuda_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"training\.device: PyTorch finds no CUDA"):
        pick_device("cuda")
