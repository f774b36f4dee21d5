"""Modules in blocks as sites: an adapter after an MLP or an attention, or parallel to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from modicum.adapters import load
from modicum.adapters.base import Adapter
from modicum.adapters.blocks import choose_blocks, module_sites
from modicum.core.contracts.catalog import read_file
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import llama, stir, tokens

PLUGIN = Path(__file__).parents[1] / "contracts" / "plugins" / "behind.py"


@pytest.fixture(scope="module")
def value() -> Adapter:
    [record] = read_file(PLUGIN)
    return record.load()(targets=("mlp", "self_attn"))


def transformers_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        vocab_size=29,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("make", [llama, transformers_llama])
def test_mixers_and_mlps_are_sites_as_wide_as_the_stream(make) -> None:
    names = [f"model.layers.{n}.{part}" for n in range(2) for part in ("self_attn", "mlp")]
    sites = module_sites(make())
    assert [site.name for site in sites] == names
    assert {(site.in_features, site.out_features) for site in sites} == {(16, 16)}
    assert [s.name for s in choose_blocks(make(), ["mlp"], ["*.layers.1.*"])] == [names[1]]


@pytest.mark.parametrize("make", [llama, transformers_llama])
def test_what_it_changes_is_what_the_modules_give(make, value: Adapter, tmp_path: Path) -> None:
    model, ids = make(), tokens()

    def logits(of: nn.Module) -> Tensor:
        found = of(ids)
        return getattr(found, "logits", found)

    before = logits(model)
    adapter = stir(value.attach(model))
    assert len(adapter.sites) == 4
    adapted, mlp = logits(model), model.get_submodule("model.layers.0.mlp")
    assert not torch.allclose(adapted, before)
    inputs = torch.randn(3, 16)
    [layer] = mlp.layers_by_adapter.values()
    own = type(mlp).plain_type.forward
    assert torch.equal(mlp(inputs), layer(inputs, lambda x: own(mlp, x)))
    adapted.float().square().sum().backward()
    for name, parameter in adapter.named_parameters():
        assert parameter.grad is not None, name
    adapter.save(tmp_path / "adapter")
    other = make()
    twin = load(other, tmp_path / "adapter", plugins=(PLUGIN,))
    assert twin.sites.keys() == adapter.sites.keys()
    torch.testing.assert_close(logits(other), adapted)
    with adapter.disabled():
        assert torch.equal(logits(model), before)
    adapter.detach()
    assert torch.equal(logits(model), before)


class Narrowing(nn.Module):
    """Has layers of the stream's width, and gives another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.inner(inputs))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.part, self.up = nn.LayerNorm(4), Narrowing(), nn.Linear(2, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.up(self.part(self.norm(inputs)))


def test_a_module_that_gives_another_width_is_refused_when_it_runs(value: Adapter) -> None:
    model = nn.Sequential(nn.ModuleList([Block(), Block()]))
    model.forward = lambda x: model[0][1](model[0][0](x))
    value.with_fields(targets=("part",)).attach(model)
    with pytest.raises(InputError, match=r"gives \(3, 2\) of \(3, 4\)"):
        model(torch.randn(3, 4))


def test_a_name_of_no_such_module_is_refused_with_those_that_there_are(value: Adapter) -> None:
    with pytest.raises(InputError, match="as wide, has this name") as error:
        value.with_fields(targets=("q_proj",)).attach(llama())
    assert "mlp" in str(error.value)
    assert "self_attn" in str(error.value)
