"""Where a model's blocks are and which are alike: of each kind a few are looked at, for all.

A model is made shorter for that: its lists of blocks hold a few of them. What stands outside of
blocks stays as it is. A ledger keeps the first block, one of each kind between, and the last; a map
keeps blocks of each kind with the neighbours that they have in the model.

Blocks are alike where their modules, the plain values that these hold, and the shapes, dtypes and
names of their tensors are. A block that looks at its own number alone counts as the others do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from modicum.core.layers.plain_layers import plain_type
from modicum.core.layers.wiring import BlockWires

_PREFIX = 8  # blocks at a list's begin that may stay, so that each has the number that it had
_NUMBERS = ("idx", "index", "layer_id", "layer_number")
_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType, torch.dtype)


@dataclass(frozen=True)
class BlockList:
    """A list of a model's blocks and the few of them that count for all.

    Args:
        name: the list's, in the model.
        kept: of those that stay, how many each counts for, by its number; in order.
        like: for each block of the model, the place among those that stay of the one that is like
            it and has neighbours like its own; empty where neighbours were not looked at.
    """

    name: str
    kept: dict[int, int]
    like: tuple[int, ...] = ()

    def full_name(self, number: int) -> str:
        """A block's name in the model."""
        return f"{self.name}.{number}".lstrip(".")

    def of_all(self, model: nn.Module) -> BlockList:
        """The list of which all blocks stay."""
        count = len(model.get_submodule(self.name)._modules)
        return BlockList(self.name, dict.fromkeys(range(count), 1))


def block_lists(model: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[BlockList]:
    """The outermost lists of a model's blocks, and of each the blocks that count for all.

    Args:
        blocks: those of the model's own list, where it says which they are.

    >>> layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    >>> block_lists(nn.ModuleDict({"layers": layers}))[0].kept
    {0: 1, 1: 7, 2: 1}
    """
    lists = outermost_lists(model, blocks)
    return [
        _alike(name, _kinds(model, name, module), module)
        for name, module in lists.items()
        if blocks or isinstance(module, nn.ModuleList)
    ]


def _alike(name: str, kinds: list[Any], module: nn.Module) -> BlockList:
    """The few of a list's blocks that count for all."""
    kept = _kept(kinds)
    wires = (getattr(block, "wires", None) for block in module.children())
    several = any(isinstance(each, BlockWires) and each.several for each in wires)
    # As many streams must go out of a block as the next one takes.
    if several and not {*pairwise(kinds[number] for number in kept)} <= {*pairwise(kinds)}:
        kept = dict.fromkeys(range(len(kinds)), 1)
    return BlockList(name, kept)


def outermost_lists(model: nn.Module, blocks: Iterable[nn.Module] = ()) -> dict[str, nn.Module]:
    """What holds a model's blocks, by name: lists of modules that lie in no other such list.

    That is a `ModuleList`, or a `Sequential` of several modules of the same class that have
    modules of their own.

    Args:
        blocks: those of the model's own list, where it says which they are: then that list alone.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> list(outermost_lists(nn.ModuleDict({"body": nn.Sequential(block(), block())})))
    ['body']
    """
    found: dict[str, nn.Module] = {}
    wanted = {id(block) for block in blocks}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") or not other for other in found)
        if inside or not len(module._modules):
            continue
        own = wanted and {id(child) for child in module.children()} == wanted
        if own or (not wanted and _is_list(module)):
            found[name] = module
    return found


def _is_list(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return True
    children = list(module.children())
    alike = len({plain_type(child) for child in children}) == 1 < len(children)
    return isinstance(module, nn.Sequential) and alike and all(len(c._modules) for c in children)


def lists_with_neighbours(model: nn.Module) -> list[BlockList]:
    """The model's lists, and of each as few blocks as have all kinds of neighbourhoods in order.

    A block that shares a tensor with another, or with what is outside, is like no other.

    >>> layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    >>> (found,) = lists_with_neighbours(nn.ModuleDict({"layers": layers}))
    >>> list(found.kept), found.like
    ([0, 1, 8], (0, 1, 1, 1, 1, 1, 1, 1, 2))
    """
    users = Counter(
        id(tensor)
        for _, module in model.named_modules(remove_duplicate=False)
        for tensor in module._parameters.values()
        if tensor is not None
    )
    found = []
    for name, module in outermost_lists(model).items():
        numbers: dict[Any, int] = {}  # of kinds, which are long
        kinds = []
        for place, block in enumerate(module._modules.values()):
            own = Counter(
                id(tensor)
                for _, layer in (
                    [] if block is None else block.named_modules(remove_duplicate=False)
                )
                for tensor in layer._parameters.values()
                if tensor is not None
            )
            shared = any(users[tensor] != count for tensor, count in own.items())
            kind = place if shared or block is None else block_kind(block)
            kinds.append(numbers.setdefault(kind, len(numbers)))
        found.append(_with_neighbours(name, kinds))
    return found


def _with_neighbours(name: str, kinds: list[int]) -> BlockList:
    kept = _short_walk(kinds)
    around = _neighbourhoods([kinds[number] for number in kept])
    like = tuple(around.index(each) for each in _neighbourhoods(kinds))
    return BlockList(name, {n: like.count(place) for place, n in enumerate(kept)}, like)


def _neighbourhoods(kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """For each block the kind before, its own, and the kind after; -1 at the ends."""
    return list(zip([-1, *kinds[:-1]], kinds, [*kinds[1:], -1], strict=True))


def _short_walk(kinds: Sequence[int]) -> list[int]:
    """Numbers of blocks: loops are left out, long and late ones first, if no neighbourhood is lost.

    >>> _short_walk([0, 0, 0, 0, 0]), _short_walk([0, 1, 0, 1, 0, 1, 0, 1])
    ([0, 1, 4], [0, 1, 2, 7])
    """
    wanted = set(_neighbourhoods(kinds))
    kept = list(range(len(kinds)))
    length = len(kept) - 1
    while length > 0:
        here = [kinds[number] for number in kept]
        for first in range(len(kept) - 1 - length, -1, -1):
            last = first + length
            shorter = kept[: first + 1] + kept[last + 1 :]
            alike = here[first : first + 2] == here[last : last + 2]
            if alike and set(_neighbourhoods([kinds[n] for n in shorter])) == wanted:
                kept = shorter
                break
        else:
            length -= 1
        length = min(length, len(kept) - 1)
    return kept


@contextmanager
def shortened(model: nn.Module, lists: Sequence[BlockList]) -> Iterator[list[dict[str, nn.Module]]]:
    """The model with the kept blocks alone, given by their full names, list by list."""
    with ExitStack() as stack:
        yield [stack.enter_context(_shortened(model.get_submodule(e.name), e)) for e in lists]


@contextmanager
def _shortened(module: nn.Module, blocks: BlockList) -> Iterator[dict[str, nn.Module]]:
    before = dict(module._modules)
    every = list(before.items())
    kept = {number: every[number] for number in blocks.kept}
    module._modules.clear()
    for place, (_, block) in enumerate(kept.values()):
        # A list counts its modules; names of others may be read.
        own = str(place) if isinstance(module, nn.ModuleList) else every[place][0]
        module._modules[own] = block
    try:
        yield {blocks.full_name(n): block for n, (_, block) in kept.items() if block is not None}
    finally:
        module._modules.clear()
        module._modules.update(before)


def _kept(kinds: list[Any]) -> dict[int, int]:
    """Numbers of the blocks that stay, each with how many blocks it counts for.

    >>> _kept(["a", "b", "a", "b", "a", "b"])
    {0: 1, 1: 2, 2: 2, 3: 1}
    """
    count = len(kinds)
    if count < 4:
        return dict.fromkeys(range(count), 1)
    between = kinds[1:-1]
    for length in range(3, min(count, _PREFIX)):
        # As many as the begin of the list has in the same order: numbers stay what they were.
        if set(kinds[1 : length - 1]) == set(between) and kinds[length - 1] == kinds[-1]:
            chosen = [*range(1, length - 1)]
            last = length - 1
            break
    else:
        chosen = sorted(kinds.index(kind, 1) for kind in set(between))
        last = count - 1
    kept: dict[int, int] = {0: 1}
    for number in chosen:
        alike = [n for n in chosen if kinds[n] == kinds[number]]
        share, rest = divmod(between.count(kinds[number]), len(alike))
        kept[number] = share + (rest if number == alike[0] else 0)
    return kept | {last: 1}


def _kinds(model: nn.Module, name: str, module: nn.Module) -> list[Any]:
    """What tells the blocks of a list apart, one value each."""
    prefix = f"{name}." if name else ""
    names = [*module._modules]
    learns = dict.fromkeys(names, False)
    before = False  # whether something before the list's first block learns
    seen = False
    for parameter, value in model.named_parameters():
        inside = parameter.startswith(prefix)
        seen |= inside
        if inside:
            learns[parameter[len(prefix) :].partition(".")[0]] |= value.requires_grad
        elif not seen:
            before |= value.requires_grad
    kinds = []
    for own in names:
        kinds.append((before, block_kind(module._modules[own])))
        before |= learns[own]
    return kinds


def block_kind(block: nn.Module | None) -> Any:
    """What alike blocks have in common, of which numbers are no part.

    >>> one, other = nn.Dropout(0.1), nn.Dropout(0.2)
    >>> block_kind(one) == block_kind(one), block_kind(one) == block_kind(other)
    (True, False)
    """
    if block is None:
        return None
    layers = tuple(
        (name, plain_type(layer).__qualname__, _settings(layer), _hooks(layer))
        for name, layer in block.named_modules()
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    return layers, tensors


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """Plain values and functions among a layer's attributes, but for its number."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(layer).items())
        if not name.startswith("_") and not name.endswith(_NUMBERS) and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    if type(value) is tuple:
        return all(_is_plain(each) for each in value)
    return type(value) in _PLAIN or isinstance(value, BlockWires)


def _hooks(layer: nn.Module) -> tuple[int, int]:
    return len(layer._forward_pre_hooks), len(layer._forward_hooks)
