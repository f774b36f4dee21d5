from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from decoders import decoder_folder

from modicum.adapters.lora import LoRA
from modicum.adapters.pissa import PiSSA
from modicum.core.errors import InputError
from modicum.core.layers.block_plan import BlockPlan
from modicum.core.layers.form_plan import FormPlan
from modicum.data.named_templates import NAMED
from modicum.data.tokenizer import Tokenizer
from modicum.models import Llama, ModelConfig, create, load
from modicum.models.gguf import DTYPES, write_adapter, write_model
from modicum.models.gguf.vocabulary import vocabulary
from modicum.models.gguf.writing import DataType

TEXT = "To be, or not to be: 42 naïve cafés. What's that? 日本語\n"
HEADS, KV_HEADS, WIDTH = 4, 2, 32
# The largest relative error of a number, and that of q8_0 relative to the largest of its group.
BOUNDS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.5 / 127 + 2**-11}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:gguf.*")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(iter([TEXT] * 3), 280, template=NAMED["chatml"])


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocabulary_size": 288, "width": WIDTH, "layers": 2, "heads": HEADS, "kv_heads": KV_HEADS,
        "mlp_width": 48, "context": 128, "initializer_range": 0.3,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


def model(**changes: Any) -> Llama:
    return create(config(**changes), 0).eval()


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """The keys of a file, its numbers, and the types of its tensors."""
    reader = gguf.GGUFReader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    numbers = {
        each.name: gguf.dequantize(each.data, each.tensor_type).reshape(each.shape[::-1])
        for each in reader.tensors
    }
    return keys, numbers, {each.name: each.tensor_type.name for each in reader.tensors}


def reordered(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp's own converter has them: of each head 0, D/2, 1, D/2 + 1, ..."""
    size = weight.shape[0] // heads
    order = [h * size + i + half for h in range(heads) for i in range(size // 2)
             for half in (0, size // 2)]  # fmt: skip
    return weight[order]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_holds_what_the_model_holds(
    tmp_path: Path, tokenizer: Tokenizer, dtype: DataType
) -> None:
    made = model(attention_bias=True)
    for parameter in made.parameters():
        parameter.data += 0.01
    file = write_model(made, tokenizer, tmp_path / "m.gguf", dtype=dtype, name="small")
    keys, numbers, types = read(file)
    names = {
        "token_embd.weight": "model.embed_tokens.weight", "output.weight": "lm_head.weight",
        "output_norm.weight": "model.norm.weight",
    }  # fmt: skip
    for layer in range(2):
        parts = {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }  # fmt: skip
        for theirs, ours in parts.items():
            names[f"blk.{layer}.{theirs}.weight"] = f"model.layers.{layer}.{ours}.weight"
            if "self_attn" in ours:
                names[f"blk.{layer}.{theirs}.bias"] = f"model.layers.{layer}.{ours}.bias"
    assert numbers.keys() == names.keys()
    for theirs, ours in names.items():
        expected = made.get_parameter(ours).detach()
        if "q_proj" in ours or "k_proj" in ours:
            expected = reordered(expected, HEADS if "q_proj" in ours else KV_HEADS)
        scale = expected.abs()
        if expected.ndim == 1:
            assert types[theirs] == "F32"
            scale = scale * 0
        elif types[theirs] == "Q8_0":
            groups = scale.unflatten(-1, (-1, 32))
            scale = groups.amax(-1, keepdim=True).expand_as(groups).flatten(-2)
        elif dtype == "q8_0":  # rows of 48 numbers
            assert (types[theirs], expected.shape[-1]) == ("F16", 48)
        error = (torch.from_numpy(numbers[theirs].copy()) - expected).abs()
        assert (error <= BOUNDS[dtype] * scale + 1e-7).all(), theirs
    assert keys["general.architecture"] == "llama"
    assert keys["general.name"] == "small"
    assert keys["llama.attention.head_count_kv"] == KV_HEADS
    assert keys["llama.rope.dimension_count"] == keys["llama.attention.key_length"] == 8
    assert keys["llama.rope.freq_base"] == 10000.0
    assert keys["llama.context_length"] == 128
    assert keys["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert "rope_freqs.weight" not in numbers


def test_tied_embeddings_are_in_it_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_model(model(tied_embeddings=True), tokenizer, tmp_path / "m.gguf", dtype="f32")
    assert "output.weight" not in read(file)[1]


def test_scaled_rotary_positions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = model(rope_scaling={"rope_type": "linear", "factor": 4.0})
    keys, numbers, _ = read(write_model(made, tokenizer, tmp_path / "m.gguf"))
    assert keys["llama.rope.scaling.type"] == "linear"
    assert keys["llama.rope.scaling.factor"] == 4.0
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    made = model(rope_scaling=scaling, rope_theta=500.0)
    keys, numbers, types = read(write_model(made, tokenizer, tmp_path / "m.gguf"))
    # 32 positions turn the four pairs 5.1, 1.08, 0.23 and 0.05 times: one is kept, two are slowed
    # by the factor, and one is between.
    factors = numbers["rope_freqs.weight"]
    turns = 32 / (2 * np.pi) * 500.0 ** (-1 / 4)
    blend = (turns - 1) / 3
    expected = [1.0, 1 / (blend + (1 - blend) / 8), 8.0, 8.0]
    np.testing.assert_allclose(factors, expected, rtol=1e-5)
    assert types["rope_freqs.weight"] == "F32"
    assert "llama.rope.scaling.type" not in keys


def test_the_tokenizer_and_the_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = NAMED["chatml"]
    file = write_model(model(), tokenizer, tmp_path / "m.gguf", template=template)
    keys = read(file)[0]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert keys["tokenizer.chat_template"] == template.source
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == 288
    size = tokenizer.vocabulary_size
    assert tokens[:size] == [tokenizer.token(number) for number in range(size)]
    assert set(types[size:]) == {int(gguf.TokenType.UNUSED)}
    end = tokenizer.eos_id
    assert (tokens[end], types[end]) == ("<|im_end|>", int(gguf.TokenType.CONTROL))
    assert keys["tokenizer.ggml.eos_token_id"] == keys["tokenizer.ggml.bos_token_id"] == end
    assert keys["tokenizer.ggml.add_bos_token"] is False
    assert keys["tokenizer.ggml.add_eos_token"] is False
    merges = json.loads(tokenizer.inner.to_str())["model"]["merges"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(each) for each in merges]
    assert "tokenizer.chat_template" not in read(write_model(model(), tokenizer, file))[0]


def changed(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], Any]) -> Tokenizer:
    raw = json.loads(tokenizer.inner.to_str())
    change(raw)
    inner = tokenizers.Tokenizer.from_str(json.dumps(raw))
    return Tokenizer(inner, tokenizer.eos_id, tokenizer.companions)


def put(before: str, after: str = "") -> dict[str, Any]:
    """A post-processor that puts a token before each text, or after it."""
    around = [{"SpecialToken": {"id": each, "type_id": 0}} for each in (before, after) if each]
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [*around[:1], *single, *around[1:]]
    special = {each: {"id": each, "ids": [0], "tokens": [each]} for each in (before, after) if each}
    return {"type": "TemplateProcessing", "single": single, "pair": single,
            "special_tokens": special}  # fmt: skip


def test_a_token_before_every_text_is_put_there(tokenizer: Tokenizer) -> None:
    first = tokenizer.token(0)
    other = changed(tokenizer, lambda raw: raw.update(post_processor=put(str(first))))
    assert other.begin_ids == (0,)
    found = vocabulary(other, 288)
    assert (found.begins, found.special["bos"]) == (True, 0)


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA_3 = WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def splits(pattern: str, ignore_merges: bool) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                 "invert": False}  # fmt: skip
        after = raw["pre_tokenizer"] | {"use_regex": False}
        raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, after]}
        raw["model"]["ignore_merges"] = ignore_merges

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda raw: raw.update(normalizer={"type": "NFC"}), "gpt-2"),
        (splits(LLAMA_3, True), "llama-bpe"),
        (splits(LLAMA_3, False), "smaug-bpe"),
        (splits(LLAMA_3.replace("{1,3}", ""), False), "qwen2"),
    ],
)
def test_a_rule_of_splitting_has_its_name(tokenizer: Tokenizer, change: Any, name: str) -> None:
    assert vocabulary(changed(tokenizer, change), 288).split == name


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(normalizer={"type": "Lowercase"}), "before it splits it"),
        (lambda raw: raw.update(pre_tokenizer={"type": "Whitespace"}), "not known there"),
        (lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True), "not known there"),
        (splits(r"\p{L}+|\s+", False), "not known there"),
        (splits(LLAMA_3.replace("{1,3}", ""), True), "not known there"),
        (lambda raw: raw["model"].update(end_of_word_suffix="</w>"), "a suffix"),
        (lambda raw: raw["model"].update(byte_fallback=True), "byte-level BPE"),
        (lambda raw: raw["added_tokens"][0].update(lstrip=True), "takes spaces"),
        (lambda raw: raw.update(post_processor=put("<|im_start|>", "<|im_end|>")), "after it"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_have_is_refused(
    tokenizer: Tokenizer, change: Any, said: str
) -> None:
    with pytest.raises(InputError, match=f"other tokens of the same text.*{said}"):
        vocabulary(changed(tokenizer, change), 288)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="280 tokens, the model 270"):
        vocabulary(tokenizer, 270)


def theirs(folder: Path, name: str, **changes: Any) -> Any:
    """A small decoder of transformers, with random weights."""
    sizes = {"vocab_size": 288, "max_position_embeddings": 128}
    made: Any = load(decoder_folder(folder / name, name, **(sizes | changes)))
    return made.eval()


def test_a_decoder_of_transformers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = theirs(tmp_path, "qwen3")
    keys, numbers, _ = read(write_model(made, tokenizer, tmp_path / "m.gguf", dtype="f32"))
    assert keys["general.architecture"] == "qwen3"
    for ours, name in (
        ("model.layers.1.self_attn.q_proj", "blk.1.attn_q"),  # rows as they are
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
    ):
        expected = made.get_parameter(f"{ours}.weight").detach().numpy()
        np.testing.assert_array_equal(numbers[f"{name}.weight"], expected)
    made = theirs(tmp_path, "gemma")
    numbers = read(write_model(made, tokenizer, tmp_path / "m.gguf", dtype="f32"))[1]
    expected = 1 + made.get_parameter("model.norm.weight").detach().numpy()
    np.testing.assert_array_equal(numbers["output_norm.weight"], expected)


LLAMA_3_SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SKIPPING = FormPlan(blocks={"model.layers.0": BlockPlan(mlp_width=32)})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda folder: theirs(folder, "gpt2"),
            "'gpt2'.*allowed: gemma, llama, mistral, qwen2, qwen3",
        ),
        (lambda folder: theirs(folder, "mistral"), "no sliding window.*5"),
        (lambda folder: theirs(folder, "qwen3", attention_bias=True), "no place for this tensor"),
        (lambda folder: theirs(folder, "qwen3", is_causal=False), "no later tokens.*allowed: true"),
        (lambda folder: theirs(folder, "gemma", hidden_act="silu"), "another activation"),
        (
            lambda _: model(model_type="qwen2", attention_bias=True, rope_scaling=LLAMA_3_SCALING),
            "no factors of rotary",
        ),
        (lambda _: model(forms=SKIPPING), "different widths"),
    ],
)
def test_a_model_that_was_not_read_back_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, make: Callable[[Path], Any], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        write_model(make(tmp_path / "model"), tokenizer, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*m.gguf*"))


@pytest.mark.parametrize(
    ("dtype", "value", "said"),
    [("f16", 1e5, "at most 65504"), ("q8_0", 1e9, "at most"), ("f32", float("nan"), "finite")],
)
def test_a_weight_without_a_value_in_the_type_is_refused_and_the_old_file_stays(
    tmp_path: Path, tokenizer: Tokenizer, dtype: DataType, value: float, said: str
) -> None:
    file = tmp_path / "m.gguf"
    file.write_text("mine")
    made = model()
    made.get_parameter("model.layers.1.mlp.up_proj.weight").data[3, 4] = value
    with pytest.raises(InputError, match=rf"blk\.1\.ffn_up\.weight.*{said}"):
        write_model(made, tokenizer, file, dtype=dtype)
    assert [each.name for each in tmp_path.iterdir()] == ["m.gguf"]
    assert file.read_text() == "mine"


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5000))
    with pytest.raises(InputError, match=r"m\.gguf: the disk is full: 68.2 kB"):
        write_model(model(), tokenizer, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", [LoRA(rank=2, alpha=8.0), PiSSA(rank=2)])
def test_an_adapter_alone_is_the_change_of_the_base(tmp_path: Path, method: Any) -> None:
    made = model()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    adapter = method.attach(made)
    torch.manual_seed(1)
    for parameter in adapter.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    keys, numbers, types = read(write_adapter(made, adapter, tmp_path / "a.gguf"))
    assert (keys["general.type"], keys["adapter.type"]) == ("adapter", "lora")
    assert set(types.values()) == {"F32"}
    adapter.merge()
    adapter.detach()
    for layer in ("q", "v"):
        name = f"model.layers.1.self_attn.{layer}_proj.weight"
        expected = made.get_parameter(name).detach() - before[name]
        a, b = (numbers[f"blk.1.attn_{layer}.weight.lora_{each}"] for each in "ab")
        found = torch.from_numpy(keys["adapter.lora.alpha"] / len(a) * b @ a)
        assert expected.abs().max() > 1e-3
        expected = reordered(expected, HEADS) if layer == "q" else expected
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-4)


def test_an_adapter_that_llama_cpp_cannot_attach_is_refused(tmp_path: Path) -> None:
    made = model()
    adapter = LoRA(rank=2, targets=("model.embed_tokens",)).attach(made)
    with pytest.raises(InputError, match=r"model\.embed_tokens: llama\.cpp has no place"):
        write_adapter(made, adapter, tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("also", ["model.norm", "model.layers.1.input_layernorm.weight"])
def test_an_adapter_that_trains_parameters_in_full_is_refused(tmp_path: Path, also: str) -> None:
    made = model()
    adapter = LoRA(rank=2, also=(also,)).attach(made)
    said = rf"trains {re.escape(also)}.* in full \(`also`\).*the merged model \(`--form gguf`\)"
    with pytest.raises(InputError, match=said):
        write_adapter(made, adapter, tmp_path / "a.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed"
)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_llama_cpp_computes_the_same(tmp_path: Path, tokenizer: Tokenizer, name: str) -> None:
    import llama_cpp

    made = model() if name == "llama" else theirs(tmp_path, name)
    file = write_model(made, tokenizer, tmp_path / "m.gguf", dtype="f32")
    single = llama_cpp.GGML_TYPE_F32
    reader = llama_cpp.Llama(
        str(file), n_ctx=128, logits_all=True, verbose=False, type_k=single, type_v=single
    )
    text = f"<|im_start|>{TEXT}"
    ids = reader.tokenize(text.encode(), special=True)
    assert ids == tokenizer.encode(text)
    reader.eval(ids)
    with torch.no_grad():
        expected = made(torch.tensor([ids]))
    expected = getattr(expected, "logits", expected)[0]
    found = torch.from_numpy(np.array(reader.scores[: len(ids)]))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)
    reader.close()
