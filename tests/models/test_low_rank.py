"""The decoder with projections held as low-rank factors: configuration, files, ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pool import Pool
from torch import Tensor

from modicum.adapters import LoRA
from modicum.compress import FWSVD
from modicum.compress.base import CompressorQuery
from modicum.core.contracts.ledger import Ledger, ModelQuery
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.dense_layers import choose
from modicum.core.layers.form_plan import FormPlan, LayerForm
from modicum.core.layers.linear_forms import full_weight
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.machine.memory import tensor_bytes
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.linears import LowRankLinear
from modicum.models import ModelConfig, create, huggingface, load, read_config, read_header, save
from modicum.models.ledger import ledger
from modicum.models.llama import Llama
from modicum.models.safetensors_file import WEIGHTS
from modicum.parallel.sharded import Sharded
from modicum.proofs.contracts.adapters.ledger import _flops, _saved
from modicum.proofs.contracts.compress.subjects import compressed, llama, tokens

CONFIG = ModelConfig(
    vocabulary_size=29,
    width=16,
    layers=3,
    heads=4,
    kv_heads=2,
    mlp_width=24,
    context=32,
    attention_bias=True,
    initializer_range=0.3,
    model_type="qwen2",
)
RANKS = {"model.layers.1.mlp.down_proj": 3, "model.layers.0.self_attn.q_proj": 5}


def low(ranks: dict[str, int]) -> FormPlan:
    return FormPlan(layers={n: LayerForm("low_rank", {"rank": rank}) for n, rank in ranks.items()})


FORMS = low(RANKS)


def mixed() -> Llama:
    return create(replace(CONFIG, forms=FORMS), seed=0)


def test_shapes_are_those_of_the_model() -> None:
    config = replace(CONFIG, forms=FORMS)
    model = mixed()
    named = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert named == config.parameter_shapes()
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())
    assert named["model.layers.0.self_attn.q_proj.down"] == (5, 16)
    assert "model.layers.0.self_attn.q_proj.bias" in named


def test_random_factors_multiply_to_random_weights() -> None:
    config = replace(CONFIG, width=64, mlp_width=96, heads=4)
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(3)]
    model = create(replace(config, forms=low(dict.fromkeys(names, 20))), seed=0)
    for name in names:
        std = full_weight(model.get_submodule(name)).std().item()
        assert std == pytest.approx(config.initializer_range, rel=0.15)
    last = "model.layers.0.mlp.down_proj"
    model = create(replace(config, forms=low({last: 20})), seed=0)
    std = full_weight(model.get_submodule(last)).std().item()
    assert std == pytest.approx(config.initializer_range / 6**0.5, rel=0.15)


@pytest.mark.parametrize(
    ("forms", "problem"),
    [
        (low({"model.layers.0.mlp.up": 3}), "Did you mean 'model.layers.0.mlp.up_proj'"),
        (low({"model.layers.3.mlp.up_proj": 3}), "those of projections"),
        (low({"model.layers.0.mlp.up_proj": 0}), "at least 1"),
        (FormPlan().with_default("nf4", rank=3), "unknown key"),
    ],
)
def test_what_cannot_be_built_is_refused(forms: FormPlan, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        replace(CONFIG, forms=forms)


def test_a_form_that_nobody_knows_is_named() -> None:
    config = replace(CONFIG, forms=FormPlan().with_default("lowrank"))
    with pytest.raises(InputError, match=r"no linear form.*Did you mean 'low_rank'"):
        create(config, seed=0)


def test_configurations_travel() -> None:
    config = replace(CONFIG, forms=FORMS)
    raw = json.loads(json.dumps(config.to_hf()))
    assert raw["model_type"] == "forms_qwen2"
    assert ModelConfig.from_hf(raw) == config
    for wrong in ({"layers": {"a": "b"}}, [1], {"layers": {"model.x": {"form": "nf4"}}}):
        with pytest.raises(InputError):
            ModelConfig.from_hf(raw | {"forms": wrong})
    with pytest.raises(InputError, match="older modicum"):
        ModelConfig.from_hf(raw | {"low_rank": RANKS})
    plain = CONFIG.to_hf()
    assert "forms" not in plain
    with pytest.raises(InputError, match="not supported"):
        ModelConfig.from_hf(plain | {"model_type": "forms_qwen2"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_factors_is_as_small_as_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    handle = compressed(FWSVD(share=0.5), llama())
    model = handle.model.to(dtype)
    assert isinstance(model, Llama)
    folder = save(model, tmp_path / "model", dense=False)
    config = read_config(folder)
    assert config.forms == handle.plan
    assert read_header(folder).bytes == tensor_bytes(list(model.parameters()))
    again = load(folder)
    assert again.config == replace(model.config, forms=handle.plan)
    assert torch.equal(again(tokens()), model(tokens()))
    with on_meta(dtype):
        bare = Llama(config)
    materialise(bare, "cpu")
    huggingface.fill(bare, folder)
    assert torch.equal(bare(tokens()), model(tokens()))
    second = save(again, tmp_path / "again", dense=False)
    one, other = (json.loads((place / "config.json").read_text()) for place in (folder, second))
    assert one == other
    assert (second / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()


def test_a_dense_folder_is_read_by_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    handle = compressed(FWSVD(share=0.5), llama())
    model = handle.model
    assert isinstance(model, Llama)
    expected = model(tokens())
    folder = save(model, tmp_path / "dense")
    assert read_config(folder).forms.plain
    assert (load(folder)(tokens()) - expected).abs().max() < 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert (theirs(tokens()).logits - expected).abs().max() < 1e-4
    small = save(model, tmp_path / "small", dense=False)
    with pytest.raises((ValueError, KeyError), match="forms_llama"):
        transformers.AutoModelForCausalLM.from_pretrained(small)


def test_what_is_left_dense_may_be_quantized(tmp_path: Path) -> None:
    folder = save(mixed(), tmp_path / "model", dense=False)
    model = load(folder, linear="nf4")
    kinds = {n: type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")}
    assert {n for n, kind in kinds.items() if kind == "LowRankLinear"} == set(RANKS)
    assert set(kinds.values()) == {"LowRankLinear", "NF4Linear"}


def test_factors_wear_adapters_which_go_to_a_file(tmp_path: Path) -> None:
    model, ids = mixed(), tokens()
    before = model(ids)
    adapter = LoRA(rank=2).attach(model)
    assert set(RANKS) <= set(adapter.sites)
    assert torch.equal(model(ids), before)
    with torch.no_grad():
        for value in adapter.state_dict().values():
            value.add_(0.05)
    assert not torch.equal(model(ids), before)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all(".layers_by_adapter." in name for name in trained)
    folder = save(model, tmp_path / "base", dense=False)
    assert read_config(folder).forms == FORMS
    assert torch.equal(load(folder)(ids), before)


def test_the_ledger_counts_factors() -> None:
    shape, meta = ModelQuery(3, 24), llama("meta")
    value = FWSVD(share=0.5)
    plan = value.plan(meta)
    dense = llama().config
    low = replace(dense, forms=plan)
    layers = [layer for layer in choose(meta, value.targets) if layer.name in plan.layers]
    said = Ledger.sum(value.ledger(CompressorQuery(layer, shape)) for layer in layers)
    for recompute in (False, True):
        before = ledger(dense, shape, recompute=recompute)
        after = ledger(low, shape, recompute=recompute)
        assert after.bytes("weight") - before.bytes("weight") == said.bytes("weight")
        assert after.flops("forward") - before.flops("forward") == said.flops("forward")
    plain = [ledger(config, shape) for config in (dense, low)]
    assert plain[1].flops("backward") - plain[0].flops("backward") == said.flops("backward")
    saved = [each.bytes("activation", "loss") for each in plain]
    assert saved[1] - saved[0] == said.bytes("activation", "loss")
    model = create(low, seed=0)
    assert ledger(low, shape).bytes("weight") == tensor_bytes(list(model.parameters()))
    measured = _saved(model)
    assert abs(measured - saved[1]) <= 0.05 * _saved(create(dense, seed=0))
    assert _flops(model) == (plain[1].flops("forward"), plain[1].flops("backward"))


def saved_from_ranks(ranks: Ranks, folder: Path) -> Tensor:
    strategy: Strategy = Sharded(ranks, Layout.of(ranks.size, ranks.size), True)
    with on_meta():
        model = Llama(replace(CONFIG, forms=FORMS))
    strategy.cut(model, model.blocks, torch.device("cpu"))
    materialise(model, "cpu")
    model.initialise(0)
    strategy.start(model)
    outputs = model(tokens()).detach()
    strategy.rest(model)
    save(model, folder / "dense", write=ranks.first)
    save(model, folder / "small", write=ranks.first, dense=False)
    return outputs


@pytest.mark.ranks
def test_ranks_write_what_one_process_reads(pool: Pool, tmp_path: Path) -> None:
    expected = mixed()(tokens())
    for outputs in pool.run(saved_from_ranks, tmp_path, ranks=2):
        assert torch.allclose(outputs, expected, atol=1e-5)
    assert torch.equal(load(tmp_path / "small")(tokens()), expected)
    assert torch.allclose(load(tmp_path / "dense")(tokens()), expected, atol=1e-5)
    layer = load(tmp_path / "small").get_submodule("model.layers.1.mlp.down_proj")
    assert isinstance(layer, LowRankLinear)
