"""Which tensors of a folder's files become which of a model, as transformers itself has it.

Old names, prefixes, experts that files hold one by one: transformers says by rules of its own how
names in files become those of a model. Here they are followed tensor by tensor, and most of them
piece by piece, so that little of the files is in memory next to the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from modicum.core.errors import InputError
from modicum.models.safetensors_file import TensorEntry, read_tensor
from modicum.models.stored_tensor import check_stored
from modicum.models.tensor_pieces import TensorPiece, read_pieces
from modicum.models.transformers.buffers import stored_buffers
from modicum.models.transformers.followed import Following
from modicum.models.transformers.model import TransformersModel
from modicum.models.transformers.private import may_be_left, may_be_missing

# What old files hold in addition: tables that are computed, and masks.
_COMPUTED = re.compile(
    r"(rotary_emb\.inv_freq|\.attn\.(masked_)?bias|\.attention\.(masked_)?bias)$"
)
_CODES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _CODES.items()}


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor of a model that is made of several of its files, or of a part of one.

    Args:
        file: of the first of them.
        dtype: in the format's own names (F32, BF16...).
        shape: of what is made.
        bytes: of what is made.
        parts: the files' tensors, with the rule's pattern that each fits.
        make: makes the tensor of the parts' values.
        pieces: what of the parts stands where; None: only `make` knows.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    parts: tuple[tuple[str, TensorEntry], ...]
    make: Callable[[list[Tensor]], Tensor]
    pieces: tuple[TensorPiece, ...] | None = None

    def read(self, before: int = 0, rows: int | None = None) -> Tensor:
        """The tensor, on the CPU, or `rows` of its rows after the first `before`."""
        end = self.shape[0] if rows is None else min(before + rows, self.shape[0])
        if self.pieces is None:
            return self.make([read_tensor(entry) for _, entry in self.parts])[before:end]
        made = torch.empty((max(0, end - before), *self.shape[1:]), dtype=_CODES[self.dtype])
        self.read_into(made, before)
        return made

    def read_into(self, target: Tensor, before: int = 0) -> None:
        """Copy the tensor into `target`, or those of its rows that `target` has.

        Args:
            before: how many rows of the tensor are before those.
        """
        if self.pieces is None:
            target.copy_(self.read(before, target.shape[0]))
        else:
            read_pieces([entry for _, entry in self.parts], self.pieces, target, before)


Placed = dict[str, TensorEntry | ConvertedTensor]


class Heads(Protocol):
    """What of a model may be other than its files have it: what stands on the blocks."""

    def begins(self, name: str) -> bool:
        """Whether a parameter need not be in the files."""

    def replaced(self, name: str) -> bool:
        """Whether a parameter begins anew, whatever files hold of it."""

    def may_be_left(self, name: str) -> bool:
        """Whether a tensor of the files, by its name here, is of a head for something else."""


def placed(
    model: TransformersModel,
    found: Mapping[str, TensorEntry],
    folder: Path,
    heads: Heads | None = None,
) -> Placed:
    """For each parameter and stored buffer of a model, where its numbers are.

    Args:
        model: with dense layers; it may be without memory.
        found: the tensors of the folder's files.
        heads: what may be missing, and what may be left; None: nothing.

    Raises:
        InputError: a tensor is missing, has no place, or is of the wrong shape or type.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    rules = get_model_conversion_mapping(cast(Any, model))
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    wanted = model.state_dict()
    # Buffers that are computed now, and that old files hold, such as BERT's position_ids.
    computed = dict(model.named_buffers())
    made: Placed = {}
    groups: dict[str, list[tuple[str, str, TensorEntry]]] = {}
    for name, entry in _in_order(found):
        target, pattern = _renamed(model, name, renamings, converters, {**computed, **wanted})
        if heads is not None and (heads.replaced(target) or heads.may_be_left(target)):
            continue
        if pattern is not None and target in wanted:
            groups.setdefault(target, []).append((pattern, name, entry))
        elif target in wanted:
            made[target] = entry
        elif not (target in computed or _COMPUTED.search(target) or may_be_left(model, target)):
            raise InputError("the model has no place for this tensor", file=entry.file, field=name)
    for target, group in groups.items():
        made |= _converted(model, by_pattern[group[0][0]], target, group)
    return _checked(model, made, wanted, folder, heads)


def _in_order(found: Mapping[str, TensorEntry]) -> Iterable[tuple[str, TensorEntry]]:
    """As transformers takes them: experts by number, not as texts."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(found.items(), key=lambda pair: dot_natural_key(pair[0]))


def _renamed(
    model: Any, name: str, renamings: Any, converters: Any, wanted: Mapping[str, Any]
) -> tuple[str, str | None]:
    from transformers.core_model_loading import rename_source_key

    prefix = model.base_model_prefix
    target, pattern = rename_source_key(name, renamings, converters, prefix, dict(wanted))
    if target not in wanted and name in wanted:
        return name, None
    return target, pattern


def _converted(
    model: Any, rule: Any, target: str, group: list[tuple[str, str, TensorEntry]]
) -> Placed:
    """What a rule makes of a group of tensors, found out on tensors without memory."""
    parts = tuple((pattern, entry) for pattern, _, entry in group)
    unlike = [entry.dtype for _, entry in parts if entry.dtype not in _CODES]
    dtypes = [_CODES.get(entry.dtype, torch.float32) for _, entry in parts]
    empty = [
        torch.empty(entry.shape, dtype=dtype, device="meta")
        for (_, entry), dtype in zip(parts, dtypes, strict=True)
    ]

    def run(values: list[Tensor]) -> dict[str, Tensor]:
        own = copy.deepcopy(rule)
        for (pattern, name, _), value in zip(group, values, strict=True):
            own.add_tensor(target, name, pattern, value)
        found = own.convert(target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}

    with Following(empty) as following:
        found = run(empty)
    made: Placed = {}
    for name, value in found.items():
        make = lambda values, name=name: run(values)[name]  # noqa: E731
        dtype = unlike[0] if unlike else _NAMES[value.dtype]
        made[name] = ConvertedTensor(
            parts[0][1].file,
            dtype,
            tuple(value.shape),
            value.numel() * value.dtype.itemsize,
            parts,
            make,
            None if unlike else following.pieces(value),
        )
    return made


def _checked(
    model: TransformersModel,
    made: Placed,
    wanted: Mapping[str, Tensor],
    folder: Path,
    heads: Heads | None,
) -> Placed:
    """The same, each shared parameter under its first name, and nothing missing."""
    first = {id(tensor): name for name, tensor in reversed(list(model.named_parameters()))}
    kept: Placed = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if name in made:
            known = kept.get(first[id(tensor)])
            kept[first[id(tensor)]] = made[name] if known is None else _both(known, made[name])
    buffers = stored_buffers(model)
    kept |= {name: made[name] for name in buffers if name in made}
    for name in [*first.values(), *buffers]:
        if name in kept:
            integers = not wanted[name].is_floating_point()
            check_stored(name, kept[name], tuple(wanted[name].shape), integers=integers)
        elif heads is not None and heads.begins(name):
            continue
        elif name not in buffers or not may_be_missing(model, name):
            raise InputError(
                "the weights lack a tensor that config.json calls for",
                file=folder,
                field=name,
                candidates=made,
                word=name,
            )
    return kept


def _both(one: TensorEntry | ConvertedTensor, other: TensorEntry | ConvertedTensor) -> Any:
    """A tensor that two layers share, where a file holds it twice."""
    if not (isinstance(one, TensorEntry) and isinstance(other, TensorEntry)):
        return one

    def make(values: list[Tensor]) -> Tensor:
        if not torch.equal(*values):
            raise InputError(
                f"by config.json it is {one.name} too, and the weights differ; set "
                "tie_word_embeddings to false there",
                file=other.file,
                field=other.name,
            )
        return values[0]

    parts = (("", one), ("", other))
    return ConvertedTensor(one.file, one.dtype, one.shape, one.bytes, parts, make)
