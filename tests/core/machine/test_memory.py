from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from modicum.core.machine import memory
from modicum.core.machine.memory import (
    TensorMeter,
    bytes_by_kind,
    tensor_bytes,
)


def test_the_peak_is_exact_for_known_allocations():
    with TensorMeter("cpu") as meter:
        first = torch.empty(1000)
        second = torch.empty(3000)
        del second
        third = torch.empty(2000)
    assert meter.peak == 4 * 4000
    assert first.numel() + third.numel() == 3000


def test_what_was_there_before_counts_if_it_is_told():
    before = torch.empty(1000)
    meter = TensorMeter("cpu")
    meter.start(before=before.nbytes)
    kept = torch.empty(1500)
    assert (meter.stop(), meter.stop()) == (10_000, 10_000)
    assert (meter.running, kept.nbytes) == (False, 6000)


def test_a_meter_can_be_started_again_and_sees_backward_passes():
    layer = nn.Linear(64, 64, bias=False)
    meter = TensorMeter("cpu")
    for _ in range(2):
        meter.start()
        layer(torch.ones(8, 64)).sum().backward()
        # Input, output, sum and its gradient; the weight's gradient, for an instant a copy of it.
        assert 64 * 64 * 4 + 8 * 64 * 4 <= meter.stop() <= 2 * 64 * 64 * 4 + 4 * 8 * 64 * 4
        layer.zero_grad(set_to_none=True)


def test_the_peak_is_the_same_when_events_are_added_up_on_the_way():
    meter = TensorMeter("cpu")
    meter.add_up()  # it is off
    with meter:
        first = torch.empty(1000)
        second = torch.empty(3000)
        meter.add_up()
        del second
        third = torch.empty(2500)
        meter.add_up()
        fourth = torch.empty(1000)
    assert meter.peak == 4 * 4500
    assert first.numel() + third.numel() + fourth.numel() == 4500


def test_what_many_events_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[bool] = []
    monkeypatch.setattr(memory, "_trim", lambda: given.append(True))
    for count in (10, memory._MANY):
        with TensorMeter("cpu") as meter:
            for _ in range(count):
                torch.empty(3)
            meter.add_up()
        assert given == [True] * (count == memory._MANY)
        assert meter.peak == 4 * 3


def test_only_allocations_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    # An exchange records an operator, whose end gloo's threads write down. One that ended after
    # the meter had stopped wrote to freed memory, and sooner or later the process crashed.
    seen: list[str] = []

    def noted(self: Any, events: list[Any]) -> int:
        seen.extend(event.tag.name for event in events)
        return len(seen)

    monkeypatch.setattr(memory._Blocks, "follow", noted)
    with TensorMeter("cpu"), torch.profiler.record_function("an exchange"):
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
    assert set(seen) == {"Allocation"}


def test_a_storage_counts_once_and_whole():
    base = torch.zeros(10, 10)
    assert tensor_bytes([base, base[0], base.T, base.view(100)]) == 400
    assert tensor_bytes([base[0]]) == 400


def test_bytes_by_kind():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    assert bytes_by_kind(model, optimizer)["gradient"] == 0
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    trained = 4 * (16 + 4 + 8)
    assert bytes_by_kind(model, optimizer) == {
        "weight": trained + 4 * 8 + 8,
        "gradient": trained,
        "optimizer": 2 * trained + 4 * 4,
    }


def test_bytes_by_kind_knows_what_is_held_next_to_the_model():
    model, master = nn.Linear(4, 4, bias=False), nn.Parameter(torch.ones(8))
    master.grad = torch.ones(8)
    # A master may be a view of what the model holds, which counts once.
    found = bytes_by_kind(model, (), [master, model.weight.detach()[0]])
    assert found == {"weight": 4 * (16 + 8), "gradient": 4 * 8, "optimizer": 0}


GROWTH = """
from modicum.core.machine.memory import peak_resident_bytes, resident_bytes
before = resident_bytes()
block = b"1" * 50_000_000
print(resident_bytes() - before, peak_resident_bytes() - before)
"""


def test_the_resident_size_grows_with_what_is_touched():
    # In a process of its own: this one may hand memory back meanwhile, or have some to reuse.
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True
    )
    grown, peak = (int(word) for word in done.stdout.split())
    assert 45_000_000 < grown < 80_000_000
    assert peak >= 45_000_000


def test_a_process_is_limited_where_a_shell_said_so(monkeypatch):
    free, some = (memory.resource.RLIM_INFINITY,) * 2, (10**9, memory.resource.RLIM_INFINITY)
    limits = {memory.resource.RLIMIT_AS: free, memory.resource.RLIMIT_DATA: free}
    monkeypatch.setattr(memory.resource, "getrlimit", limits.__getitem__)
    assert not memory.limited()
    limits[memory.resource.RLIMIT_DATA] = some
    assert memory.limited()
