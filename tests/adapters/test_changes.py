"""Changes that depend on the weight, that are of biases, and that are none: what a merge makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modicum.adapters import LoRA
from modicum.adapters.base import Adapter, AdapterLayer
from modicum.core.contracts.catalog import read_file
from modicum.core.errors import InputError

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "mixed.py"


@pytest.fixture(scope="module")
def mixed() -> Adapter:
    [record] = read_file(PLUGIN)
    return record.load()()


def model(*, bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 4))


def stirred(adapter: object) -> object:
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    return adapter


@pytest.mark.parametrize("bias", [False, True])
def test_a_bias_is_made_by_a_merge_and_goes_with_it(mixed: Adapter, bias: bool) -> None:
    net, inputs = model(bias=bias), torch.randn(3, 6)
    plain = {name: value.clone() for name, value in net.state_dict().items()}
    adapter = stirred(mixed.attach(net))
    expected = net(inputs)
    adapter.merge()
    assert net[0].bias is not None
    torch.testing.assert_close(net(inputs), expected)
    adapter.unmerge()
    assert (net[0].bias is not None) == bias
    torch.testing.assert_close(net(inputs), expected)
    adapter.detach()
    assert net.state_dict().keys() == plain.keys()
    assert all(torch.equal(value, plain[name]) for name, value in net.state_dict().items())


def test_what_is_applied_before_is_merged_before(mixed: Adapter) -> None:
    net, inputs = model(bias=True), torch.randn(3, 6)
    first = stirred(LoRA(rank=2).attach(net, name="first"))
    second = stirred(mixed.attach(net, name="second"))
    first.activate()
    second.activate(alone=False)
    expected = net(inputs)
    with pytest.raises(InputError, match="first is applied before it"):
        second.merge()
    assert torch.equal(net(inputs), expected)
    first.merge()
    torch.testing.assert_close(net(inputs), expected)
    second.merge()
    torch.testing.assert_close(net(inputs), expected)


def test_a_merge_that_fails_leaves_the_model_as_it_was(
    mixed: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, inputs = model(bias=False), torch.randn(3, 6)
    adapter = stirred(mixed.attach(net))
    expected = net(inputs)
    change, calls = type(adapter.layers().__next__()[1]).change, []

    def fails(layer: AdapterLayer, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        calls.append(layer.site.name)
        if len(calls) == 4:  # both layers are asked whether they have a dense form
            raise MemoryError
        return change(layer, weight, bias)

    monkeypatch.setattr(mixed.layer, "change", fails)
    with pytest.raises(MemoryError):
        adapter.merge()
    assert calls == ["0", "2", "0", "2"]
    assert not adapter.merged
    assert net[0].bias is None
    assert torch.equal(net(inputs), expected)


def test_a_quantized_layer_gets_its_bias_with_the_dense_weight(mixed: Adapter) -> None:
    from modicum.linears import Int8Linear

    torch.manual_seed(0)
    net, inputs = nn.Sequential(Int8Linear.from_dense(torch.randn(8, 64))), torch.randn(3, 64)
    adapter = stirred(mixed.attach(net))
    expected = net(inputs)
    adapter.merge(dense=torch.float32)
    assert type(net[0]).__name__ == "AdaptedLinear"
    torch.testing.assert_close(net(inputs), expected, atol=1e-4, rtol=1e-4)
