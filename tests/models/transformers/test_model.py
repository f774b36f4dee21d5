from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from decoders import DECODERS, config_json, decoder_folder, theirs
from safetensors.torch import load_file, save_file

from modicum.core.errors import InputError
from modicum.core.layers.form_plan import FormPlan
from modicum.core.layers.meta import materialise, on_meta
from modicum.linears import LOST, LOSTLinear, LowRank
from modicum.models import ModelConfig, huggingface, load, read_config, read_header, save
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.kinds import described
from modicum.models.transformers.model import TransformersDecoder, build

IDS = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(3))
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 40}


@pytest.fixture(scope="module", params=DECODERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoder_folder(tmp_path_factory.mktemp(request.param) / request.param, request.param)


def spoilt(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """Change the tensors of a folder's file."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def test_the_logits_are_those_of_transformers(folder: Path) -> None:
    model, expected = load(folder).eval(), theirs(folder)(IDS).logits
    assert isinstance(model, TransformersDecoder)
    assert torch.equal(model(IDS), expected)
    states: Any = model.new_states(2, 17)
    logits, states = model.continued(IDS[:, :12], states)
    found = [logits]
    for place in range(12, 17):
        logits, states = model.continued(IDS[:, place : place + 1], states)
        found.append(logits)
    torch.testing.assert_close(torch.stack(found, 1), expected[:, 11:], rtol=0, atol=3e-5)


@torch.no_grad()
def test_what_is_saved_is_what_transformers_would_save(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    save(model, tmp_path / "one")
    save(model, tmp_path / "many", shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "one" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(theirs(tmp_path / "many")(IDS).logits, theirs(folder)(IDS).logits)


def test_the_configuration_knows_the_model_without_it(folder: Path) -> None:
    config, model = read_config(folder), load(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert config.parameter_shapes() == shapes
    assert config.parameter_count() == sum(tensor.numel() for tensor in model.parameters())
    assert (config.vocabulary_size, len(config.block_prefixes())) == (320, 2)
    assert config.context == (2**20 if folder.name == "bloom" else 64)


@torch.no_grad()
def test_documents_that_share_a_row_are_computed_as_each_alone(folder: Path) -> None:
    model, config = load(folder).eval(), read_config(folder)
    assert isinstance(config, TransformersConfig)
    config.check()
    ways = {"bloom": "none", "opt": "mask"}
    assert config.packing == ways.get(folder.name, "positions")
    assert config.caches
    documents = torch.tensor([[0] * 8 + [1] + [2] * 8, [0] * 17])
    alone = torch.cat([model(part) for part in IDS.split([8, 1, 8], 1)], 1)
    expected = torch.stack([alone[0], model(IDS)[1]])
    torch.testing.assert_close(model(IDS, documents), expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 8},
        {"model_type": "falcon", "num_kv_heads": 4, "new_decoder_architecture": True},
    ],
)
def test_what_is_shown_of_large_models_is_shown_on_small_ones(raw: dict[str, Any]) -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 60, "num_attention_heads": 32}
    config = TransformersConfig.from_hf({**raw, **sizes, "vocab_size": 50_000})
    config.check()
    assert config.packs(2048)
    assert config.parameter_count() > 10**9


def test_the_built_in_decoder_reads_what_it_can(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", "mistral", sliding_window=None)
    assert isinstance(read_config(folder), ModelConfig)


@pytest.mark.parametrize("said", [{"is_causal": False}, {"attention_dropout": 0.5}])
def test_what_the_built_in_decoder_lacks_is_left_to_transformers(
    said: dict[str, Any], tmp_path: Path
) -> None:
    folder = decoder_folder(tmp_path / "model", "mistral", sliding_window=None)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | said))
    assert isinstance(read_config(folder), TransformersConfig)
    with torch.no_grad():
        assert torch.equal(load(folder).eval()(IDS), theirs(folder)(IDS).logits)


def test_what_config_json_says_is_left_as_it_is() -> None:
    raw = {**config_json("qwen3"), "rope_scaling": {"type": "linear", "factor": 2.0}}
    before = copy.deepcopy(raw)
    assert described(raw).rope_parameters["factor"] == 2.0
    assert raw == before


def test_tensors_of_several_dtypes_are_loaded_in_one_that_holds_them_all(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", "qwen3")
    norm = "model.norm.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].bfloat16()
        tensors[norm] = torch.full((32,), 1.0001)

    stored = load_file(spoilt(folder, change) / "model.safetensors")
    assert read_header(folder).dtype == "F32"
    model = load(folder).eval()
    found = model.state_dict()
    assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in stored.items())
    with torch.no_grad():
        assert model(IDS).isfinite().all()


def test_memory_comes_with_computed_buffers_and_shared_weights() -> None:
    raw = config_json("gemma")
    with on_meta():
        model = build(TransformersConfig(raw))
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}
    materialise(model, "cpu")
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    buffers = dict(model.named_buffers())
    assert float(buffers["model.embed_tokens.embed_scale"]) == pytest.approx(32**0.5)
    expected = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(buffers["model.rotary_emb.inv_freq"], expected)


def test_a_buffer_that_nobody_computes_is_refused() -> None:
    with on_meta():
        model = build(TransformersConfig(config_json("gpt2")))
        model.register_buffer("strange", torch.zeros(2), persistent=False)
    with pytest.raises(InputError, match=r"no file holds it.*strange"):
        materialise(model, "cpu")


def test_names_without_the_prefix_are_read(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", "gpt2")
    expected = theirs(folder)(IDS).logits

    def old(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    assert torch.equal(load(spoilt(folder, old)).eval()(IDS), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.ln_f.weight"), "lack a tensor.*|ln_f"),
        (lambda t: t.update(extra=torch.ones(2)), "no place for this tensor"),
        (lambda t: t.update({"transformer.ln_f.weight": torch.ones(3)}), r"\[3\].*\[32\]"),
        (
            lambda t: t.update({"transformer.ln_f.weight": torch.ones(32, dtype=torch.int8)}),
            "this type are not supported",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    folder = spoilt(decoder_folder(tmp_path / "model", "gpt2"), change)
    with pytest.raises(InputError, match=message):
        read_header(folder)


def test_shared_weights_that_differ_are_refused(tmp_path: Path) -> None:
    def twice(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + 1

    folder = spoilt(decoder_folder(tmp_path / "model", "gpt2"), twice)
    with pytest.raises(InputError, match="tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "nobody_knows"}, "has no such model"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}},
            r"own folder \(own\.py\) is run with model\.trust_remote_code: true alone",
        ),
        ({"model_type": "t5"}, "encoder–decoder"),
        ({"model_type": "vit"}, "reads images"),
        ({"model_type": "distilbert"}, "an encoder, which writes no text"),
        ({"model_type": "bert"}, "task: {method: text_classes}"),
        ({"model_type": "mpnet"}, "an encoder"),
        ({"model_type": "convbert"}, "an encoder"),
        ({"model_type": "clap"}, "no decoder of this kind"),
        ({"model_type": "gemma3"}, "reads more than text"),
        ({"model_type": "git"}, "reads more than text"),
        ({"model_type": "phi4_multimodal"}, "reads more than text"),
        ({"model_type": "gpt2", "n_embd": 7, "n_head": 2}, "cannot build this model"),
        ({"model_type": "gpt2", "quantization_config": {}}, "already quantized"),
    ],
)
def test_what_is_no_decoder_of_text_is_refused(
    raw: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message) as caught:
        read_config(tmp_path)
    assert caught.value.file == tmp_path / "config.json"


def test_a_model_that_sees_later_tokens_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modicum.models.transformers.kinds.encoders", dict)
    config = TransformersConfig({"model_type": "bert", "intermediate_size": 16, **SMALL})
    with pytest.raises(InputError, match="depend on later tokens"):
        config.check()


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@torch.no_grad()
def test_quantized_layers_hold_what_becomes_of_the_files_weights(name: str, tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", name)
    model, plain = load(folder, linear="int8"), load(folder)
    assert isinstance(model, TransformersDecoder)
    assert len(model.decoder_config.forms.layers) == len(read_config(folder).layers()) - 1  # type: ignore[union-attr]
    far = (model.eval()(IDS) - plain.eval()(IDS)).abs().max() / plain(IDS).abs().max()
    assert 0 < far < 0.1
    twin = theirs(save(model, tmp_path / "dense"))
    torch.testing.assert_close(twin(IDS).logits, model(IDS), rtol=0, atol=1e-4)
    assert read_header(tmp_path / "dense").dtype == "F32"


@torch.no_grad()
def test_layers_that_a_folder_has_in_a_form_keep_it_among_quantized_ones(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", "qwen3")
    plan = LowRank(rank=4).plan(load(folder)).within(["model.layers.0."])
    small = save(load(folder, linear=plan), tmp_path / "small", dense=False)
    model, plain = load(small, linear="int8").eval(), load(small).eval()
    forms = model.decoder_config.forms  # type: ignore[union-attr]
    assert {forms.of(name).name for name in plan.layers} == {"low_rank"}
    assert forms.of("model.layers.1.mlp.up_proj").name == "int8"
    far = (model(IDS) - plain(IDS)).abs().max() / plain(IDS).abs().max()
    assert 0 < far < 0.1


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@torch.no_grad()
def test_layers_in_fp16_hold_files_in_fp16_exactly(name: str, tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", name)
    tensors = load_file(folder / "model.safetensors")
    halves = {key: tensor.half() for key, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    model, plain = load(folder, linear="fp16").eval(), load(folder).eval()
    assert len(model.decoder_config.forms.layers) == len(read_config(folder).layers()) - 1  # type: ignore[union-attr]
    assert torch.equal(model(IDS), plain(IDS))


@torch.no_grad()
def test_factors_are_kept_in_a_folder_of_their_own(folder: Path, tmp_path: Path) -> None:
    plain = load(folder)
    plan = LowRank(rank=4).plan(plain)
    model = load(folder, linear=plan).eval()
    small = save(model, tmp_path / "small", dense=False)
    raw = json.loads((small / "config.json").read_text())
    assert raw["model_type"] == f"forms_{plain.config.model_type}"
    again = load(small).eval()
    assert again.decoder_config.forms == plan  # type: ignore[union-attr]
    assert torch.equal(again(IDS), model(IDS))
    twin = theirs(save(again, tmp_path / "dense"))
    torch.testing.assert_close(twin(IDS).logits, model(IDS), rtol=0, atol=3e-4)


@torch.no_grad()
def test_layers_without_a_dense_weight_are_kept_with_their_integers(
    folder: Path, tmp_path: Path
) -> None:
    plan = LOST(rank=2, channels=0.1).plan(load(folder))
    model = load(folder, linear=plan).eval()
    kept = save(model, tmp_path / "kept")  # as no dense weight is one of these layers
    assert read_config(kept).forms == plan
    chosen = {name for name in read_header(kept).tensors if name.endswith(".chosen")}
    assert len(chosen) == len(plan.layers)
    assert read_header(kept).dtypes == {"F32"}  # the integers are of no dtype of weights
    again = load(kept).eval()
    assert torch.equal(again(IDS), model(IDS))
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in again.state_dict().items())


def test_new_layers_of_a_form_begin_with_the_dense_layers_weight() -> None:
    def drawn(forms: FormPlan) -> TransformersDecoder:
        with on_meta():
            model = build(replace(TransformersConfig(config_json("qwen3")), forms=forms))
        materialise(model, "cpu")
        made = model.initialise(5)
        assert isinstance(made, TransformersDecoder)
        return made

    name = "model.layers.1.mlp.up_proj"
    dense = drawn(FormPlan()).get_submodule(name).get_parameter("weight")
    lost = drawn(FormPlan().with_form(name, "lost", rank=2, channels=0.1))
    made = LOSTLinear.from_dense(dense.detach(), None, rank=2, channels=0.1)
    found = lost.get_submodule(name).state_dict()
    for key, tensor in made.state_dict().items():
        assert torch.equal(found[key], tensor), key


def test_blocks_of_other_widths_are_refused(tmp_path: Path) -> None:
    raw = config_json("gpt2") | {"model_type": "forms_gpt2"}
    raw["forms"] = {"blocks": {"transformer.h.0": {"mlp_width": 8}}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=r"forms\.blocks: blocks of this type of model are as"):
        read_config(tmp_path)


def test_new_weights_are_a_function_of_the_seed() -> None:
    def drawn(seed: int) -> dict[str, torch.Tensor]:
        with on_meta():
            model = build(TransformersConfig(config_json("qwen3")))
        materialise(model, "cpu")
        return dict(model.initialise(seed).named_parameters())

    one, same, other = drawn(0), drawn(0), drawn(1)
    assert all(torch.equal(one[name], tensor) for name, tensor in same.items())
    weight = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(one[weight], other[weight])
    assert float(one[weight].detach().std()) == pytest.approx(0.3, rel=0.1)


def test_the_reader_gives_weights_as_the_file_has_them(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path / "model", "gpt2")
    read = huggingface.reader(folder)
    assert read("transformer.h.0.attn.c_attn").shape == (32, 96)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "bloom", "opt"])
def test_in_eval_mode_blocks_run_again_too_and_nothing_is_dropped(
    name: str, tmp_path: Path
) -> None:
    model = load(decoder_folder(tmp_path / "model", name)).eval()
    assert isinstance(model, TransformersDecoder)
    runs: list[str] = []
    for module in model.blocks[0].modules():
        if isinstance(module, torch.nn.LayerNorm) or "Norm" in type(module).__name__:
            module.register_forward_hook(lambda *_: runs.append("norm"))
            break
    found = []
    for again in (False, True):
        model.recompute = again
        logits = model(IDS)
        logits.sum().backward()
        gradient = model.blocks[0].get_parameter(
            next(iter(dict(model.blocks[0].named_parameters())))
        )
        assert gradient.grad is not None
        found.append((logits, gradient.grad.clone(), len(runs)))
        model.zero_grad()
        runs.clear()
    assert [each[2] for each in found] == [1, 2]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not any(module.training for module in model.modules())


def test_rwkv_keeps_its_weights_where_it_is_evaluated(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, attention_hidden_size=32, intermediate_size=48,
        num_hidden_layers=4, context_length=32, rescale_every=2,
    )  # fmt: skip
    folder, ids = tmp_path / "base", torch.arange(3, 15)[None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    # Where transformers evaluates, it halves what the last blocks get, and their weights.
    expected, model = theirs(folder).train()(ids).logits, load(folder).eval()
    before = {name: each.clone() for name, each in model.named_parameters()}
    with torch.no_grad():
        torch.testing.assert_close(model(ids), expected, rtol=0, atol=1e-6)
    assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
    # Nor does it ask for a weight of a layer that has none, as of codes.
    name = "rwkv.blocks.0.attention.output"
    plan = FormPlan().with_form(name, "lost", rank=2, channels=0.1)
    with on_meta():
        formed = build(TransformersConfig(read_config(folder).raw, forms=plan))
    materialise(formed, "cpu")
    formed.initialise(0)
    with torch.no_grad():
        assert formed.eval()(ids).isfinite().all()


def test_xlstm_computes_with_weights_of_bf16(tmp_path: Path) -> None:
    config = transformers.xLSTMConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=1, num_blocks=1, num_heads=2,
        chunk_size=16,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        expected = load(tmp_path, dtype=torch.float32).eval()(ids)
        found = load(tmp_path, dtype=torch.bfloat16).eval()(ids).float()
    assert float((found - expected).abs().max() / expected.abs().max()) < 0.1
