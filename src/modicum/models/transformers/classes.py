"""Classifiers of sequences on models of transformers: their shape, their files, their new heads."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from modicum.core.errors import InputError
from modicum.core.files import json_object
from modicum.core.layers.meta import materialise, on_meta
from modicum.core.random import derive_seed
from modicum.core.ranks.sharding import own_part
from modicum.models.huggingface import CONFIG, ModelHeader, resolve
from modicum.models.other_folders import no_model
from modicum.models.plan_headers import has_weights
from modicum.models.safetensors_file import find_tensors
from modicum.models.transformers.buffers import exact_tensors
from modicum.models.transformers.config import TransformersConfig
from modicum.models.transformers.kinds import architecture
from modicum.models.transformers.model import TransformersClassifier, build
from modicum.models.transformers.names import placed
from modicum.models.transformers.private import begin_module
from modicum.models.transformers.shown import TOKENS, same, smallest

_LENGTHS = (9, 5)  # of the rows on which masks are tried
_HEADS, _MASKED = "ForSequenceClassification", "ForMaskedLM"


def check_kind(folder: Path) -> None:
    """Refuse a folder whose model has no classifier of texts.

    Raises:
        InputError: the folder is no model, or is of such a kind.
    """
    _kind(folder, _raw(folder))


def _kind(folder: Path, raw: Mapping[str, Any]) -> type[Any]:
    try:
        return architecture(raw, "classes")
    except InputError as error:
        raise error.located(file=folder / CONFIG) from None


def classifier_config(
    folder: Path, names: Sequence[str], pad_token_id: int | None, *, known_first: bool = True
) -> TransformersConfig:
    """The configuration of a folder's model as a classifier of these classes.

    Args:
        pad_token_id: of the tokenizer, if it has one.
        known_first: whether the one that config.json has goes before it.

    Raises:
        InputError: transformers has no such classifier; no padding is known, or it is beyond the
            vocabulary; or padding changes what the model says of a row, whatever it gets.
    """
    raw = _raw(folder)
    own = raw.get("pad_token_id")
    # Old files have -1 where there is none.
    there = isinstance(own, int) and own >= 0
    pad = own if there and (known_first or pad_token_id is None) else pad_token_id
    if pad is None:
        raise InputError(
            "config.json has no pad_token_id, and the tokenizer no pad_token: rows of a batch have "
            "different lengths, so say which token fills them",
            file=folder / CONFIG,
            field="pad_token_id",
        )
    made = _kind(folder, raw)
    labels = {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    kept = {key: value for key, value in raw.items() if key not in ("num_labels", "_num_labels")}
    known = {"architectures": [made.__name__], "problem_type": "single_label_classification"}
    config = TransformersConfig(kept | labels | known | {"pad_token_id": pad}, head="classes")
    if pad >= config.vocabulary_size:
        raise InputError(
            f"token {pad} fills rows, but the model's vocabulary ends at "
            f"{config.vocabulary_size - 1}; name a token that it has",
            file=folder / CONFIG,
            field="pad_token_id",
        )
    try:
        masked = _masks(json.dumps(config.raw, sort_keys=True))
    except InputError as error:
        raise error.located(file=folder / CONFIG) from None
    return replace(config, packing="mask" if masked else "none")


def stored_classes(folder: Path) -> tuple[str, ...] | None:
    """The names of the classes that a folder's model was trained for; None where it was not."""
    return classes_of(_raw(folder))


def classes_of(raw: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The names of the classes in a classifier's config.json; None in that of another model."""
    trained = any(str(name).endswith(_HEADS) for name in raw.get("architectures") or [])
    if not trained or not isinstance(raw.get("id2label"), dict):
        return None
    try:
        return tuple(str(raw["id2label"][key]) for key in sorted(raw["id2label"], key=int))
    except ValueError:
        return None


@functools.lru_cache(maxsize=8)
def _masks(text: str) -> bool:
    """Whether the model needs a mask for padding at the end of rows; seen on a small random one."""
    raw = json.loads(text)
    model, why = smallest(raw, "classes")
    if model is None:
        problem = "no small model of this architecture can be run to see what it does"
        raise InputError(f"{problem} ({why})")
    rows = torch.zeros(len(_LENGTHS), max(_LENGTHS), dtype=torch.int64)
    size = min(TOKENS, model.decoder_config.vocabulary_size)
    generator = torch.Generator().manual_seed(0)
    for row, length in zip(rows, _LENGTHS, strict=True):
        row[:length] = torch.randint(1, size, (length,), generator=generator)
    with torch.no_grad():
        alone = [model(row[None, :n]) for row, n in zip(rows, _LENGTHS, strict=True)]
        for mask in ((rows != 0).long(), None):
            if all(map(same, model(rows, mask).split(1), alone)):
                return mask is not None
    raise InputError(
        "padding at the end of a row changes what this model says of it, so it is not trained",
        field="model_type",
        value=raw.get("model_type"),
    )


@functools.lru_cache(maxsize=8)
def _longest(text: str) -> int | None:
    with on_meta():
        model = build(TransformersConfig(json.loads(text), head="classes"))
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            before = -1 if module.padding_idx is None else module.padding_idx
            return int(module.num_embeddings - before - 1)
    return None


def longest(config: TransformersConfig) -> int:
    """The most tokens that a row can have, and be read as it would be alone.

    RoBERTa numbers them from beyond its padding; with LongRoPE positions of longer rows depend on
    the longest row of the batch.
    """
    found = (_longest(json.dumps(config.raw, sort_keys=True)), config.rope_limits.shortest)
    return min([config.context, *(each for each in found if each is not None)])


@dataclass(frozen=True)
class _Heads:
    """What stands on the blocks, by the names of a classifier's modules.

    Args:
        kept: whether the folder's own is for the classes that are asked for.
        masked: whether it fills in masks: what of it is called as a part of the classifier is
            taken over, as transformers does (ModernBERT's `head`).
    """

    names: tuple[str, ...]
    base: str
    parts: frozenset[str]
    kept: bool
    masked: bool

    def begins(self, name: str) -> bool:
        return name.startswith(tuple(f"{each}." for each in self.names))

    def replaced(self, name: str) -> bool:
        anew = not self.kept and not self.masked
        return anew and self.begins(name) and not name.startswith(f"{self.base}.")

    def may_be_left(self, name: str) -> bool:
        inner = name.removeprefix(f"{self.base}.")
        return not self.begins(name) and inner.partition(".")[0] not in self.parts


def classifier_header(
    folder: Path, config: TransformersConfig, *, keep_head: bool
) -> tuple[ModelHeader, tuple[str, ...]]:
    """Where the tensors of a classifier lie in a folder's files, and the names that begin anew.

    Heads for other tasks are left; a folder without weights has no tensors.

    Args:
        keep_head: whether the folder's own head is for these classes.

    Raises:
        InputError: a tensor of the blocks is missing, unknown, or of another shape.
    """
    with on_meta():
        model = build(config)
    every = [name for name, _ in model.named_parameters()]
    if not has_weights(folder):
        return ModelHeader(folder, config, {}), ()
    base = model.base_model_prefix
    parts = frozenset(name for name, _ in getattr(model, base).named_children())
    own = [str(name) for name in _raw(folder).get("architectures") or []]
    masked = bool(own) and all(name.endswith(_MASKED) for name in own)
    heads = _Heads(model.trained_heads, base, parts, keep_head, masked)
    found = placed(model, find_tensors(folder), folder, heads)
    header = ModelHeader(folder, config, found, exact=exact_tensors(model))
    return header, tuple(n for n in every if n not in found)


@torch.no_grad()
def begin_heads(
    model: TransformersClassifier, names: Collection[str], seed: int, skip: Collection[str] = ()
) -> None:
    """Fill new parameters as transformers begins a model, as a function of the seed and the name.

    Args:
        names: of the parameters; a rank that holds a part of one fills that.
        skip: those that are left as they are.
    """
    with on_meta():
        plain = build(replace(model.decoder_config, forms=type(model.decoder_config.forms)()))
    own: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        module = plain.get_submodule(path)
        materialise(module, "cpu")
        with torch.random.fork_rng():
            torch.manual_seed(derive_seed(seed, path))
            begin_module(plain, module)
        for leaf, drawn in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}"
            if name in names and name not in skip:
                part, before = own_part(own[name])
                part.copy_(drawn[before : before + part.shape[0]])


def _raw(folder: Path) -> dict[str, Any]:
    folder = resolve(folder)
    if not (folder / CONFIG).is_file():
        raise no_model(folder)
    return json_object(folder / CONFIG)
