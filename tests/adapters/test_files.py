"""Broken, cut and missing adapter files: one message, and the model is left as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modicum.adapters import LoRA, LoRAFA, MoS, load
from modicum.adapters.adapter_layer import decoded
from modicum.adapters.saving import Form
from modicum.core.errors import InputError
from modicum.proofs.contracts.adapters.subjects import odd_model, stir

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    stir(LoRA(rank=2).attach(odd_model())).save(tmp_path / "adapter")
    return tmp_path / "adapter"


def refused(folder: Path, match: str) -> InputError:
    model = odd_model()
    with pytest.raises(InputError, match=match) as error:
        load(model, folder)
    assert [type(module) for module in model] == [nn.Linear, nn.Tanh, nn.Linear]
    return error.value


def test_a_good_folder_loads(folder: Path) -> None:
    model, inputs = odd_model(), torch.ones(1, 7)
    base = model(inputs)
    load(model, folder)
    assert not torch.equal(model(inputs), base)


@pytest.mark.parametrize("part", [0, 4, 200, 0.5, -1])
def test_cut_weights_are_refused(folder: Path, part: float) -> None:
    content = (folder / WEIGHTS).read_bytes()
    kept = int(len(content) * part) if isinstance(part, float) else part
    (folder / WEIGHTS).write_bytes(content[:kept])
    assert refused(folder, "cannot be read").file == folder / WEIGHTS


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    refused(folder, "weights are missing")
    (folder / CONFIG).unlink()
    refused(folder, "no adapter_config.json")
    refused(tmp_path / "nowhere", "there is no such folder")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "this is not JSON"),
        ('{"peft_type": "LORA", "r": ', "this is not JSON"),
        ("[1, 2]", "no JSON object"),
        ("{}", "not a LoRA adapter"),
        ('{"peft_type": "LORA", "r": 0, "lora_alpha": 1}', "above zero"),
        ('{"peft_type": "LORA", "r": "2", "lora_alpha": 1}', "above zero"),
        ('{"peft_type": "LORA", "r": 2}', "lora_alpha"),
        (b"\xff\xfe", "not UTF-8 text"),
    ],
)
def test_broken_configurations_are_refused(folder: Path, content: str | bytes, match: str) -> None:
    raw = content.encode() if isinstance(content, str) else content
    (folder / CONFIG).write_bytes(raw)
    refused(folder, match)


def test_a_missing_factor_is_refused(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors.pop("base_model.model.wide.lora_B.weight")
    save_file(tensors, folder / WEIGHTS)
    refused(folder, r"does not fit the model: .*wide\.B")


def test_a_factor_of_another_rank_is_refused(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"r": 3}))
    refused(folder, r"does not fit the model.*shape")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rank_pattern": {"wide": 2**40}}, r"wide\.A: has shape \(2, 7\) in what is loaded"),
        ({"alpha_pattern": {"wide": 5e-324}}, "must be a number above zero"),
        ({"lora_alpha": 10**400}, "must be a number above zero"),
        ({"lora_dropout": 10**400}, "must be from 0 to below 1"),
        ({"target_modules": False}, "must be a pattern or a list of names"),
    ],
)
def test_numbers_and_names_far_from_any_are_refused(
    folder: Path, change: dict[str, Any], match: str
) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | change))
    refused(folder, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda tensor: tensor.index_fill(0, torch.tensor([0]), torch.nan), "not finite"),
        (lambda tensor: tensor * torch.inf, "not finite"),
        (lambda tensor: tensor.int(), r"wide\.B: is of another kind \(found: 'torch.int32'\)"),
        (lambda tensor: tensor[None], "has shape|no matrix"),
    ],
)
def test_factors_that_are_no_numbers_are_refused(
    folder: Path, change: Callable[[Tensor], Tensor], match: str
) -> None:
    tensors, name = load_file(folder / WEIGHTS), "base_model.model.wide.lora_B.weight"
    save_file(tensors | {name: change(tensors[name]).contiguous()}, folder / WEIGHTS)
    refused(folder, match)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn])
def test_factors_of_another_precision_load(folder: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    loaded = load(odd_model(), folder).state_dict()
    expected = tensors["base_model.model.wide.lora_B.weight"].float()
    assert torch.equal(loaded["wide.B"], expected)


@pytest.mark.parametrize("number", [2, "2", None])
def test_a_newer_format_is_refused_before_anything_else(tmp_path: Path, number: object) -> None:
    LoRA(rank=2).attach(odd_model()).save(tmp_path, form="modicum")
    file, weights = tmp_path / "modicum_adapter.json", tmp_path / "adapter.safetensors"
    config, tensors = json.loads(file.read_text()), weights.read_bytes()
    assert config["format"] == 1
    file.write_text(json.dumps(config | {"format": number, "method": "of tomorrow"}))
    weights.write_bytes(b"in another way")
    refused(tmp_path, r"format: .*a newer modicum.*allowed: 1")
    # What was written before there were numbers is of the first format.
    del config["format"]
    file.write_text(json.dumps(config))
    weights.write_bytes(tensors)
    load(odd_model(), tmp_path)


@pytest.mark.parametrize("method", [None, 7, ["lora"], "adamw"])
def test_what_names_no_method_is_refused(folder: Path, method: object) -> None:
    load(odd_model(), folder).save(folder, form="modicum")
    file = folder / "modicum_adapter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"method": method}))
    refused(folder, "must be a method's name" if method != "adamw" else "unknown method")


@pytest.mark.parametrize("seed", [None, "x", float("inf")])
def test_a_seed_that_is_no_number_is_refused(folder: Path, seed: object) -> None:
    load(odd_model(), folder).save(folder, form="modicum")
    file = folder / "modicum_adapter.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seed": seed}))
    refused(folder, "does not describe an adapter")


@pytest.mark.parametrize("change", ["beyond", "negative", "repeated"])
def test_indices_of_no_row_are_refused(tmp_path: Path, change: str) -> None:
    MoS(rank=2, shards=1).attach(odd_model()).save(tmp_path, form="modicum")
    file = tmp_path / "adapter.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"wide.index_A": tensors["wide.index_A"].to(torch.complex64)}, file)
    refused(tmp_path, "wide.index_A: is of another kind")
    index = {"beyond": 99, "negative": -1, "repeated": int(tensors["wide.index_A"][1])}[change]
    tensors["wide.index_A"][0] = index
    save_file(tensors, file)
    refused(tmp_path, "wide.index_A: has indices that repeat, or are none of 2 rows")


def test_a_seed_of_another_kind_is_refused(tmp_path: Path) -> None:
    LoRAFA(rank=2).attach(odd_model()).save(tmp_path, form="modicum")
    file = tmp_path / "adapter.safetensors"
    tensors = load_file(file)
    seed = next(name for name in tensors if name.endswith(".seed"))
    save_file(tensors | {seed: tensors[seed].to(torch.complex64)}, file)
    refused(tmp_path, rf"{seed}: is of another kind")


def test_a_state_that_says_of_no_adapter_is_refused() -> None:
    for said in (b"[]", b"{", b"[" * 100_000):
        with pytest.raises(InputError, match="does not say of which adapter it is"):
            decoded(torch.tensor(list(said), dtype=torch.uint8))


def test_the_least_dropout_there_is_loads(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"lora_dropout": 5e-324}))
    assert load(odd_model(), folder).method.dropout == 5e-324


def test_what_no_lora_can_hold_is_not_written_as_one(tmp_path: Path) -> None:
    adapter = stir(LoRA(rank=2, alpha=1e3).attach(odd_model()))
    with torch.no_grad():
        next(p for n, p in adapter.named_parameters() if n.endswith(".B")).fill_(torch.inf)
    with pytest.raises(InputError, match="would have values that are not finite"):
        adapter.save(tmp_path / "peft", form="peft")
    assert not (tmp_path / "peft").exists()
    adapter.save(tmp_path / "own")
    assert (tmp_path / "own" / "adapter.safetensors").exists()


def test_a_name_that_is_taken_leaves_the_adapter_that_has_it(folder: Path) -> None:
    model, inputs = odd_model(), torch.ones(1, 7)
    first = load(model, folder)
    outputs = model(inputs)
    with pytest.raises(InputError, match="an adapter of this name is attached already"):
        load(model, folder)
    assert first.active
    assert torch.equal(model(inputs), outputs)


def test_a_folder_is_replaced_whole(folder: Path) -> None:
    names = ("README.md", "adapter_model.bin", "base_weights.json", "modicum_adapter.json")
    for name in (*names, ".base_weights.json.7.part"):
        (folder / name).write_text("of an adapter")
    stir(LoRA(rank=1).attach(odd_model())).save(folder)
    assert sorted(path.name for path in folder.iterdir()) == [CONFIG, WEIGHTS]
    assert json.loads((folder / CONFIG).read_text())["r"] == 1


@pytest.mark.parametrize("form", ["peft", "modicum"])
@pytest.mark.parametrize("other", ["config.json", "second/adapter_config.json", "README.md"])
def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, other: str, form: Form) -> None:
    kept = tmp_path / "mine" / other
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(InputError, match="holds other files too") as error:
        LoRA(rank=2).attach(odd_model()).save(tmp_path / "mine", form=form)
    assert error.value.value == other.split("/")[0]
    assert kept.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_folder_that_the_process_runs_in_and_files_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    adapter = LoRA(rank=2).attach(odd_model())
    with pytest.raises(InputError, match="this process runs in the folder"):
        adapter.save(".")
    for _ in range(2):
        adapter.save("new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [CONFIG, WEIGHTS]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="this is a file"):
        adapter.save("file")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_path_out_of_a_link_is_saved_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "deep")
    back = tmp_path / "link" / ".." / "adapter"
    LoRA(rank=2).attach(odd_model()).save(back)
    assert (tmp_path / "far" / "adapter" / CONFIG).exists()
    assert load(odd_model(), back).active


@pytest.mark.parametrize("form", ["peft", "modicum", None])
def test_a_detached_adapter_leaves_what_was_saved(folder: Path, form: Form | None) -> None:
    adapter = load(odd_model(), folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    adapter.detach()
    with pytest.raises(InputError, match="the adapter was detached"):
        adapter.save(folder, form=form)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
