"""Copies of base parameters: which there may be, in PEFT's files, next to other adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modicum.adapters import LoRA, adapter_names, load
from modicum.adapters.peft_files import exact_form
from modicum.core.errors import InputError
from modicum.linears import NF4Linear
from modicum.proofs.contracts.adapters.subjects import llama, stir, tokens

IDS = torch.arange(24).view(2, 12) % 29


def transformers_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 29, "tie_word_embeddings": False, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, **sizes
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def logits(of: nn.Module) -> Tensor:
    return of(IDS).logits


@pytest.mark.parametrize(
    ("also", "saved"),
    [
        (("lm_head",), ["lm_head"]),
        (("input_layernorm", "lm_head"), ["input_layernorm", "lm_head"]),
        (("model.layers.1.mlp",), ["model.layers.1.mlp"]),
    ],
)
def test_peft_reads_copies_of_full_modules_and_writes_them(
    also: tuple[str, ...], saved: list[str], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    ours, back = transformers_llama(), transformers_llama()
    adapter = stir(LoRA(rank=2, also=also).attach(ours))
    adapter.save(tmp_path / "ours")
    theirs = peft.PeftModel.from_pretrained(transformers_llama(), tmp_path / "ours").eval()
    assert theirs.peft_config["default"].modules_to_save == saved
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    twin = load(back, tmp_path / "theirs")
    torch.testing.assert_close(logits(back), logits(ours), rtol=0, atol=1e-6)
    assert twin.copied == adapter.copied
    twin.detach()
    assert torch.equal(logits(back), logits(transformers_llama()))


def test_a_peft_file_without_what_it_says_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from safetensors.torch import load_file, save_file

    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.get_peft_model(transformers_llama(), config).save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({k: v for k, v in tensors.items() if "lm_head" not in k}, file)
    with pytest.raises(InputError, match=r"lacks what was trained in full.*lm_head\.weight"):
        load(transformers_llama(), tmp_path)


def test_copies_that_peft_cannot_name_are_kept_in_our_form(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.ReLU(), nn.LayerNorm(4)))
    for also, said in ((("0.bias",), "single parameters"), (("1",), "other modules")):
        adapter = LoRA(rank=2, targets=("0",), also=also).attach(net)
        assert list(adapter.copied) == [also[0].split(".")[0]]
        assert exact_form(adapter) == "modicum"
        with pytest.raises(InputError, match=said):
            adapter.save(tmp_path / "peft", form="peft")
        adapter.detach()


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    net[2].weight = net[1].weight
    return net


def hooked() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.Sequential(nn.Linear(4, 4), nn.utils.weight_norm(nn.Conv1d(4, 4, 1)))


class Reads(nn.Module):
    """Uses the weight of a norm that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.map(inputs) * self.norm.weight


class Rooted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.shift = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))


def quantized() -> nn.Module:
    held = NF4Linear.from_dense(torch.randn(64, 64), torch.randn(64))
    return nn.Sequential(nn.Linear(64, 64), held)


@pytest.mark.parametrize(
    ("make", "also", "said"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "nrom", "no parameter or module"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), "0", "trained in full by `also`"),
        (tied, "1", r"shared with 2\.weight"),
        (hooked, "1", "a hook makes its weight"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), "1", "a list of its own"),
        (Reads, "norm", "without calling"),
        (Rooted, "shift", "the model itself holds it"),
        (quantized, "1.*", "form that is not trained"),
    ],
)
def test_what_cannot_be_copied_is_refused_and_the_model_left_alone(
    make: Any, also: str, said: str
) -> None:
    net = make()
    before = [(name, type(module)) for name, module in net.named_modules()]
    flags = [parameter.requires_grad for parameter in net.parameters()]
    with pytest.raises(InputError, match=said) as error:
        LoRA(rank=2, also=(also,)).attach(net)
    assert error.value.field == "also"
    assert [(name, type(module)) for name, module in net.named_modules()] == before
    assert [parameter.requires_grad for parameter in net.parameters()] == flags


def test_a_bias_next_to_codes_may_be_a_copy_and_is_merged() -> None:
    net, inputs = quantized().eval(), torch.randn(3, 64)
    codes = {name: value.clone() for name, value in net.state_dict().items()}
    adapter = stir(LoRA(rank=2, targets=("1",), also=("1.bias",)).attach(net))
    adapted = net(inputs)
    adapter.merge(dense=torch.float32)
    torch.testing.assert_close(net(inputs), adapted, rtol=0, atol=1e-4)
    adapter.unmerge()
    assert torch.equal(net(inputs), adapted)
    adapter.detach()
    assert all(torch.equal(codes[name], value) for name, value in net.state_dict().items())


def test_a_module_of_two_names_has_one_copy() -> None:
    norm = nn.LayerNorm(4)
    net, inputs = nn.Sequential(nn.Linear(4, 4), norm, norm), torch.randn(3, 4)
    adapter = stir(LoRA(rank=2, also=("1",)).attach(net))
    names = [name for name, _ in adapter.named_parameters() if "copy" in name]
    assert names == ["1.copy_weight", "1.copy_bias"]
    adapted = net(inputs)
    adapter.merge()
    torch.testing.assert_close(net(inputs), adapted)


def test_of_two_adapters_the_last_ones_copy_counts_and_the_first_merges_first() -> None:
    net, ids = llama(), tokens()
    first = stir(LoRA(rank=2, also=("norm",)).attach(net, name="first"))
    alone = net(ids)
    second = stir(LoRA(rank=2, also=("norm",)).attach(net, name="second"))
    first.activate()
    assert torch.equal(net(ids), alone)
    second.activate(alone=False)
    both, weight = net(ids), copy.deepcopy(net.get_parameter("model.norm.weight"))
    with pytest.raises(InputError, match="has a copy of it too"):
        second.merge()
    assert torch.equal(net(ids), both)
    first.merge()
    torch.testing.assert_close(net(ids), both, rtol=1e-4, atol=1e-4)
    second.merge()
    torch.testing.assert_close(net(ids), both, rtol=1e-4, atol=1e-4)
    second.unmerge()
    first.unmerge()
    assert torch.equal(net.get_parameter("model.norm.weight"), weight)


class Named(nn.Module):
    """Gives a mapping, and no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"hidden": inputs * self.scale}


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.named = nn.Linear(4, 4), Named()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.named(self.map(inputs))["hidden"]


def test_a_module_that_gives_no_tensor_computes_with_its_copies() -> None:
    net, inputs = Mapped(), torch.randn(3, 4)
    adapter = stir(LoRA(rank=2, targets=("map",), also=("named",)).attach(net))
    copied = dict(adapter.named_parameters())["named.copy_scale"]
    torch.testing.assert_close(net(inputs), net.map(inputs) * copied)
    with adapter.disabled():
        assert torch.equal(net(inputs), net.map(inputs))


def test_rows_of_an_adapter_without_copies_pass_a_module_that_gives_no_tensor() -> None:
    net, inputs = Mapped(), torch.randn(3, 4)
    LoRA(rank=2, targets=("map",), also=("named",)).attach(net, name="first")
    stir(LoRA(rank=2, targets=("map",)).attach(net, name="second"))
    expected = net(inputs)
    with adapter_names(net, ["second"] * 3):
        torch.testing.assert_close(net(inputs), expected)


@pytest.mark.parametrize("pair", [False, True], ids=["mapping", "pair"])
def test_rows_that_use_other_copies_need_one_tensor(
    pair: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, inputs = Mapped(), torch.randn(3, 4)
    stir(LoRA(rank=2, targets=("map",), also=("named",)).attach(net, name="first"))
    if pair:
        monkeypatch.setattr(Named, "forward", lambda self, x: (x * self.scale, x.sum(-1)))
    said, names = "does not give one tensor.*Named", ["first", None, "first"]
    with pytest.raises(InputError, match=said), adapter_names(net, names):
        net.named(inputs)


def test_an_adapter_works_on_a_layer_of_which_another_has_copies() -> None:
    net, inputs = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(3, 4)
    LoRA(rank=2, targets=("0",), also=("1",)).attach(net, name="first")
    [(_, layer)] = stir(LoRA(rank=2, targets=("1",)).attach(net, name="second")).layers()
    weight = net[1].weight + layer.delta()
    expected = F.linear(net[0](inputs), weight, net[1].bias)
    torch.testing.assert_close(net(inputs), expected)


def test_copies_stand_in_the_files_of_a_full_model(tmp_path: Path) -> None:
    ours, back = transformers_llama(), transformers_llama()
    adapter = stir(LoRA(rank=2, also=("norm",)).attach(ours))
    ours.save_pretrained(tmp_path)
    twin = load(back, tmp_path)
    assert torch.equal(logits(back), logits(ours))
    assert twin.copied == adapter.copied == {"model.norm": ("weight",)}
