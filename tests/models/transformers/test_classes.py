"""Classifiers of transformers: which modules are heads, and which token decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from classifiers import base_folder

from modicum.adapters.files import read_stored
from modicum.core.errors import InputError
from modicum.core.layers.meta import materialise, on_meta
from modicum.models.transformers.classes import (
    check_kind,
    classifier_config,
    classifier_header,
    longest,
    stored_classes,
)
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.model import build

NAMES = ("one", "two", "three")
HEADS = {
    "bert": ("classifier", "bert.pooler"),
    "roberta": ("classifier",),
    "distilbert": ("pre_classifier", "classifier"),
    "gpt2": ("score",),
    "qwen3": ("score",),
}


def classifier(folder: Path, name: str) -> Any:
    """A tiny classifier with random weights."""
    config = classifier_config(base_folder(folder, name), NAMES, 0)
    with on_meta():
        model = build(config)
    materialise(model, "cpu")
    return model.initialise(0).eval()


@pytest.mark.parametrize("name", HEADS)
def test_the_heads_are_found_and_begin_anew(name: str, tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", name)
    config = classifier_config(base, NAMES, 0)
    with on_meta():
        model = build(config)
    assert set(model.trained_heads) == set(HEADS[name])
    _, new = classifier_header(base, config, keep_head=False)
    assert {each.rpartition(".")[0] for each in new} == {
        path
        for head in HEADS[name]
        for path, module in model.named_modules()
        if path.startswith(head) and next(module.parameters(recurse=False), None) is not None
    }


@pytest.mark.parametrize("named", ["bfloat16", "float32"])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_a_classifier_is_in_the_dtype_that_is_asked_for(
    named: str, wanted: torch.dtype, tmp_path: Path
) -> None:
    folder = base_folder(tmp_path / "base", "qwen3")
    file = folder / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"dtype": named, "torch_dtype": named}))
    config = classifier_config(folder, NAMES, 0)
    assert config.packing in ("mask", "none")  # padding was tried, and changes nothing
    with on_meta(wanted):
        model = build(config)
    assert {each.dtype for each in model.parameters()} == {wanted}


def test_what_a_masked_model_has_below_its_vocabulary_is_taken_over(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48, "max_position_embeddings": 40, "pad_token_id": 0,
        "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3,
    }  # fmt: skip
    known = transformers.AutoConfig.for_model("modernbert", **sizes)
    masked = transformers.AutoModelForMaskedLM.from_config(known)
    masked.save_pretrained(tmp_path)
    config = classifier_config(tmp_path, NAMES, 0)
    header, new = classifier_header(tmp_path, config, keep_head=False)
    assert set(new) == {"classifier.weight", "classifier.bias"}
    assert "head.dense.weight" in header.tensors
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(theirs.head.dense.weight, masked.head.dense.weight)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
@torch.no_grad()
def test_a_decoder_looks_at_the_last_token_that_is_no_padding(name: str, tmp_path: Path) -> None:
    model = classifier(tmp_path / "base", name)
    rows = torch.tensor([[5, 6, 7, 8], [5, 6, 0, 0], [5, 9, 0, 0]])
    alone = [model(rows[:1]), model(rows[1:2, :2]), model(rows[2:, :2])]
    torch.testing.assert_close(model(rows), torch.cat(alone), rtol=0, atol=1e-5)
    assert (alone[1] - alone[2]).abs().max() > 1e-3
    hidden = getattr(model, model.base_model_prefix)(rows[:1]).last_hidden_state
    torch.testing.assert_close(model.score(hidden)[:, -1], alone[0], rtol=0, atol=1e-5)


def with_padding(folder: Path, token: int) -> Path:
    """A tiny BERT with 64 tokens, and this one to fill rows."""
    raw = json.loads((base_folder(folder, "bert") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"pad_token_id": token}))
    return folder


def test_a_token_of_minus_one_is_none(tmp_path: Path) -> None:
    folder = with_padding(tmp_path / "base", -1)
    assert classifier_config(folder, NAMES, 3).raw["pad_token_id"] == 3
    with pytest.raises(InputError, match="has no pad_token_id, and the tokenizer") as caught:
        classifier_config(folder, NAMES, None)
    assert caught.value.field == "pad_token_id"


def test_a_configuration_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    for reads in (stored_classes, check_kind):
        with pytest.raises(InputError, match=r"config\.json: this holds no JSON object"):
            reads(tmp_path)


def test_rows_are_not_filled_with_a_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    folder = with_padding(tmp_path / "base", 64)
    assert classifier_config(folder, NAMES, 63, known_first=False).raw["pad_token_id"] == 63
    for token, first in ((None, True), (0, True), (70, False)):
        with pytest.raises(InputError, match="vocabulary ends at 63") as caught:
            classifier_config(folder, NAMES, token, known_first=first)
        assert caught.value.field == "pad_token_id"


def test_no_text_is_so_long_that_others_in_its_batch_would_have_other_positions() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    raw = {
        "model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64, "pad_token_id": 0,
        "max_position_embeddings": 64, "original_max_position_embeddings": 24,
    }  # fmt: skip
    scaled = {**raw, "rope_scaling": {"type": "longrope", **factors}}
    found = [longest(TransformersConfig(each, head="classes")) for each in (raw, scaled)]
    assert found == [64, 24]


def test_peft_keeps_the_last_layer_of_a_classifier_and_no_pooler(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = base_folder(tmp_path / "base", "bert")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
    peft.get_peft_model(theirs, lora).save_pretrained(tmp_path / "adapter")
    config = classifier_config(base, ("animals", "plants"), 0)
    with on_meta():
        model = build(config)
    stored = read_stored(tmp_path / "adapter", model)
    assert {"classifier.weight", "classifier.bias"} <= set(stored.method.also)
    assert not any("pooler" in name for name in stored.method.also)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({k: t for k, t in tensors.items() if "classifier" not in k}, file)
    with pytest.raises(InputError, match="lacks the classifier's head"):
        read_stored(tmp_path / "adapter", model)
