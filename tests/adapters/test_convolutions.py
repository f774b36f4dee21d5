"""LoRA on convolutions: the change of the weight, PEFT's files, what is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import LoRA, load
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import stir

ODD = {
    "1d": (nn.Conv1d(6, 10, 3, padding=1), (2, 6, 11)),
    "2d": (nn.Conv2d(6, 10, (3, 2), stride=(2, 1), padding=(1, 0)), (2, 6, 11, 7)),
    "3d": (nn.Conv3d(3, 5, (1, 2, 3), bias=False), (2, 3, 4, 5, 6)),
    "1x1": (nn.Conv2d(6, 10, 1), (2, 6, 5, 5)),
    "same": (nn.Conv2d(6, 10, 3, padding="same"), (2, 6, 5, 5)),
}
OURS_ALONE = {
    "groups": (nn.Conv2d(6, 9, 3, groups=3, padding=1), (2, 6, 5, 5)),
    "depthwise": (nn.Conv1d(6, 12, 3, groups=6), (2, 6, 9)),
    "dilated": (nn.Conv2d(6, 10, 3, dilation=2), (2, 6, 9, 9)),
    "circular": (nn.Conv2d(6, 10, 3, padding=2, padding_mode="circular"), (2, 6, 5, 5)),
}
ALL = {**ODD, **OURS_ALONE}


def adapted(name: str, **fields: object) -> tuple[nn.Module, nn.Module, object, Tensor]:
    """The plain model, a copy with an adapter that does something, its handle, and inputs."""
    layer, shape = ALL[name]
    torch.manual_seed(0)
    plain = nn.Sequential(copy.deepcopy(layer), nn.ReLU())
    net = copy.deepcopy(plain)
    adapter = stir(LoRA(rank=2, alpha=3.0, targets=("0",), **fields).attach(net))
    return plain, net, adapter, torch.randn(shape)


@pytest.mark.parametrize("name", ALL)
def test_the_adapter_is_a_change_of_the_weight(name: str) -> None:
    plain, net, adapter, inputs = adapted(name)
    layer = plain.get_submodule("0")
    [(_, own)] = adapter.layers()
    with torch.no_grad():
        changed = copy.deepcopy(plain)
        weight = changed.get_submodule("0").weight
        weight += (1.5 * own.B @ own.A).view_as(weight)
    assert own.A.shape == (2, weight[0].numel())
    expected, found = changed(inputs), net(inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    adapter.merge()
    torch.testing.assert_close(net(inputs), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(net.get_submodule("0").weight, weight, rtol=0, atol=1e-6)
    adapter.unmerge()
    adapter.detach()
    assert type(net.get_submodule("0")) is type(layer)
    torch.testing.assert_close(net(inputs), plain(inputs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["2d", "groups"])
def test_gradients_are_those_of_the_changed_weight(name: str) -> None:
    _, net, adapter, inputs = adapted(name)
    net.double()
    values = [value for _, value in adapter.named_parameters()]
    names = [n for n, value in net.named_parameters() if value.requires_grad]
    inputs = inputs[:1].double().requires_grad_()

    def output(x: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (inputs, *values))


@pytest.mark.parametrize("name", ["2d", "groups", "circular"])
def test_on_bf16_and_with_dropout_only_what_trains_is_fp32(name: str) -> None:
    _, net, adapter, inputs = adapted(name, dropout=0.5)
    net.get_submodule("0").bfloat16()
    for parameter in adapter.parameters():
        parameter.data = parameter.data.float()
    outputs = net(inputs.bfloat16())
    assert outputs.dtype == torch.bfloat16
    outputs.float().square().sum().backward()
    assert {parameter.grad.dtype for parameter in adapter.parameters()} == {torch.float32}
    net.train()
    torch.manual_seed(1)
    one = net(inputs.bfloat16())
    assert not torch.equal(one, net(inputs.bfloat16()))
    net.eval()
    assert torch.equal(net(inputs.bfloat16()), net(inputs.bfloat16()))


@pytest.mark.parametrize("name", ODD)
def test_peft_reads_it_and_writes_it(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain, net, adapter, inputs = adapted(name)
    adapter.save(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "ours")
    torch.testing.assert_close(theirs(inputs), net(inputs), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    load(plain, tmp_path / "theirs")
    assert torch.equal(plain(inputs), net(inputs))


@pytest.mark.parametrize("name", OURS_ALONE)
def test_what_peft_computes_otherwise_is_kept_in_our_form(name: str, tmp_path: Path) -> None:
    plain, net, adapter, inputs = adapted(name)
    with pytest.raises(InputError, match="in PEFT its factors of a convolution"):
        adapter.save(tmp_path / "peft", form="peft")
    adapter.save(tmp_path / "own")
    assert (tmp_path / "own" / "modicum_adapter.json").exists()
    load(plain, tmp_path / "own")
    assert torch.equal(plain(inputs), net(inputs))


def test_pefts_factors_of_a_grouped_convolution_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    plain = nn.Sequential(copy.deepcopy(ALL["groups"][0]))
    with pytest.warns(UserWarning, match="groups"):
        theirs = peft.get_peft_model(
            copy.deepcopy(plain), peft.LoraConfig(r=3, target_modules=["0"])
        )
    theirs.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="read all channels"):
        load(plain, tmp_path)
    assert type(plain.get_submodule("0")) is nn.Conv2d


class Odd(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


def test_all_linear_means_no_convolutions_and_odd_ones_are_refused() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(16, 2), Odd(3, 4, 1))
    adapter = LoRA(rank=2).attach(net)
    assert list(adapter.sites) == ["2"]
    adapter.detach()
    with pytest.raises(InputError, match="a subclass of Conv2d that computes in its own way"):
        LoRA(rank=2, targets=("3",)).attach(net)
    with pytest.warns(FutureWarning):
        hooked = nn.Sequential(nn.utils.weight_norm(nn.Conv1d(4, 4, 1)))
    with pytest.raises(InputError, match="a hook makes its weight"):
        LoRA(rank=2, targets=("0",)).attach(hooked)


def test_a_compiled_convolution_computes_the_same() -> None:
    _, net, _, inputs = adapted("groups")
    expected = net(inputs)
    torch.compiler.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), expected)
