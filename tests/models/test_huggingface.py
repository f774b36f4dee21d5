from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers import Qwen2ForCausalLM as TheirQwen2

from modicum.core.errors import InputError
from modicum.models import ModelConfig, create, load, read_config, read_header, resolve, save
from modicum.models.huggingface import fill, fill_from

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
NORM = "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}


def config(**changes: object) -> ModelConfig:
    sizes = {"vocabulary_size": 29, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2}
    return ModelConfig(**({**sizes, "mlp_width": 24, "context": 32, "eos_token_id": 2} | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(create(config(), 0), tmp_path / "model")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "4KB"])
def test_their_save_is_our_load(tmp_path: Path, tied: bool, shard: str) -> None:
    twin = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
    twin.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    model = load(tmp_path)
    with torch.no_grad():
        assert (model(IDS) - twin(IDS).logits).abs().max() < 1e-5


def test_qwen2_with_its_biases(tmp_path: Path) -> None:
    twin = TheirQwen2(Qwen2Config(**SIZES)).eval()
    for name, parameter in twin.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter)
    twin.save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        expected = twin(IDS).logits
        assert (load(tmp_path / "theirs")(IDS) - expected).abs().max() < 1e-5
        assert torch.equal(again(IDS).logits, expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_bytes", [10**9, 4000])
def test_our_save_is_their_load_and_ours(tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    model = create(config(tied_embeddings=tied, initializer_range=0.3), 0)
    save(model, tmp_path / "model", shard_bytes=shard_bytes)
    shards = list((tmp_path / "model").glob("model*.safetensors"))
    assert (len(shards) > 1) == (shard_bytes == 4000)
    stored = [name for file in shards for name in load_file(file)]
    assert sorted(stored) == sorted(model.config.parameter_shapes())
    twin, info = LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    again = load(tmp_path / "model")
    with torch.no_grad():
        assert (twin(IDS).logits - model(IDS)).abs().max() < 1e-5
        assert torch.equal(again(IDS), model(IDS))
    assert twin.generation_config.eos_token_id == 2
    assert again.config == model.config


def test_each_loaded_parameter_owns_its_memory_and_can_be_cast(folder: Path) -> None:
    model = load(folder, dtype=torch.bfloat16)
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.requires_grad
        assert parameter.untyped_storage().nbytes() == parameter.numel() * 2
    save(model, folder)
    assert read_header(folder).dtype == "BF16"
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    if int(transformers.__version__.split(".")[0]) >= 5:  # before, it loads fp32 unless told
        assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


def test_a_loaded_model_no_longer_needs_its_file(folder: Path) -> None:
    model = load(folder)
    expected = create(config(), 0).state_dict()
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_the_header_says_what_the_weights_take(folder: Path) -> None:
    header = read_header(folder)
    assert header.config == config()
    assert header.bytes == 4 * config().parameter_count()
    assert header.dtype == "F32"
    assert header.tensors["model.norm.weight"].shape == (16,)


def test_more_files_go_with_the_model(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    folder = save(create(config(), 0), tmp_path / "model", files=[tokenizer])
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_run_folder_means_its_model(folder: Path) -> None:
    assert resolve(folder.parent) == resolve(folder) == folder
    assert read_config(folder.parent) == config()


@pytest.mark.parametrize(
    ("path", "spelled"),
    [
        ("meta/tiny-1B", "hub:meta/tiny-1B"),
        (Path.cwd() / "meta/tiny-1B", "hub:meta/tiny-1B"),
        ("./mine", "hub:OWNER/NAME"),
        ("/mine/models/one", "hub:OWNER/NAME"),
    ],
)
def test_a_path_that_is_not_there_says_how_the_hub_is_named(path: str | Path, spelled: str) -> None:
    with pytest.raises(InputError, match="there is no such folder") as refused:
        resolve(path)
    assert f" as {spelled}, " in str(refused.value)


def test_rotary_tables_and_the_tied_copy_of_old_files_are_passed_over(tmp_path: Path) -> None:
    folder = save(create(config(tied_embeddings=True), 0), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    assert set(read_header(folder).tensors) == set(config(tied_embeddings=True).parameter_shapes())


@pytest.fixture(params=["llama", "qwen2"])
def tied(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder whose output layer is the embedding, and which repeats it under its own name."""
    kinds = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (TheirQwen2, Qwen2Config)}
    kind, of = kinds[request.param]
    kind(of(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "tied")
    edit(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))(tmp_path / "tied" / "model.safetensors")
    return tmp_path / "tied"


def test_an_output_layer_that_repeats_the_embedding_is_no_other(tied: Path) -> None:
    model = load(tied)
    assert read_header(tied).config == model.config
    assert HEAD not in model.state_dict()
    twin = AutoModelForCausalLM.from_pretrained(tied)
    with torch.no_grad():
        assert (model(IDS) - twin(IDS).logits).abs().max() < 1e-5
    fill(model, tied)
    fill_from(model, read_header(tied))


def test_an_output_layer_of_its_own_is_not_passed_over(tied: Path) -> None:
    model = load(tied)
    edit(lambda t: t[HEAD][28, 0].add_(1))(tied / "model.safetensors")
    header = read_header(tied)
    for read in (load, partial(fill, model), lambda _: fill_from(model, header)):
        with pytest.raises(InputError, match="set tie_word_embeddings to false there") as caught:
            read(tied)
        assert (caught.value.field, caught.value.file) == (HEAD, tied / "model.safetensors")
    fill(model, tied, skip=[EMBEDDING])  # where the embedding is another, nothing is compared
    raw = json.loads((tied / "config.json").read_text())
    (tied / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    stored, weights = load_file(tied / "model.safetensors"), load(tied).state_dict()
    assert torch.equal(weights[HEAD], stored[HEAD])
    assert torch.equal(weights[EMBEDDING], stored[EMBEDDING])
    assert not torch.equal(weights[HEAD], weights[EMBEDDING])


def test_an_output_layer_of_another_shape_is_refused(tied: Path) -> None:
    edit(lambda t: t.update({HEAD: torch.ones(28, 16)}))(tied / "model.safetensors")
    for read in (read_header, load):
        with pytest.raises(InputError, match=r"\[28, 16\], and by config") as caught:
            read(tied)
        assert caught.value.field == HEAD


def cast(**dtypes: torch.dtype) -> Callable[[Path], None]:
    """Store tensors in these dtypes, by the last part but one of their names; others in bf16."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtypes.get(name.split(".")[-2], torch.bfloat16))

    return edit(change)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({}, "BF16"),
        ({"norm": torch.float32}, "F32"),
        ({"norm": torch.float16}, "F32"),
        ({"norm": torch.float64}, "F64"),
        ({"norm": torch.float64, "q_proj": torch.float32}, "F64"),
    ],
)
def test_the_dtype_of_a_folder_holds_every_tensor_exactly(
    folder: Path, dtypes: dict[str, torch.dtype], expected: str
) -> None:
    cast(**dtypes)(folder / "model.safetensors")
    header, stored = read_header(folder), load_file(folder / "model.safetensors")
    assert header.dtype == expected
    model = load(folder)
    assert {tensor.dtype for tensor in model.parameters()} == {DTYPES[expected]}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name].to(DTYPES[expected]))
    with torch.no_grad():
        assert model(IDS).isfinite().all()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def truncate_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"123")


def scribble(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[8:12] = b"\xff\xfe{["
    file.write_bytes(bytes(data))


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(file: Path) -> None:
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return apply


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (truncate, "truncated or damaged"),
        (truncate_header, "truncated in its header"),
        (lengthen, "truncated or damaged"),
        (scribble, "not JSON"),
        (lambda file: file.write_bytes(b""), "not a safetensors file"),
        (lambda file: file.write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda file: file.write_text("version https://git-lfs"), "git lfs pull"),
        (lambda file: file.write_bytes(b"\x02" + bytes(7) + b"[]"), "not a JSON object"),
        (lambda file: file.write_bytes(b"\x09" + bytes(7) + b'{"a": {}}'), "a: the header's entry"),
        (edit(lambda t: t.pop(NORM)), f"{NORM}: the weights lack"),
        (edit(lambda t: t.update({NORM: torch.ones(3)})), r"\[3\], and by config.json \[16\]"),
        (edit(lambda t: t.update({NORM: torch.ones(16).long()})), "I64"),
        (edit(lambda t: t.update(extra=torch.ones(1))), "extra: .* no place"),
    ],
)
def test_broken_weights_are_named(
    folder: Path, breaks: Callable[[Path], object], words: str
) -> None:
    breaks(folder / "model.safetensors")
    for read in (read_header, load):
        with pytest.raises(InputError, match=words) as caught:
            read(folder)
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{\n oops", r"config.json:2: this is not JSON"),
        ("[]", "JSON object"),
        ("{}", "model_type"),
        ('{"model_type": "llama"}', "vocab_size: is missing"),
    ],
)
def test_a_broken_configuration_is_named(folder: Path, text: str, words: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=words):
        read_header(folder)
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(InputError, match="UTF-8"):
        read_header(folder)


def test_folders_that_are_no_model(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(InputError, match="hf download"):
        read_header("meta-llama/no-such-model")
    with pytest.raises(InputError, match="this is a file"):
        read_header(folder / "config.json")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty: this folder holds neither a run nor a model"):
        read_header(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"it has no model.safetensors"):
        read_header(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(InputError, match=rf"{name}: pickled .* convert the model to safetensors"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.pop("weight_map"), "not an index"),
        (lambda index: index["weight_map"].update({NORM: 7}), "not an index"),
        (lambda index: index["weight_map"].update({NORM: "gone.safetensors"}), "is not there"),
        (lambda index: index["weight_map"].update({NORM: "../x.safetensors"}), "same folder"),
        (lambda index: index["weight_map"].pop(NORM), "the weights lack"),
        (
            lambda index: index["weight_map"].update({NORM: min(index["weight_map"].values())}),
            "the file lacks",
        ),
    ],
)
def test_broken_indexes_are_named(
    tmp_path: Path, change: Callable[[dict[str, dict[str, Any]]], object], words: str
) -> None:
    folder = save(create(config(), 0), tmp_path / "model", shard_bytes=4000)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    with pytest.raises(InputError, match=words):
        read_header(folder)


def test_an_unknown_linear_form_is_refused_before_reading(folder: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'dense'"):
        load(folder, linear="dens")


def test_a_header_that_names_a_tensor_twice_is_told(tmp_path: Path) -> None:
    made = create(ModelConfig(vocabulary_size=8, width=4, layers=1, heads=1), 0)
    file = save(made, tmp_path / "m") / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = b'{"model.norm.weight": 1, ' + raw[9 : 8 + length]
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    with pytest.raises(InputError, match=r"model\.safetensors: .*cannot be read"):
        load(tmp_path / "m")


def test_how_a_model_writes_is_said_in_the_folder_that_it_is_saved_to(
    folder: Path, tmp_path: Path
) -> None:
    said = {"do_sample": True, "temperature": 0.6, "bos_token_id": 1, "eos_token_id": [7, 9]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    filled = create(config(), 1)
    fill(filled, folder)
    for model in (load(folder), filled):
        again = save(model, tmp_path / "again") / "generation_config.json"
        assert json.loads(again.read_text()) == said | {"eos_token_id": [7, 9, 2]}


def test_the_end_of_what_a_model_was_trained_on_is_one_of_its_ends(
    folder: Path, tmp_path: Path
) -> None:
    def written(model: Any, end: int | None = None) -> bytes:
        return (save(model, tmp_path / "again", end=end) / "generation_config.json").read_bytes()

    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "generation_config.json").write_text('{"do_sample": true, "eos_token_id": [7, 9]}')
    endless = create(config(eos_token_id=None), 1)
    for model, known in (
        (endless, []),
        (create(config(), 1), [2]),  # it was read from no folder
        (load(folder), [2]),  # whose file is made of config.json
        (load(other), [7, 9, 2]),
    ):
        before = written(model)
        assert [written(model, end) for end in known] == [before] * len(known)
        found = json.loads(written(model, 5))
        assert found["eos_token_id"] == ([*known, 5] if known else 5)
        assert "_from_model_config" not in found  # else transformers makes it anew
        twin = LlamaForCausalLM.from_pretrained(tmp_path / "again")
        assert twin.generation_config.eos_token_id == found["eos_token_id"]
