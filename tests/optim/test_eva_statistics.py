"""Which means Eva takes, of which layers, the state that holds them, and what crosses the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.core.contracts.parameters import trained_shapes
from modicum.core.errors import InputError
from modicum.optim import Eva, TransformContext
from modicum.optim.eva import EvaRuntime
from modicum.optim.transform import TransformQuery
from modicum.proofs.contracts.optim.subjects import llama


def bound(model: nn.Module, **fields: Any) -> EvaRuntime:
    return Eva(kl_clip=None, **fields).bind(TransformContext(model))


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3).double()


def ones() -> Tensor:
    return torch.ones(2, 3, dtype=torch.float64)


def test_tied_and_reused_layers_share_their_means() -> None:
    first, second = linear(), linear()
    second.weight, second.bias = first.weight, first.bias
    runtime = bound(nn.Sequential(first, nn.Tanh(), second))
    hidden = first(ones()).tanh()
    second(hidden).square().sum().backward()
    runtime.apply()
    ((a, _),) = runtime.means.vectors
    torch.testing.assert_close(a[:3], (ones().mean(0) + hidden.mean(0)) / 2)


def test_a_gradient_that_came_by_another_way_than_the_layer_stays() -> None:
    used, unseen = linear(), linear()
    runtime = bound(nn.ModuleList([used, unseen]))
    F.linear(used(ones()), unseen.weight).square().sum().backward()
    before = [layer.weight.grad.clone() for layer in (used, unseen)]
    runtime.apply()
    assert not torch.equal(used.weight.grad, before[0])
    assert torch.equal(unseen.weight.grad, before[1])


def test_statistics_of_every_third_update() -> None:
    layer = linear()
    runtime, kept = bound(layer, every=3), []
    for step in range(5):
        with runtime.capturing():
            layer((1 + step) * ones()).square().sum().backward()
        runtime.apply()
        kept.append(runtime.means.averages.clone())
    same = [torch.equal(one, kept[0]) for one in kept]
    assert same == [True, True, True, False, False]
    assert torch.equal(kept[3], kept[4])


def test_a_loss_scale_is_taken_out() -> None:
    found = []
    for scale in (1.0, 1024.0):
        layer = linear()
        runtime = bound(layer)
        (scale * layer(ones()).square().sum()).backward()
        for parameter in layer.parameters():
            parameter.grad /= scale
        runtime.apply(loss_scale=scale)
        found.append((layer.weight.grad, runtime.means.averages))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=0)


def test_the_state_of_other_layers_is_refused() -> None:
    runtime = bound(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4, bias=False)))
    state = runtime.state_dict()
    assert {name: v.shape for name, v in state.items() if isinstance(v, Tensor)} == {
        "0.weight.input_mean": (4,),
        "0.weight.output_gradient_mean": (2,),
        "1.weight.input_mean": (3,),
        "1.weight.output_gradient_mean": (4,),
    }
    with pytest.raises(InputError, match=r"means of other layers.*1\.weight"):
        runtime.load_state_dict({n: v for n, v in state.items() if not n.startswith("1.")})
    with pytest.raises(InputError, match=r"has shape \(5,\), this model's \(4,\)"):
        runtime.load_state_dict(state | {"0.weight.input_mean": torch.zeros(5)})


def test_bytes_on_the_wire_are_those_of_the_vectors() -> None:
    sharded = TransformQuery(trained_shapes(llama()), ranks=4, shards=2)
    vectors = 4 * sum(sum(layer.shape) + 1 for layer in sharded.layers)
    for variant, means in (("eva", (vectors * 2 * 3 // 4, "data")), ("s", (vectors, "shard"))):
        wires = [(wire.bytes, wire.axis) for wire in Eva(variant=variant).ledger(sharded).wire]
        assert wires == [means, (4 * 2 * len(sharded.layers), "shard")]
