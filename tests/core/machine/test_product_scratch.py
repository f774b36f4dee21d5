from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modicum.core.machine import kernels, record
from modicum.core.machine.kernels import ProductScratch, library_bytes, product_scratch
from modicum.core.machine.memory import TensorMeter


@pytest.mark.parametrize("sizes", [(128, 120, 360), (40, 256, 24)])
def test_the_scratch_of_a_product_is_what_the_meter_sees_next_to_its_result(sizes):
    rows, inputs, outputs = sizes
    weight = torch.ones(outputs, inputs, dtype=torch.bfloat16)
    with TensorMeter("cpu") as meter:
        made = torch.ones(rows, inputs, dtype=torch.bfloat16) @ weight.t()
    seen = (meter.peak or 0) - made.nbytes - 2 * rows * inputs
    assert product_scratch(*sizes, half=True).forward == pytest.approx(seen, abs=64)


def test_no_product_is_tried_that_takes_long(monkeypatch):
    tried = []

    def figures(name, measure, count):
        tried.append([int(size) for size in name.split()[1:]])
        return [1, 2, 3][:count]

    monkeypatch.setattr(kernels, "remembered", figures)
    kernels._multiplied.cache_clear()
    try:
        found = product_scratch(16384, 4096, 14336, half=True)
        assert tried[0] == [64, 64, 64]
        rows, inputs, outputs = tried[-1]
        assert 2**31 < rows * inputs * outputs <= 2**33
        assert found == ProductScratch(1, 2, 3 * 4096 * 14336 // (inputs * outputs))
        assert product_scratch(16384, 4096, 14336, half=False) == ProductScratch(0, 0, 0)
    finally:
        kernels._multiplied.cache_clear()


def test_who_measures_the_machine_may_ask_for_figures_of_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asks = "from modicum.core.machine.record import remembered; print(remembered('a', lambda: [7]))"
    with record._turn():
        done = subprocess.run(
            [sys.executable, "-c", asks], capture_output=True, text=True, timeout=60, check=True
        )
    assert done.stdout == "[7]\n"
    assert [path.name.endswith(".kernels.json") for path in Path(tmp_path).rglob("*.json")] == [
        True
    ]


@pytest.mark.parametrize(
    ("said", "each"),
    [
        (None, 32 * 2**20),
        (":4096:2:16:8", 8 * 2**20 + 2**17),
        (":16:8", 2**17),
        ("odd", 32 * 2**20),
    ],
)
def test_cublas_has_a_workspace_for_each_thread_of_a_step(monkeypatch, said, each):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if said is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", said)
    assert library_bytes("cuda") == 2 * each
    assert library_bytes("cpu") == 0
