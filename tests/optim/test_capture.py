"""What hooks see of layers: each call once, however it is run, and of the right layers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modicum.core.layers.meta import on_meta
from modicum.optim.capture import Capture, trained_layers


class Calls:
    """Keeps a copy of what each call showed: (input, output gradient, mask)."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self.inputs = 0

    def on_input(self, inputs: Tensor, mask: Tensor | None) -> Any:
        assert not torch.is_grad_enabled()
        assert not inputs.requires_grad
        self.inputs += 1
        return inputs.clone(), mask

    def on_output_gradient(self, gradient: Tensor, remembered: Any) -> None:
        self.seen.append((remembered[0], gradient.clone(), remembered[1]))


def captured(layer: nn.Module) -> tuple[Capture, Calls]:
    calls = Calls()
    return Capture([(layer, calls)]), calls


def test_inputs_and_output_gradients_are_those_of_the_call() -> None:
    layer = nn.Linear(3, 2)
    _, calls = captured(layer)
    inputs, weights = torch.randn(4, 3), torch.randn(4, 2)
    (layer(inputs) * weights).sum().backward()
    ((seen, gradient, mask),) = calls.seen
    assert torch.equal(seen, inputs)
    assert torch.equal(gradient, weights)
    assert mask is None
    torch.testing.assert_close(layer.weight.grad, gradient.T @ seen)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_calls_count_once(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    _, calls = captured(block[0])
    inputs = torch.randn(4, 3, requires_grad=True)
    block(inputs).square().sum().backward()
    plain = calls.seen.pop()
    checkpoint(block, inputs, use_reentrant=reentrant).square().sum().backward()
    assert calls.inputs >= 2
    assert len(calls.seen) == 1
    assert torch.equal(calls.seen[0][0], plain[0])
    assert torch.equal(calls.seen[0][1], plain[1])


def test_blocks_recomputed_within_recomputed_ones_count_once() -> None:
    inner = nn.Linear(3, 3)
    _, calls = captured(inner)

    def outer(x: Tensor) -> Tensor:
        return checkpoint(lambda y: inner(y).tanh(), x.tanh(), use_reentrant=False).sin()

    checkpoint(outer, torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(calls.seen) == 1


def test_what_has_no_backward_pass_does_not_count() -> None:
    layer = nn.Linear(3, 2)
    _, calls = captured(layer)
    with torch.no_grad():
        layer(torch.ones(1, 3))
    assert calls.inputs == 0
    layer(torch.ones(1, 3))
    assert calls.seen == []


def test_a_reused_module_shows_each_call_and_tied_ones_share() -> None:
    layer, twin = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    twin.weight = layer.weight
    calls = Calls()
    Capture([(layer, calls), (twin, calls)])
    twin(layer(layer(torch.randn(5, 3)))).square().sum().backward()
    assert len(calls.seen) == 3
    expected = sum(gradient.T @ inputs for inputs, gradient, _ in calls.seen)
    torch.testing.assert_close(layer.weight.grad, expected)


def test_an_output_that_is_changed_in_place_or_used_twice() -> None:
    layer = nn.Linear(3, 3)
    _, calls = captured(layer)
    inputs = torch.randn(4, 3)
    hidden = torch.relu_(layer(inputs))
    (hidden.square().sum() + hidden.sum()).backward()
    ((_, gradient, _),) = calls.seen
    torch.testing.assert_close(layer.weight.grad, gradient.T @ inputs)
    torch.testing.assert_close(layer.bias.grad, gradient.sum(0))


def test_switches_masks_and_closing() -> None:
    layer = nn.Linear(2, 2)
    capture, calls = captured(layer)
    mask = torch.tensor([True, False])

    def step() -> None:
        layer(input=torch.ones(2, 2)).sum().backward()

    with capture.capturing(False):
        step()
    assert calls.inputs == 0
    with capture.capturing(mask=mask):
        step()
    capture.wanted = False
    with capture.capturing():
        step()
    capture.wanted = True
    step()
    assert [seen[2] is mask for seen in calls.seen] == [True, False]
    capture.close()
    step()
    assert len(calls.seen) == 2


def test_low_precision_is_shown_as_it_is() -> None:
    layer = nn.Linear(3, 3)
    _, calls = captured(layer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(torch.ones(2, 3)).float().sum()
    loss.backward()
    assert calls.seen[0][0].dtype == torch.float32
    assert calls.seen[0][1].dtype == torch.bfloat16


class Zoo(nn.Module):
    """Layers of every kind that is chosen, and of every kind that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv2d(3, 4, (2, 3))
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.flat = nn.Conv1d(4, 4, 1)
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.twin, self.bare = nn.Linear(4, 6), nn.Linear(4, 6, bias=False)
        self.twin.weight, self.twin.bias = self.up.weight, self.up.bias
        self.frozen, self.some = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        self.some.bias.requires_grad_(False)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.embed.weight
        self.lm_head = nn.Linear(4, 7)


def test_layers_whose_weight_is_trained() -> None:
    model = Zoo()
    found = {layer.name: layer for layer in trained_layers(model)}
    assert list(found) == ["conv", "up", "down", "bare", "some"]
    conv, up = found["conv"], found["up"]
    assert (conv.out_features, conv.in_features) == (4, 18)
    assert (conv.weight, conv.bias) == ("conv.weight", "conv.bias")
    assert up.modules == (model.up, model.twin)
    assert (up.weight, up.bias) == ("up.weight", "up.bias")
    assert found["down"].bias is None
    assert found["some"].bias is None  # it is not trained
    assert [layer.name for layer in trained_layers(model, exclude=("up", "c*v"))] == [
        "down",
        "bare",
        "some",
    ]
    assert [layer.name for layer in trained_layers(model, exclude=("twin",))][1] == "down"


def test_tied_layers_that_disagree_on_the_bias_have_none() -> None:
    model = Zoo()
    model.bare.weight = model.up.weight
    (up,) = (layer for layer in trained_layers(model) if layer.name == "up")
    assert up.bias is None
    assert up.modules == (model.up, model.twin, model.bare)


def test_parameters_may_be_given_and_models_without_memory() -> None:
    with on_meta():
        model = Zoo()
    masters = {"down.weight": nn.Parameter(torch.ones(4, 6))}
    assert [layer.name for layer in trained_layers(model, masters)] == ["down"]
    assert len(trained_layers(model)) == 5


def test_a_model_that_is_one_layer() -> None:
    (layer,) = trained_layers(nn.Linear(3, 2))
    assert (layer.name, layer.weight, layer.bias) == ("", "weight", "bias")
