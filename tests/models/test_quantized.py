"""The decoder on a quantized base: made, filled, trained through an adapter, saved, cut up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from modicum.adapters import AttachedAdapter, LoRA
from modicum.core.contracts.parameters import optimizer_groups, trainable
from modicum.core.contracts.state import optimizer_state, trained_state
from modicum.core.contracts.strategy import Strategy
from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.linear_forms import frozen_linears, full_weight, linear_form
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import whole
from modicum.linears import NF4Linear
from modicum.models import Llama, ModelConfig, create, load, save
from modicum.models.generate import generate
from modicum.models.huggingface import fill, reader
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded

# Widths that are odd, no multiple of a group, and that no number of ranks divides.
CONFIG = ModelConfig(
    vocabulary_size=53,
    width=42,
    layers=2,
    heads=3,
    head_width=10,
    mlp_width=131,
    attention_bias=True,
    initializer_range=0.2,
)
IDS = torch.arange(40).view(4, 10) % 53


def config(linear: str = "nf4") -> ModelConfig:
    return replace(CONFIG, forms=FormPlan().with_default(linear))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(create(CONFIG, 0), tmp_path / "base")


def stir(model: nn.Module) -> None:
    """Give every factor B, which starts as zeros, something to do."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".B"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def loss(model: nn.Module, ids: Tensor = IDS) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


@pytest.mark.parametrize("linear", ["nf4", "int8", "fp16", "tiles"])
def test_a_new_model_holds_what_becomes_of_the_dense_ones_weights(linear: str) -> None:
    dense, coded = create(CONFIG, 7), create(config(linear), 7)
    layers = frozen_linears(coded)
    assert len(layers) == 7 * CONFIG.layers
    for name, layer in layers.items():
        weight = dense.get_submodule(name).weight
        assert torch.equal(full_weight(layer), linear_form(linear).round_trip(weight))
    for name, parameter in dense.named_parameters():
        if not name.endswith("_proj.weight"):
            assert torch.equal(coded.get_parameter(name), parameter)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_weights_are_coded_from_the_files_own_precision(
    folder: Path, dtype: torch.dtype | None
) -> None:
    model = load(folder, dtype=dtype, linear="nf4")
    assert model.config.forms.default.name == "nf4"
    for name, layer in frozen_linears(model).items():
        assert type(layer) is NF4Linear
        stored = reader(folder)(name)
        assert stored.dtype == torch.float32
        assert torch.equal(full_weight(layer), linear_form("nf4").round_trip(stored))
    kept = [model.model.embed_tokens.weight, model.model.layers[0].self_attn.q_proj.bias]
    assert [tensor.dtype for tensor in kept] == [dtype or torch.float32] * 2


def test_a_filled_model_wearing_an_adapter_is_the_loaded_one(folder: Path) -> None:
    with on_meta(torch.bfloat16):
        model = Llama(config())
        adapter = LoRA(rank=2).attach(model)
    materialise(model, "cpu")
    fill(model, folder)
    adapter.initialise()
    loaded = load(folder, dtype=torch.bfloat16, linear="nf4")
    with torch.no_grad():
        assert torch.equal(model(IDS), loaded(IDS))


@pytest.mark.parametrize("linear", ["nf4", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_the_dense_model_that_it_computes(
    folder: Path, tmp_path: Path, dtype: torch.dtype, linear: str
) -> None:
    model = load(folder, dtype=dtype, linear=linear)
    again = load(save(model, tmp_path / "saved"))
    assert again.config == CONFIG
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    with torch.no_grad():
        assert torch.equal(again(IDS), model(IDS))
    if dtype == torch.float32:
        twice = load(tmp_path / "saved", linear=linear)
        codes = zip(frozen_linears(twice).values(), frozen_linears(model).values(), strict=True)
        assert all(torch.equal(one.codes, other.codes) for one, other in codes)


def test_the_reader_gives_copies_by_layer_and_names_what_is_missing(folder: Path) -> None:
    read = reader(folder)
    name = "model.layers.1.mlp.down_proj"
    weight = read(name)
    assert torch.equal(weight, create(CONFIG, 0).get_submodule(name).weight)
    weight.zero_()
    assert read(name).any()
    with pytest.raises(InputError, match=r"Did you mean 'model\.layers\.1\.mlp\.down_proj'"):
        read("model.layers.1.mlp.down_prj")


def test_codes_are_base_weights_and_are_in_no_checkpoint(folder: Path) -> None:
    model = load(folder, linear="nf4")
    assert not any(name.endswith((".codes", ".scales")) for name in trained_state(model)[0]())
    LoRA(rank=2).attach(model)
    state = trained_state(model)[0]()
    assert {name.rpartition(".")[2] for name in state} == {"A", "B"}
    assert len(state) == 2 * 7 * CONFIG.layers


def test_qlora_in_ten_lines_and_merged(folder: Path, tmp_path: Path) -> None:
    model = load(folder, linear="nf4")
    adapter = LoRA(rank=4).attach(model)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        out = loss(model)
        out.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.item())
    assert losses[-1] < 0.5 * losses[0]
    with torch.no_grad():
        trained = model(IDS)
        adapter.merge(dense=torch.float32)
        assert torch.allclose(model(IDS), trained, atol=1e-4)
        adapter.detach()
        again = load(save(model, tmp_path / "merged"))
        assert torch.allclose(again(IDS), trained, atol=1e-4)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_factors_get_the_gradients_of_the_dense_model_of_its_weights(
    folder: Path, tmp_path: Path, half: bool, recompute: bool
) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    coded = load(folder, dtype=dtype, linear="nf4")
    dense = load(save(coded, tmp_path / "dense"))
    gradients: list[dict[str, Tensor]] = []
    for model in (coded, dense):
        LoRA(rank=2).attach(model, seed=1)
        stir(model)
        model.recompute = recompute
        with torch.autocast("cpu", dtype, enabled=half):
            loss(model).backward()
        gradients.append({name: p.grad for name, p in trainable(model)})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        expected = gradients[1][name]
        error = (gradient - expected).norm() / expected.norm()
        assert float(error) < (0.03 if half else 1e-5), name


def test_tokens_come_one_by_one_as_from_the_whole_row(folder: Path) -> None:
    model = load(folder, linear="nf4")
    with torch.no_grad():
        first = int(model(IDS[:1])[0, -1].argmax())
    tokens = list(generate(model, IDS[:1], max_tokens=3))
    with torch.no_grad():
        longer = torch.cat((IDS[:1], torch.tensor([tokens[:-1]])), dim=1)
        assert tokens == [first, *model(longer)[0, -2:].argmax(-1).tolist()]


def updated(model: nn.Module, optimizer: Any, steps: range, strategy: Strategy) -> list[float]:
    """Losses of a few updates on the rows of this rank."""
    ranks, losses = strategy.ranks, []
    for step in steps:
        rows = (IDS + step)[ranks.rank :: ranks.size] % 53
        part = loss(model, rows) / ranks.size
        strategy.before_backward(last=True)
        part.backward()
        strategy.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.sum(float(part.detach()))[0])
    return losses


def built(
    strategy: Strategy, folder: Path, half: bool, linear: str
) -> tuple[Llama, AttachedAdapter, Any]:
    """As the trainer builds: wrapped on meta, cut, given memory, filled."""
    with on_meta(torch.bfloat16 if half else torch.float32):
        model = Llama(config(linear))
        adapter = LoRA(rank=3).attach(model, seed=1)
    model.recompute = True
    strategy.cut(model, model.model.layers, torch.device("cpu"))
    materialise(model, "cpu")
    fill(model, folder)
    adapter.initialise()
    strategy.start(model)
    groups = optimizer_groups(model, learning_rate=1e-2, weight_decay=0.0)
    return model, adapter, torch.optim.AdamW(groups)


def strategy_of(ranks: Ranks, kind: str) -> Strategy:
    if kind == "alone":
        return Strategy(ranks)
    if kind == "ddp":
        return Replicated(ranks, Layout.of(ranks.size))
    return Sharded(ranks, Layout.of(ranks.size, ranks.size))


def on_ranks(
    ranks: Ranks, kind: str, half: bool, linear: str, folder: Path, out: Path
) -> dict[str, Any]:
    strategy = strategy_of(ranks, kind)
    model, adapter, optimizer = built(strategy, folder, half, linear)
    codes = {
        name: whole(parameter.detach()).clone()
        for name, parameter in model.named_parameters()
        if parameter.dtype == torch.uint8
    }
    losses = updated(model, optimizer, range(4), strategy)
    strategy.rest(model)
    read, write = trained_state(model)
    read_moments, write_moments = optimizer_state(optimizer)
    kept = {name: value.clone() for name, value in read().items()}
    moments = {n: v.clone() for n, v in read_moments().items()}
    further = updated(model, optimizer, range(4, 6), strategy)
    strategy.rest(model)
    write(kept)
    write_moments(moments)
    again = updated(model, optimizer, range(4, 6), strategy)
    assert again == further  # resumed to the bit
    strategy.rest(model)
    adapter.deactivate()
    save(model, out, write=ranks.first)
    return {"codes": codes, "losses": losses}


def test_a_torch_that_cannot_shard_integers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cpu"))
    with on_meta():
        model = Llama(config())
    with pytest.raises(InputError, match=r"cannot shard quantized weights before 2\.12"):
        Sharded(Ranks(), Layout.of(1, 1)).cut(model, model.model.layers, torch.device("cpu"))


shards_integers = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="this torch cannot shard integers, and is refused"
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "ranks", "half", "linear"),
    [
        ("ddp", 2, False, "nf4"),
        pytest.param("fsdp", 2, True, "nf4", marks=shards_integers),
        pytest.param("fsdp", 4, False, "nf4", marks=shards_integers),
        pytest.param("fsdp", 4, False, "tiles", marks=shards_integers),
    ],
)
def test_ranks_train_as_one_process_does(
    pool: Pool, folder: Path, tmp_path: Path, kind: str, ranks: int, half: bool, linear: str
) -> None:
    expected = on_ranks(Ranks(), "alone", half, linear, folder, tmp_path / "one")
    for result in pool.run(on_ranks, kind, half, linear, folder, tmp_path / "several", ranks=ranks):
        assert result["codes"].keys() == expected["codes"].keys()
        for name, codes in result["codes"].items():
            assert torch.equal(codes, expected["codes"][name]), name
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-2 if half else 1e-5)
    one, several = load(tmp_path / "one"), load(tmp_path / "several")
    base = load(folder, torch.bfloat16 if half else None, linear=linear)
    with torch.no_grad():
        assert torch.equal(one(IDS), base(IDS))
        assert torch.equal(several(IDS), base(IDS))


@pytest.mark.expensive
def test_compiled_whole_it_gives_the_same_gradients(folder: Path) -> None:
    model = load(folder, linear="nf4")
    LoRA(rank=2).attach(model, seed=1)
    stir(model)
    gradients = []
    torch.compiler.reset()
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        loss(run).backward()
        gradients.append([p.grad.clone() for _, p in trainable(model)])
        model.zero_grad()
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))
    torch.compiler.reset()


@pytest.mark.expensive
def test_a_quantized_model_of_transformers_learns_under_its_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM.from_pretrained(save(create(CONFIG, 0), tmp_path / "m"))
    for name, layer in list(theirs.named_modules()):
        if name.endswith("_proj"):
            bias = None if layer.bias is None else layer.bias.detach()
            theirs.set_submodule(name, NF4Linear.from_dense(layer.weight.detach(), bias))
    with torch.no_grad():
        ours = load(tmp_path / "m", linear="nf4")(IDS)
        assert torch.allclose(theirs(IDS).logits, ours, atol=1e-4)
    before = {name: codes.clone() for name, codes in theirs.named_parameters()}
    adapter = LoRA(rank=3).attach(theirs)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=2,
        max_steps=12,
        learning_rate=3e-2,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=True,
        save_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    trainer = transformers.Trainer(theirs, arguments, train_dataset=rows)
    start = float(loss_of_theirs(theirs))
    trainer.train()
    assert float(loss_of_theirs(theirs)) < 0.8 * start
    adapter.detach()
    after = dict(theirs.named_parameters())
    assert all(torch.equal(after[name], value) for name, value in before.items())


@torch.no_grad()
def loss_of_theirs(model: nn.Module) -> Tensor:
    logits = model(IDS[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten())
