"""How the matrices of a mixture of experts lie in stacked tensors: claims by names and shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modicum.core.layers.map_calls import Product
from modicum.core.layers.map_parts import MappedMlp, MappedSlice, Units, fitted

_NEEDED = "the router would give its tokens to other experts, which is not as if it were zero"
_DOWN = ("down", "w2", "output", "wo", "fc2")


@dataclass(frozen=True)
class StackedExperts:
    """A claim: the MLP, and the slices of the tensors that read and make the stream."""

    mlp: MappedMlp
    given: tuple[MappedSlice, ...]
    made: tuple[MappedSlice, ...]


def experts_of(model: nn.Module, name: str, width: int) -> Iterator[StackedExperts]:
    """The claims that names and shapes allow, the likeliest first.

    Tensors are [experts, out, in] or [experts, in, out]; two of gate and up may be one, one after
    the other or in turns; biases are [experts, out].
    """
    module = model.get_submodule(name)
    stacked = {n: p.shape for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
    biases = {n: p.shape for n, p in module.named_parameters(recurse=False) if p.ndim == 2}
    downs = sorted(stacked, key=lambda n: not any(word in n for word in _DOWN))
    for down in downs:
        ups = [n for n in stacked if n != down]
        if len(ups) not in (1, 2):
            return
        for in_dim in (2, 1):  # of `down`; the others lie the other way round
            out_dim = 3 - in_dim
            neurons = stacked[down][in_dim]
            fits = stacked[down][out_dim] == width and all(
                stacked[up][in_dim] == width and stacked[up][out_dim] in (neurons, 2 * neurons)
                for up in ups
            )
            if fits:
                yield from _claims(name, stacked, biases, down, ups, in_dim)


def _claims(
    name: str,
    stacked: dict[str, torch.Size],
    biases: dict[str, torch.Size],
    down: str,
    ups: list[str],
    in_dim: int,
) -> Iterator[StackedExperts]:
    out_dim, neurons = 3 - in_dim, stacked[down][in_dim]
    width, experts = stacked[down][out_dim], stacked[down][0]
    column = torch.arange(neurons)[:, None]
    layouts: list[tuple[Tensor, Tensor | None]] = [(column, None)]
    if len(ups) == 1 and stacked[ups[0]][out_dim] == 2 * neurons:
        layouts = [(column + neurons, column), (2 * column + 1, 2 * column)]
    for up_places, gate_places in layouts:
        sides = [(ups[-1], up_places)]
        if gate_places is not None:
            sides.append((ups[0], gate_places))
        elif len(ups) == 2:
            gate = min(ups, key=lambda n: "gate" not in n and "w1" not in n)
            sides = [(next(n for n in ups if n != gate), column), (gate, column)]
        slices = []
        for tensor, places in sides:
            found = [fitted(f"{name}.{tensor}", out_dim, places)]
            found += [
                fitted(f"{name}.{bias}", 1, places) for bias in biases if bias.startswith(tensor)
            ]
            slices.append(tuple(s for s in found if s is not None))
        piece = MappedSlice(f"{name}.{down}", in_dim, 0, (neurons, 1), (1, 0))
        makers = tuple(s for side in slices for s in side)
        units = Units("neurons", name, neurons, makers, (piece,))
        mlp = MappedMlp(name, slices[0], slices[1] if len(slices) > 1 else (), piece, units,
                        experts=experts)  # fmt: skip
        stream = ((width, 1), (1, 0))
        given = tuple(MappedSlice(f"{name}.{up}", in_dim, 0, *stream) for up in ups)
        made = [MappedSlice(f"{name}.{down}", out_dim, 0, *stream)]
        made += [MappedSlice(f"{name}.{b}", 1, 0, *stream) for b in biases if b.startswith(down)]
        yield StackedExperts(mlp, given, tuple(made))


def stacked_units(model: nn.Module, mlp: MappedMlp, products: Iterable[Product]) -> Units | str:
    """The claim that experts can be exchanged with their router's rows, or why there is none.

    The router is the one linear layer next to the experts that makes a number for each of them.
    What else has one number for each there, such as a bias that balances them, moves with it.
    """
    around = mlp.name.rpartition(".")[0]
    prefix = f"{around}." if around else ""
    routers = [
        p for p in products
        if p.weight.startswith(prefix) and not p.weight.startswith(f"{mlp.name}.")
        and p.origin.size == mlp.experts
    ]  # fmt: skip
    if len({p.weight for p in routers}) != 1:
        return "its router is not known: one linear layer next to it with a row for each expert"

    def all_of(tensor: str, dim: int, places: Tensor) -> MappedSlice | None:
        return fitted(tensor, dim, places[:, None])

    each, router = torch.arange(mlp.experts), routers[0]
    module = model.get_submodule(around)
    named = [*module.named_parameters(prefix=around), *module.named_buffers(prefix=around)]
    own = {name: tensor.shape for name, tensor in named}
    inside = [name for name in own if name.startswith(f"{mlp.name}.")]
    numbers = [n for n, shape in own.items() if n not in inside and shape == (mlp.experts,)]
    rows = all_of(router.weight, router.out_dim, router.out_places)
    down = mlp.down.tensor
    readers = [all_of(name, 0, each) for name in inside if name.startswith(down)]
    makers = [all_of(name, 0, each) for name in inside if not name.startswith(down)]
    makers += [rows, *(all_of(name, 0, each) for name in numbers)]
    if rows is None:
        return f"its places in {router.weight} are no regular grid"
    return Units(
        "experts", around, mlp.experts, tuple(s for s in makers if s is not None),
        tuple(s for s in readers if s is not None), needed=_NEEDED,
    )  # fmt: skip
