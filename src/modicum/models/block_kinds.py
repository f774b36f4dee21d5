"""Which blocks of a model are alike: of each kind a few are looked at, and count for all.

A model is made shorter for that: its lists of blocks hold the first one, one of each kind between,
and the last one. What stands outside of blocks stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from modicum.core.layers.plain_layers import plain_type
from modicum.core.layers.wiring import BlockWires

_PREFIX = 8  # blocks at a list's begin that may stay, so that each has the number that it had
_NUMBERS = ("idx", "index", "layer_id", "layer_number")
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True)
class BlockList:
    """A list of a model's blocks and the few of them that count for all.

    Args:
        name: the list's, in the model.
        kept: of those that stay, how many each counts for, by its number; in order.
    """

    name: str
    kept: dict[int, int]

    def full_name(self, number: int) -> str:
        """A block's name in the model."""
        return f"{self.name}.{number}".lstrip(".")


def block_lists(model: nn.Module, blocks: Iterable[nn.Module] = ()) -> list[BlockList]:
    """The outermost lists of a model's blocks, and of each the blocks that count for all.

    Args:
        blocks: those of the model's own list, where it says which they are.

    >>> layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(9))
    >>> block_lists(nn.ModuleDict({"layers": layers}))[0].kept
    {0: 1, 1: 7, 2: 1}
    """
    found: list[tuple[str, nn.Module]] = []
    wanted = {id(block) for block in blocks}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") or not other for other, _ in found)
        if inside or not len(module._modules):
            continue
        own = wanted and {id(child) for child in module.children()} == wanted
        if own or (not wanted and isinstance(module, nn.ModuleList)):
            found.append((name, module))
    return [BlockList(name, _kept(_kinds(model, name, module))) for name, module in found]


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
        kinds.append((before, _kind(module._modules[own])))
        before |= learns[own]
    return kinds


def _kind(block: nn.Module | None) -> Any:
    if block is None:
        return None
    layers = tuple(
        (name, plain_type(layer).__qualname__, _settings(layer))
        for name, layer in block.named_modules()
    )
    tensors = tuple(
        (name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    )
    return layers, tensors


def _settings(layer: nn.Module) -> tuple[Any, ...]:
    """Plain values among a layer's attributes, but for its number."""
    return tuple(
        (name, value)
        for name, value in sorted(vars(layer).items())
        if _is_plain(value) and not name.startswith("_") and not name.endswith(_NUMBERS)
    )


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or isinstance(value, BlockWires)
