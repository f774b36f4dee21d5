"""Smaller models of the same architecture: fewer blocks, fewer heads, fewer tokens, fewer experts.

What makes an architecture what it is stays: which kinds of blocks it has, groups of keys and
values, windows, scales; and widths of heads, where the model is small enough with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from modicum.core.errors import InputError
from modicum.models.transformers.kinds import described

# Within how many tokens all is alike: windows, chunks, tokens that are looked at, positions whose
# attention has one temperature. Fewer than a small model is tried with.
_WINDOW = 4
_WINDOWS = re.compile(
    r"(?!.*(layers|pattern)).*window|(index_topk|local_attention|attention_chunk_size)$|.*floor"
)
_CHUNK, _CHUNKS = 16, re.compile(r"(.*_)?chunk_size$")  # in which a scan computes
_TOKEN = re.compile(r".*_token_ids?$")
_BLOCKS, _WIDTH, _HEADS = "num_hidden_layers", "hidden_size", "num_attention_heads"
# How many of the blocks are so, and which of them.
_SOME_BLOCKS = re.compile(r"(num|n|max|first)_(.*_)?(layers|blocks)$|first_k_dense_replace$")
_WHICH_BLOCKS = re.compile(r".*(layer|idx)")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_LIKE_WIDTH = ("word_embed_proj_dim", "embedding_size", "d_model")
# Experts of a layer, their groups, and how many of them a token chooses.
_AT_MOST = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_num_experts", "n_group"), 2),
    **dict.fromkeys(("topk_group", "moe_k"), 1),
}
_GROUPS = ("num_key_value_heads", "num_kv_heads")
_EXPERT_INNER = ("moe_intermediate_size", "shared_expert_intermediate_size")
_WIDTHS = re.compile(
    r"(?!.*(vocab|window|chunk|kernel|conv|block|group|position|feed_forward))"
    r"(.*(size|dim|width|rank|inner|embd)(_|$)|(.*_)?d_)"
)
_LEAST = 4  # a width that is not made smaller
_MOST_BLOCKS = 8, 12  # where each kind is there once, or twice


@dataclass(frozen=True)
class Way:
    """How a model is made smaller.

    Args:
        narrow: whether blocks have fewer heads and experts, and inner widths in proportion.
        thinner: by which number all widths are divided.
        each: how many blocks of each kind there are.
    """

    narrow: bool
    thinner: int = 1
    each: int = 1


# The first that runs and is small is taken: it is most like the model.
WAYS = tuple(
    Way(narrow, thinner, each)
    for each in (1, 2)
    for narrow, thinner in (
        (True, 1), (True, 4), (True, 16), (False, 16), (False, 8), (False, 4), (False, 1),
    )
)  # fmt: skip


class _Fields:
    """The fields of a configuration, by the names that transformers has for all models."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        known = described(raw)
        self.raw, self.known = raw, known
        self.names: Mapping[str, str] = known.attribute_map
        self.values: dict[str, Any] = known.to_dict()
        if not _is_count(self.get(_BLOCKS)):
            raise InputError("its configuration does not say how many blocks there are")

    def get(self, name: str) -> Any:
        own = self.names.get(name, name)
        return self.values[own] if own in self.values else getattr(self.known, own, None)

    def set(self, name: str, value: Any) -> None:
        own = self.names.get(name, name)
        if not isinstance(getattr(type(self.known), own, None), property):  # which follows
            self.values[own] = value

    def written(self) -> dict[str, Any]:
        """The config.json."""
        return {**self.values, "model_type": self.raw["model_type"], "architectures": None}


def one_block(raw: Mapping[str, Any], vocabulary_size: int) -> dict[str, Any]:
    """The config.json of the model's first block alone, with so many tokens."""
    made = _Fields(raw)
    _fewer_blocks(made, 1)
    _fewer_tokens(made, vocabulary_size)
    return made.written()


def reduced(raw: Mapping[str, Any], tokens: int, way: Way) -> dict[str, Any]:
    """The config.json of a small model that has blocks of each kind of the given one.

    Args:
        tokens: in the vocabulary.
    """
    made = _Fields(raw)
    _fewer_blocks(made, _kinds(made, way.each))
    _fewer_tokens(made, tokens)
    for name, value in made.values.items():
        if _WINDOWS.match(name) and _is_count(value):
            made.values[name] = _WINDOW
        elif _CHUNKS.match(name) and _is_count(value):
            made.values[name] = min(value, _CHUNK)
    if way.narrow:
        _fewer_heads(made)
    if way.thinner > 1:
        _fewer_experts(made)
        made.values = _thinner(made.values, way.thinner)
    return made.written()


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _kinds(made: _Fields, each: int) -> int:
    """The fewest first blocks that have all kinds, as often as that or as often as there are."""
    count, most = made.get(_BLOCKS), _MOST_BLOCKS[each > 1]
    places: dict[tuple[str, ...], list[int]] = {}
    for place, kind in enumerate(zip(*_by_block(made), strict=True)):
        places.setdefault(tuple(map(str, kind)), []).append(place)
    wanted = max((found[:each][-1] + 1 for found in places.values()), default=1)
    return int(min(count, max(2, wanted), most))


def _by_block(made: _Fields) -> Iterator[list[Any]]:
    """What a configuration says of each block, one list after another."""
    count = made.get(_BLOCKS)
    properties = [name for name in dir(type(made.known)) if not name.startswith("_")]
    for name in dict.fromkeys([*made.values, *properties]):
        value: Any = made.values.get(name)
        if name not in made.values:
            with suppress(Exception):  # whatever a property says of other fields
                value = getattr(made.known, name)
        if isinstance(value, list) and len(value) == count:
            yield value
        elif _is_choice(name, value, count):
            yield [place in value for place in range(count)]
        elif _is_by_block(value):
            numbered = {int(place): each for place, each in value.items()}
            yield [numbered.get(place) for place in range(count)]


def _is_choice(name: str, value: object, count: int) -> bool:
    """Whether a field lists numbers of blocks."""
    if not isinstance(value, list) or not value or not _WHICH_BLOCKS.match(name):
        return False
    return all(type(each) is int and 0 <= each < count for each in value)


def _is_by_block(value: object) -> bool:
    """Whether a field says something of some blocks, by their numbers."""
    if not isinstance(value, dict) or not value:
        return False
    return all(str(k).isdecimal() and isinstance(each, dict) for k, each in value.items())


def _fewer_blocks(made: _Fields, count: int) -> None:
    before, own = made.get(_BLOCKS), made.names.get(_BLOCKS, _BLOCKS)
    for name, value in made.values.items():
        if isinstance(value, list) and len(value) == before:
            made.values[name] = value[:count]
        elif _is_choice(name, value, before):
            made.values[name] = [each for each in value if each < count]
        elif _is_by_block(value):
            made.values[name] = {k: each for k, each in value.items() if int(k) < count}
        elif name != own and _SOME_BLOCKS.match(name) and _is_count(value):
            # Blocks at the end share what others made; of those at the begin one stays.
            made.values[name] = max(int("shared" not in name), value * count // before)
    made.set(_BLOCKS, count)


def _fewer_tokens(made: _Fields, count: int) -> None:
    """Fewer tokens, the special ones among them."""
    before = made.get("vocab_size")
    for name, value in made.values.items():
        if name.startswith("vocab_size") and _is_count(value):
            made.values[name] = min(value, count)
        elif _TOKEN.match(name):
            every = value if isinstance(value, list) else [value]
            fewer = [min(each, count - 1) if _is_count(each) else each for each in every]
            made.values[name] = fewer if isinstance(value, list) else fewer[0]
    made.set("vocab_size", min(before, count))


def _fewer_heads(made: _Fields) -> None:
    heads, width = made.get(_HEADS), made.get(_WIDTH)
    if not heads:
        raise InputError("its configuration does not say how many heads there are")
    groups = next((n for name in _GROUPS if (n := made.get(name))), heads)
    fewer_groups = min(groups, 2)
    fewer = fewer_groups * min(heads // groups, 2)
    narrow = width // heads * fewer
    made.set(_HEADS, fewer)
    made.set(_WIDTH, narrow)
    for name in _GROUPS:
        if made.get(name):
            made.set(name, fewer_groups)
    for name in _INNER:
        value = made.get(name)
        if isinstance(value, list):
            made.set(name, [2 * narrow] * len(value))
        elif isinstance(value, int):
            made.set(name, 2 * narrow)
    for name in _LIKE_WIDTH:
        if made.get(name) == width:
            made.set(name, narrow)
    _fewer_experts(made)
    for name in _EXPERT_INNER:
        if isinstance(made.get(name), int):
            made.set(name, narrow)


def _fewer_experts(made: _Fields) -> None:
    for name, most in _AT_MOST.items():
        if isinstance(made.get(name), int):
            made.set(name, min(made.get(name), most))


def _thinner(value: Any, by: int, name: str = "") -> Any:
    """The same fields with widths divided, where that gives an integer that is not too small."""
    if isinstance(value, dict):
        return {key: _thinner(each, by, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_thinner(each, by, name) for each in value]
    divided = _WIDTHS.match(name) and _is_count(value) and value % by == 0 and value // by >= _LEAST
    return value // by if divided else value
