"""What a layer has in addition to its weight, as it takes another form and is dense again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from modicum.core.errors import InputError
from modicum.linears import LowRank

FORM = LowRank(targets=("0",), rank=2)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))


def test_hooks_stay_with_a_layer_in_every_form() -> None:
    net, calls = model(), list[str]()

    def note(said: str, *_: Any) -> None:
        calls.append(said)

    def ran() -> list[str]:
        calls.clear()
        net(torch.ones(3, 6, requires_grad=True)).sum().backward()
        return list(calls)

    handles = [
        net[0].register_forward_pre_hook(partial(note, "before"), with_kwargs=True),
        net[0].register_forward_hook(partial(note, "after"), with_kwargs=True, always_call=True),
        net[0].register_full_backward_hook(partial(note, "backward")),
    ]
    expected = ["before", "after", "backward"]
    assert ran() == expected
    formed = FORM.convert(net)
    assert type(net[0]) is not nn.Linear
    assert ran() == expected
    handles[0].remove()
    assert ran() == expected[1:]
    formed.merge()
    assert type(net[0]) is nn.Linear
    assert ran() == expected[1:]
    for handle in handles:
        handle.remove()
    assert ran() == []


def patched(layer: nn.Module) -> None:
    layer.forward = partial(nn.Linear.forward, layer)


def with_state_hook(layer: nn.Module) -> None:
    layer.register_state_dict_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (patched, "its `forward` was replaced"),
        (partial(prune.l1_unstructured, name="bias", amount=0.5), "makes its parameters of others"),
        (with_state_hook, "change its state dict"),
    ],
)
def test_what_another_form_would_lose_is_refused(
    change: Callable[[nn.Module], object], said: str
) -> None:
    net = model()
    change(net[0])
    with pytest.raises(InputError, match=said) as caught:
        FORM.convert(net)
    assert caught.value.value == "0"
    assert type(net[0]) is nn.Linear


def test_a_layer_takes_a_form_once_accelerate_has_left_it() -> None:
    hooks = pytest.importorskip("accelerate").hooks
    net = model()
    hooks.add_hook_to_module(net[0], hooks.SequentialHook())
    with pytest.raises(InputError, match="its `forward` was replaced"):
        FORM.convert(net)
    hooks.remove_hook_from_module(net[0])
    formed, inputs = FORM.convert(net), torch.ones(3, 6)
    converted = net(inputs)
    formed.merge()
    torch.testing.assert_close(net(inputs), converted)


def test_a_layer_whose_weight_a_form_cannot_represent_is_named() -> None:
    net = model()
    with torch.no_grad():
        net[0].weight[0, 0] = torch.inf
    with pytest.raises(InputError, match=r"values that are not finite \(found: '0'\)"):
        FORM.convert(net)
