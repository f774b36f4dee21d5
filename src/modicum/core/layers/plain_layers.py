"""Which layers compute what their type says, from a weight that is theirs to read and to change.

A layer that does not is left out or refused by those who would add to it or replace it: a
subclass with a forward of its own, a weight that a parametrization or a hook makes, a tensor of
another library's, a module above the layer that reads its weight and never calls it.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from modicum.core.ranks.sharding import is_sharded
from modicum.core.torch_private import COMPILED_NAME

_WITH_A_WEIGHT = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Asking a weight for these is no use of its values.
_ABOUT = {"dtype", "device", "shape", "ndim", "dim", "size", "numel", "element_size", "is_meta"}
_ABOUT |= {"requires_grad", "is_cuda", "is_cpu", "is_quantized", "data_ptr", "layout", "stride"}
# Modules that take the values only with this switched on.
_SWITCHES = {"BloomAttention": "slow_but_exact", "BloomMLP": "slow_but_exact"}


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class of a layer without the adapters that it may have."""
    found = getattr(type(module), "plain_type", type(module))
    assert isinstance(found, type)
    return found


def why_not_plain(model: nn.Module, name: str, kind: type[nn.Module]) -> str | None:
    """Why the layer `name` may compute something else than its `kind` does; None: it does not.

    A subclass counts as its kind where it leaves `forward` as it is.

    >>> model = nn.ModuleDict({"mixer": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 4)})
    >>> why_not_plain(model, "out", nn.Linear)
    >>> why_not_plain(model, "mixer.out_proj", nn.Linear)
    'MultiheadAttention uses its weight without calling the layer'
    """
    module = model.get_submodule(name)
    own = plain_type(module)
    if own.forward is not kind.forward:
        return f"{own.__name__} is a subclass of {kind.__name__} that computes in its own way"
    if is_parametrized(module):
        return "it is parametrized"
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, UninitializedParameter):
            return "it has no weight yet: run the model once, or give it its sizes"
        if type(parameter) is not nn.Parameter and not is_sharded(parameter):
            return f"its weight is a {type(parameter).__name__}, which another library reads"
    if kind in _WITH_A_WEIGHT:
        weight = module._parameters.get("weight")
        if weight is None:
            return "a hook makes its weight of other parameters (weight_norm, pruning)"
        if weight.dtype not in _DTYPES:
            return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return _why_not_called(model, name)


def _why_not_called(model: nn.Module, name: str) -> str | None:
    """Whether a module above the layer reads its weight: by that module's code, or as it says.

    One that has an attribute `weights_read`, names of layers below it, is believed.
    """
    path = name.split(".")
    for above in range(len(path)):
        module = model.get_submodule(".".join(path[:above]))
        kind = plain_type(module)
        switched_off = not getattr(module, _SWITCHES.get(kind.__name__, ""), True)
        told = getattr(module, "weights_read", None)
        inside = [part for part in path[above:] if part != COMPILED_NAME]
        reads = _reads(kind, tuple(inside)) if told is None else ".".join(inside) in told
        if reads and not switched_off:
            return f"{kind.__name__} uses its weight without calling the layer"
    return None


_read: dict[type[nn.Module], set[tuple[str, ...]]] = {}


def _reads(parent: type[nn.Module], path: tuple[str, ...]) -> bool:
    """Whether what `forward` of that class can reach takes the values of `self.<path>.weight`."""
    if parent not in _read:
        _read[parent] = set(_weights_read(parent))
    return path in _read[parent]


def _weights_read(kind: type[nn.Module]) -> Iterator[tuple[str, ...]]:
    """The paths p of all `self.p.weight` and `self.p.bias` whose values are taken."""
    todo, seen = ["forward"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for owner in kind.__mro__:
            function = owner.__dict__.get(name)
            if owner is nn.Module or not callable(function):
                continue
            function = inspect.unwrap(function)
            if isinstance(function, FunctionType):
                for code in _nested(function.__code__):
                    todo += [word for word in code.co_names if word not in seen]
                    yield from _paths(code)
            break


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _paths(code: CodeType) -> Iterator[tuple[str, ...]]:
    """Chains of attributes that end with a weight or a bias, without what they begin at."""
    chain: list[str] = []
    before: list[object] = []
    for instruction in [*dis.get_instructions(code), None]:
        if instruction and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain.append(str(instruction.argval))
            continue
        asked = before[-2:-1] == ["isinstance"]
        for place, word in enumerate(chain):
            about = asked or _ABOUT & set(chain[place + 1 :][:1])
            if word in ("weight", "bias") and place and not about:
                yield tuple(chain[:place])
        chain = []
        before.append(instruction.argval if instruction else None)
