from __future__ import annotations

import pytest

from modicum.core.machine.kernels import _convolution, _convolved, convolution_bytes


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _convolved.cache_clear()
    yield
    _convolved.cache_clear()


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("inputs", "outputs", "side"), [(3, 32, 16), (32, 64, 8)])
def test_what_many_rows_take_is_told_from_few(inputs, outputs, side, half):
    told = convolution_bytes(72, inputs, outputs, side, half=half, through=True)
    direct = _convolution(72, inputs, outputs, side, half, True)
    assert told == pytest.approx(direct, rel=0.01)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [2, 40])
def test_at_least_the_results_are_counted(rows, half):
    size = 2 if half else 4
    forward, backward = convolution_bytes(rows, 8, 16, 12, half=half, through=True)
    assert forward >= rows * 16 * 12 * 12 * size
    images, weight, bias = rows * 8 * 12 * 12, 16 * 8 * 9, 16
    assert backward >= (images + weight + bias) * size
    _, without = convolution_bytes(rows, 8, 16, 12, half=half, through=False)
    assert (weight + bias) * size <= without <= backward


def test_a_trial_is_kept_for_other_processes(monkeypatch):
    first = convolution_bytes(2, 4, 4, 8, half=False, through=True)
    _convolved.cache_clear()
    monkeypatch.setattr("modicum.core.machine.kernels.F.conv2d", lambda *_: pytest.fail("tried"))
    assert convolution_bytes(2, 4, 4, 8, half=False, through=True) == first
