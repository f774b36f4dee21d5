"""MoS builds every layer's LoRA from pools that the model owns once."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modicum.adapters import LoRA, MoS, PiSSA, load
from modicum.adapters.base import Adapter
from modicum.adapters.mos import pool_names
from modicum.adapters.sites import Site
from modicum.core.contracts.parameters import optimizer_groups
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise
from modicum.proofs.contracts.adapters.subjects import distance, llama, numbers, stir, tokens

VALUE = MoS(rank=4, equivalent_rank=3, private_rank=1, shards=4)


class Stack(nn.Module):
    """Layers of one kind, [8 -> 12] and back, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(count)
        )
        with torch.no_grad():
            for name, value in self.named_parameters():
                value.copy_(numbers(*value.shape, name=name) / 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["down"](torch.tanh(block["up"](x)))
        return x


def sites(count: int) -> list[Site]:
    return [Site(f"blocks.{i}.up", "linear", 8, 12) for i in range(count)]


def test_it_trains_as_many_numbers_as_lora_of_rank_e() -> None:
    for e in (1, 2, 3):
        value = MoS(rank=4, equivalent_rank=e, private_rank=0, shards=2)
        model = Stack(5)
        trained = sum(value.numel() for value in value.attach(model).parameters())
        assert trained == e * 5 * 2 * (8 + 12)
        lora = LoRA(rank=e).attach(Stack(5))
        assert trained == sum(value.numel() for value in lora.parameters())
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        assert len(names) == 4  # A and B of each kind, each once
        groups = optimizer_groups(model, learning_rate=1.0, weight_decay=0.1)
        assert [len(group["params"]) for group in groups] == [4]


@given(
    count=st.integers(1, 6),
    e=st.integers(1, 4),
    more=st.integers(0, 8),
    p=st.integers(0, 4),
    shards=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
def test_indices(count: int, e: int, more: int, p: int, shards: int, seed: int) -> None:
    p = min(p, e)
    r = e if p == e else p + min(more, (e - p) * count)
    if r < e:
        return
    value = MoS(rank=r, equivalent_rank=e, private_rank=p, shards=shards)
    public = (e - p) * count * shards
    private: list[int] = []
    for site in sites(count):
        of = {factor: value.index(site, sites(count), factor, seed=seed) for factor in "AB"}
        for index in of.values():
            assert len(index) == r * shards
            assert len(index.unique()) == len(index)
            assert (index[: (r - p) * shards] < public).all()
        own = of["A"][(r - p) * shards :]
        assert torch.equal(own, of["B"][(r - p) * shards :])  # private pairs stay together
        private += own.tolist()
    assert private == list(range(public, e * count * shards))  # each is one layer's


def test_indices_are_a_function_of_seed_layer_and_factor() -> None:
    value, all_sites = MoS(rank=6, equivalent_rank=2, private_rank=0), sites(8)
    chosen = {
        (site.name, factor, seed): tuple(value.index(site, all_sites, factor, seed=seed).tolist())
        for site in all_sites
        for factor in "AB"
        for seed in (0, 1)
    }
    assert len(set(chosen.values())) == len(chosen) == 32
    again = value.index(all_sites[3], all_sites, "B", seed=1)
    assert tuple(again.tolist()) == chosen[all_sites[3].name, "B", 1]


def test_rows_join_shards_in_their_order() -> None:
    adapter = stir(VALUE.attach(Stack(5)))
    for name, layer in adapter.layers():
        a, b, _ = layer.as_lora()
        pool_A, pool_B = (getattr(adapter.shared, key) for key in pool_names(adapter.sites[name]))
        for factor, pool, index in ((a, pool_A, layer.index_A), (b.T, pool_B, layer.index_B)):
            strided = torch.cat([pool[index[i::4]] for i in range(4)], dim=1)
            assert torch.equal(factor, strided)
        delta = layer.delta()
        assert torch.linalg.matrix_rank(delta, rtol=1e-4) <= 4


def test_the_bound_of_the_start_is_that_of_whole_rows() -> None:
    pool = dict(VALUE.attach(Stack(20)).named_parameters())
    a, b = pool["shared.up_12x8_A"], pool["shared.up_12x8_B"]
    assert 0.95 / math.sqrt(8) < a.abs().max() <= 1 / math.sqrt(8)
    assert a.std().item() == pytest.approx(1 / math.sqrt(3 * 8), rel=0.05)
    assert not b.any()


def test_without_sharing_it_is_lora() -> None:
    value = MoS(rank=2, equivalent_rank=2, private_rank=2, shards=1, alpha=3.0)
    one, other, inputs = Stack(3), Stack(3), numbers(6, 8)
    mine, theirs = stir(value.attach(one)), LoRA(rank=2, alpha=3.0).attach(other)
    for (_, layer), (_, twin) in zip(mine.layers(), theirs.layers(), strict=True):
        with torch.no_grad():
            twin.A.copy_(layer.as_lora()[0])
            twin.B.copy_(layer.as_lora()[1])
    optimizers = [torch.optim.AdamW(adapter.parameters(), lr=1e-2) for adapter in (mine, theirs)]
    for _ in range(3):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            optimizer.zero_grad()
            model(inputs).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(one(inputs), other(inputs), rtol=0, atol=1e-5)


def test_the_gradient_of_a_pool_is_the_sum_over_its_uses() -> None:
    model, inputs = Stack(5), numbers(6, 8)
    adapter = stir(VALUE.attach(model))
    model(inputs).square().sum().backward()
    # The same function of dense factors, whose gradients are added up by hand.
    twin = Stack(5)
    dense = LoRA(rank=4, alpha=16.0).attach(twin)
    expected = {name: torch.zeros_like(pool) for name, pool in adapter.named_parameters()}
    for (_, layer), (_, plain) in zip(adapter.layers(), dense.layers(), strict=True):
        with torch.no_grad():
            plain.A.copy_(layer.as_lora()[0])
            plain.B.copy_(layer.as_lora()[1])
    twin(inputs).square().sum().backward()
    for (name, layer), (_, plain) in zip(adapter.layers(), dense.layers(), strict=True):
        of_a, of_b = (f"shared.{key}" for key in pool_names(adapter.sites[name]))
        for pool, index, gradient in (
            (of_a, layer.index_A, plain.A.grad),
            (of_b, layer.index_B, plain.B.grad.T),
        ):
            for row, shard in zip(index.tolist(), gradient.reshape(len(index), -1), strict=True):
                expected[pool][row] += shard
    for name, pool in adapter.named_parameters():
        torch.testing.assert_close(pool.grad, expected[name], rtol=1e-4, atol=1e-4)


def test_kinds_are_last_names_and_shapes() -> None:
    value = MoS(rank=2, equivalent_rank=2, private_rank=0, shards=2)
    pools = value.shared(llama_sites())
    assert pools["q_proj_16x16_A"].shape == (2 * 2 * 2, 8)
    assert pools["k_proj_8x16_B"].shape == (2 * 2 * 2, 4)  # grouped keys are narrower
    assert len(pools) == 2 * 7
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    adapter = value.attach(plain)
    assert [name for name, _ in adapter.named_parameters()] == [
        f"shared.layer_{shape}_{factor}" for shape in ("4x4", "2x4") for factor in "AB"
    ]
    inputs = numbers(3, 4)
    outputs = plain(inputs)  # the module that owns the pools is no step of the chain
    assert outputs.shape == (3, 2)


def llama_sites() -> list[Site]:
    return list(LoRA(rank=1).attach(llama("meta")).sites.values())


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": 2, "equivalent_rank": 3}, "private_rank must be at most equivalent_rank"),
        ({"private_rank": 3}, "private_rank must be at most equivalent_rank"),
        ({"private_rank": 2, "rank": 3}, "without public shards"),
        ({"shards": 0}, "shards: too small"),
    ],
)
def test_ranks_that_do_not_go_together_are_refused(fields: dict[str, int], match: str) -> None:
    with pytest.raises(InputError, match=match):
        MoS(**({"rank": 4, "equivalent_rank": 2, "private_rank": 1} | fields))


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (MoS(rank=2, shards=3), r"shards: must divide 16, a width of .*q_proj"),
        (MoS(rank=9), r"rank: above what a pool has for .*: 2 public rows, as there are 2 layers"),
        (MoS(rank=2, targets=("embed_tokens",)), "this is an embedding"),
    ],
)
def test_layers_that_do_not_fit_are_refused_and_left_alone(value: MoS, match: str) -> None:
    model = llama()
    with pytest.raises(InputError, match=match):
        value.attach(model)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any("adapt" in name for name, _ in model.named_modules())


def test_its_own_files_are_small_and_give_the_indices_back(tmp_path: Path) -> None:
    model, ids = llama(layers=8), tokens()
    value = MoS(rank=8, equivalent_rank=2, private_rank=1, shards=4)
    adapter = stir(value.attach(model, seed=4))
    adapter.save(tmp_path / "own", form="modicum", base_model="somebody/model")
    adapter.save(tmp_path / "peft")
    size = {
        form: sum(file.stat().st_size for file in (tmp_path / form).glob("*.safetensors"))
        for form in ("own", "peft")
    }
    assert size["own"] < 0.6 * size["peft"]
    config = json.loads((tmp_path / "own" / "modicum_adapter.json").read_text())
    assert (config["method"], config["seed"], config["base_model"]) == ("mos", 4, "somebody/model")
    for form in ("own", "peft"):
        other = llama(layers=8)
        loaded = load(other, tmp_path / form, name="again")
        assert type(loaded.method) is (MoS if form == "own" else LoRA)
        assert distance(other(ids), model(ids)) < 1e-5
    from_seed = value.attach(llama(layers=8), seed=4, name="another")
    for name, tensor in adapter.state_dict().items():
        if "index" in name:
            assert torch.equal(from_seed.state_dict()[name], tensor)
    with pytest.raises(InputError, match="does not fit the model"):
        load(llama(layers=7), tmp_path / "own")


def test_peft_gives_the_same_logits(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=29,
    )  # fmt: skip

    def model() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()

    ours, ids = model(), tokens()
    adapter = stir(VALUE.attach(ours), std=0.1)
    adapter.save(tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(model(), tmp_path / "adapter").eval()
    with torch.no_grad():
        assert distance(model()(ids).logits, ours(ids).logits) > 0.1
        torch.testing.assert_close(theirs(ids).logits, ours(ids).logits, rtol=0, atol=2e-5)


def test_a_copy_of_the_model_has_pools_of_its_own() -> None:
    model, inputs = Stack(3), numbers(6, 8)
    stir(VALUE.attach(model))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(inputs), model(inputs))
    with torch.no_grad():
        for parameter in twin.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)
    assert not torch.equal(twin(inputs), model(inputs))


def test_detached_it_leaves_nothing_on_the_model() -> None:
    model = Stack(3)
    names = [name for name, _ in model.named_modules()]
    first, second = VALUE.attach(model, name="first"), VALUE.attach(model, name="second")
    assert not any(parameter.requires_grad for parameter in first.parameters())
    first.activate()
    assert all(parameter.requires_grad for parameter in first.parameters())
    assert not any(parameter.requires_grad for parameter in second.parameters())
    first.detach()
    second.detach()
    assert [name for name, _ in model.named_modules()] == names


def test_by_way_of_meta_it_starts_alike() -> None:
    expected = VALUE.attach(llama(), seed=3).state_dict()
    model = llama("meta")
    adapter = VALUE.attach(model, seed=3)
    materialise(model, "cpu")
    model.initialise(0)
    adapter.initialise()
    assert expected.keys() == adapter.state_dict().keys()
    assert all(torch.equal(value, expected[key]) for key, value in adapter.state_dict().items())


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("value", [VALUE, PiSSA(rank=2)], ids=lambda value: value.info.name)
def test_compiled_blocks_share_one_graph(value: Adapter) -> None:
    from torch._dynamo.utils import counters

    model, ids = llama(layers=5), tokens()
    stir(value.attach(model))
    expected = model(ids)
    torch._dynamo.reset()
    counters.clear()
    for block in model.model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    assert distance(model(ids), expected) < 1e-5
    # The first block's input takes no gradient, those of all others do.
    assert counters["stats"]["unique_graphs"] == 2
