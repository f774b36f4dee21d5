"""Models and rows for `plan_truth`: random weights of many architectures, at a size that counts."""

from __future__ import annotations

import hashlib
import json
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from architectures_models import MODELS

from modicum.data.tokenizer import Tokenizer

# The built-in decoder reads folders of this one.
_LLAMA = {"Llama": {"model_type": "llama"}}
DECODERS: dict[str, dict[str, Any]] = _LLAMA | MODELS
_ENCODER = {"type_vocab_size": 2, "pad_token_id": 0}
ENCODERS: dict[str, dict[str, Any]] = {
    "BERT": {"model_type": "bert", **_ENCODER},
    "RoBERTa": {"model_type": "roberta", **_ENCODER, "type_vocab_size": 1},
    "DistilBERT": {"model_type": "distilbert", "pad_token_id": 0},
}
_HEAD = 64
# The tokenizer of all folders; a model's table may have more tokens.
TOKENS = 2048
_PACKAGES = ("asyncio", "email", "json", "unittest")
_LONG = 2000  # characters: more tokens than a row holds
# What a length is called where it is not `hidden_size` and so on.
_OWN_NAMES = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
             "num_attention_heads": "n_head", "max_position_embeddings": "n_positions"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "opt": {"intermediate_size": "ffn_dim"},
    "distilbert": {"hidden_size": "dim", "num_hidden_layers": "n_layers",
                   "num_attention_heads": "n_heads", "intermediate_size": "hidden_dim"},
}  # fmt: skip


def sized(name: str, width: int, layers: int, vocabulary: int, context: int) -> dict[str, Any]:
    """The config.json of an architecture at a size, with heads of 64."""
    raw = dict((DECODERS | ENCODERS)[name])
    kind, heads = raw["model_type"], width // _HEAD
    inner = (
        4 * width if kind in ("bert", "roberta", "distilbert", "opt") else 8 * width // 3 // 64 * 64
    )
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context + 2,
        "intermediate_size": inner,
    }
    names = _OWN_NAMES.get(kind, {})
    known = {names.get(key, key): value for key, value in sizes.items()}
    if "num_key_value_heads" in raw or kind == "llama":
        known["num_key_value_heads"] = 2 if heads % 2 == 0 else 1
    if "head_dim" in raw:
        known["head_dim"] = _HEAD
    if "query_pre_attn_scalar" in raw:
        known["query_pre_attn_scalar"] = _HEAD
    if "sliding_window" in raw:
        known["sliding_window"] = context // 4
    if "word_embed_proj_dim" in raw:
        known["word_embed_proj_dim"] = width
    if "moe_intermediate_size" in raw:
        known["moe_intermediate_size"] = width
    if "layer_types" in raw:
        kinds = raw["layer_types"]
        known["layer_types"] = [kinds[layer % len(kinds)] for layer in range(layers)]
    known |= {"vocab_size": vocabulary, "initializer_range": 0.02}
    return {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None} | raw | known


def model_folder(work: Path, raw: dict[str, Any]) -> Path:
    """A folder with the model and a tokenizer, made once for all cases that have it."""
    import torch
    import transformers

    key = hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:12]
    folder = work / "models" / f"{raw['model_type']}-{key}"
    if (folder / "tokenizer.json").exists():
        return folder
    fields = dict(raw)
    kind = fields.pop("model_type")
    classes = kind in ("bert", "roberta", "distilbert")
    maker = transformers.AutoModelForMaskedLM if classes else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    made = maker.from_config(transformers.AutoConfig.for_model(kind, **fields))
    made.to(getattr(torch, raw.get("dtype", "float32"))).save_pretrained(folder)
    tokenizer_of(work).save(folder)
    return folder


def adapter_folder(model: Path, method: str) -> Path:
    """A folder with an adapter for a model, of which nothing is trained yet; made once."""
    from modicum.models.huggingface import load
    from modicum.recipe import methods_for

    folder = model.with_name(f"{model.name}-{method}")
    if not folder.exists():
        adapter: Any = methods_for("adapter")[method].load()(rank=16)
        adapter.attach(load(model)).save(folder, base_model=str(model))
    return folder


def norm_of(model: Path) -> str:
    """The last name of norms of a folder's model: of modules whose weight has one dimension."""
    from modicum.models.safetensors_file import find_tensors

    entries = find_tensors(model).items()
    names = (name for name, entry in entries if name.endswith(".weight") and len(entry.shape) == 1)
    return min(names).split(".")[-2]


def tokenizer_of(work: Path) -> Tokenizer:
    """One tokenizer for all folders."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        Tokenizer.train((text for _, text in _sources()), TOKENS).save(folder)
    return Tokenizer.load(folder)


def rows_file(work: Path, kind: str) -> Path:
    """Rows of the library's sources: `examples` of all lengths, of `classes` three in four long.

    The others have padding, as some of any user's rows have: where no row of a batch has any,
    transformers leaves the mask out, and a forecast is of the mask's memory too.
    """
    file = work / f"{kind}.jsonl"
    if not file.exists():
        chance, rows = random.Random(kind), []
        for package, text in _sources():
            start = 0
            while len(text) - start > _LONG:
                size = chance.randint(100, _LONG)
                if kind == "classes" and chance.random() < 0.75:
                    size = _LONG
                rows.append({"text": text[start : start + size], "label": package})
                start += size
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def _sources() -> Iterator[tuple[str, str]]:
    """Of some packages of the standard library, their names and the texts of their files."""
    for package in _PACKAGES:
        for file in sorted((Path(sysconfig.get_path("stdlib")) / package).glob("*.py")):
            yield package, file.read_text(encoding="utf-8")
