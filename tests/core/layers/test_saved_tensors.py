from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from modicum.core.codecs.dual_quantization import DualQuantization
from modicum.core.layers.saved_tensors import Need, SavedTensors
from modicum.core.layers.torch_calls import Call, Calls
from modicum.core.random import normal_

BOUND = 0.05


def numbers(*shape: int, name: str = "x") -> Tensor:
    return normal_(torch.empty(shape), seed=0, name=name)


def bound(call: Call, tensor: Tensor) -> float | None:
    """Convolutions' inputs may be off, but not the batch."""
    given = call.argument(0, "input")
    if call.function is not torch.conv2d or given.grad_fn is None:
        return None
    return BOUND if tensor.shape == given.shape else None


class Net(nn.Module):
    """Convolution, ReLU, convolution, ReLU, pooling, convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, padding=1)
        self.third = nn.Conv2d(6, 4, 3)
        for name, parameter in self.named_parameters():
            normal_(parameter, seed=0, name=name, std=0.3)
        self.outputs: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.first(x))
        two = torch.relu(self.second(one))
        pooled = F.max_pool2d(two, 2)
        self.outputs = [StorageWeakRef(t.untyped_storage()) for t in (one, two, pooled)]
        return self.third(pooled)


def saved_of(model: nn.Module) -> SavedTensors:
    return SavedTensors(model, DualQuantization(), bound)


def gradients(model: nn.Module, x: Tensor, saved: SavedTensors | None) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    if saved is None:
        loss = model(x).square().sum()
    else:
        with saved.context():
            loss = model(x).square().sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | {"x": x.grad}


def test_a_relu_and_the_convolution_after_it_hold_one_record_and_no_storage() -> None:
    model, saved = Net(), saved_of(Net())
    with saved.context():
        loss = model(numbers(2, 3, 16, 16)).sum()
    gc.collect()
    assert [output.expired() for output in model.outputs] == [True, True, True]
    by_need = saved.by_need()
    first, second, pooled = 2 * 8 * 256 * 4, 2 * 6 * 256 * 4, 2 * 6 * 64 * 4
    assert by_need[Need.VALUES][1] == first + pooled
    assert by_need[Need.SIGNS] == (second // 32, second)
    # The batch, whose storage its owner holds, and where the maxima were.
    assert by_need[Need.EXACT] == (2 * 3 * 256 * 4 + 2 * pooled,) * 2
    assert saved.plain_bytes == first + second + 3 * pooled + 2 * 3 * 256 * 4
    assert by_need[Need.VALUES][0] < 0.25 * (first + pooled)
    loss.backward()
    assert (saved.held_bytes, saved.plain_bytes) == (0, 0)


def test_what_flows_back_is_exact_and_weight_gradients_are_a_little_off() -> None:
    model = Net()
    exact = gradients(model, numbers(2, 3, 16, 16), None)
    found = gradients(model, numbers(2, 3, 16, 16), saved_of(model))
    off = {name for name in exact if not torch.equal(found[name], exact[name])}
    # The first one's input is the batch, which stays as it is.
    assert off == {"second.weight", "third.weight"}
    for name in off:
        assert (found[name] - exact[name]).norm() < 0.05 * exact[name].norm()


def test_unpacking_twice_gives_the_same() -> None:
    model, saved = Net(), saved_of(Net())
    with saved.context():
        loss = model(numbers(2, 3, 16, 16)).square().sum()
    once = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    held = saved.held_bytes
    again = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))
    assert saved.held_bytes == held > 0
    del loss, once, again
    assert saved.held_bytes == 0


def test_second_derivatives_are_those_of_the_stored_values() -> None:
    model, x = Net(), numbers(1, 3, 8, 8)
    saved, found = saved_of(model), []
    for keep in (None, saved):
        with saved.context() if keep else torch.enable_grad():
            loss = model(x).square().sum()
            (gradient,) = torch.autograd.grad(loss, [model.third.weight], create_graph=True)
            total = gradient.square().sum()
        found.append(torch.autograd.grad(total, [model.first.weight])[0])
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.1 * float(found[0].abs().max()))
    assert not torch.equal(found[0], found[1])


def test_blocks_that_run_again_are_exact() -> None:
    model = Net()

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    again, x = Again(), numbers(2, 3, 16, 16)
    exact = gradients(again, x, None)
    found = gradients(again, x, saved_of(again))
    assert all(torch.equal(found[name], exact[name]) for name in exact)


def test_who_needs_it_exact_gets_it_exact() -> None:
    layer = nn.Conv2d(2, 2, 3, padding=1)
    saved = saved_of(layer)
    x = numbers(1, 2, 8, 8).requires_grad_()
    for linear_first in (True, False):
        with saved.context():
            hidden = torch.relu(x)
            parts = [hidden.square, lambda: layer(hidden)]  # noqa: B023 - called at once
            parts = parts if linear_first else parts[::-1]
            loss = sum(part().sum() for part in parts)
            assert saved.by_need()[Need.VALUES] == (0, 0)
        (found,) = torch.autograd.grad(loss, [layer.weight])
        (exact,) = torch.autograd.grad(layer(torch.relu(x)).sum(), [layer.weight])
        assert torch.equal(found, exact)


def test_the_tighter_of_two_bounds_counts() -> None:
    layers = nn.ModuleList(nn.Conv2d(2, 2, 3, bias=False) for _ in range(2))
    bounds = iter([0.2, 0.01])
    saved = SavedTensors(
        layers,
        DualQuantization(),
        lambda call, tensor: next(bounds) if tensor.shape[-1] == 8 else None,
    )
    x = numbers(1, 2, 8, 8).requires_grad_()
    with saved.context():
        hidden = torch.relu(x)
        loss = sum(layer(hidden).sum() for layer in layers)
    (found,) = torch.autograd.grad(loss, [layers[0].weight], retain_graph=True)
    (exact,) = torch.autograd.grad(layers[0](torch.relu(x)).sum(), [layers[0].weight])
    assert 0 < float((found - exact).abs().max()) <= 0.01 * 36


def test_in_place_relus_and_channels_last() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True),
        nn.MaxPool2d(2), nn.Conv2d(4, 2, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    x = numbers(2, 3, 20, 20).to(memory_format=torch.channels_last)
    exact, saved = gradients(model, x, None), saved_of(model)
    found = gradients(model, x, saved)
    off = {name for name in exact if not torch.equal(found[name], exact[name])}
    assert off == {"2.weight", "5.weight"}


def test_a_tensor_changed_in_place_is_noticed_as_autograd_does() -> None:
    saved = saved_of(nn.Linear(1, 1))
    x = numbers(4).requires_grad_()
    with saved.context():
        hidden = x * 2
        loss = hidden.square().sum()
    with torch.no_grad():
        hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_and_buffers_are_not_counted() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2))
    model.eval()
    saved, x = saved_of(model), numbers(1, 2, 6, 6)
    with saved.context():
        loss = model(x).sum()
    # What the convolution and the norm read, and nothing of theirs.
    assert saved.plain_bytes <= x.nbytes + 1 * 2 * 4 * 4 * 4 + 16
    loss.backward()


def test_without_gradients_and_inside_of_itself_it_does_nothing() -> None:
    model, saved = Net(), saved_of(Net())
    with torch.no_grad(), saved.context():
        model(numbers(1, 3, 8, 8))
    assert saved.held_bytes == 0
    with saved.context(), saved.context():
        loss = model(numbers(1, 3, 8, 8)).sum()
    held = saved.by_need()[Need.VALUES]
    assert 0 < held[0] < held[1]
    del loss


def test_storages_at_a_reused_address_are_told_apart() -> None:
    layer, saved = nn.Conv2d(2, 2, 3), saved_of(nn.Linear(1, 1))
    with saved.context():
        losses = []
        for index in range(5):
            x = numbers(1, 2, 40, 40, name=f"x{index}").requires_grad_()
            losses.append((layer(torch.relu(x)).sum(), x))
    for loss, x in losses:
        (found,) = torch.autograd.grad(loss, [layer.weight])
        (exact,) = torch.autograd.grad(layer(torch.relu(x)).sum(), [layer.weight])
        assert (found - exact).abs().max() <= BOUND * 38 * 38


def test_calls_know_their_arguments_and_end() -> None:
    done = []
    calls = Calls(lambda call, output: done.append((call.function, tuple(output.shape))))
    with calls:
        F.conv2d(torch.ones(1, 1, 4, 4), weight=torch.ones(2, 1, 3, 3))
    assert done[-1] == (torch.conv2d, (1, 2, 2, 2))
    assert calls.current is None
    call = Call(torch.conv2d, (1,), {"weight": 2})
    assert (call.argument(0, "input"), call.argument(1, "weight"), call.argument(2, "bias")) == (
        1,
        2,
        None,
    )
