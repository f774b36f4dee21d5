"""Base parameters of which an adapter has copies, trained in full: norms, biases, heads.

The base keeps its own ones, frozen. A module computes with the copies as long as their adapter is
active, so they are switched, merged, saved and detached with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from modicum.adapters.base_weights import is_plain
from modicum.adapters.names import plain_name
from modicum.core.contracts.parameters import describe_parameter, metadata
from modicum.core.errors import InputError
from modicum.core.layers.plain_layers import plain_type, why_not_plain
from modicum.core.layers.targets import named, output_head, trained_heads

Copied = Mapping[str, tuple[str, ...]]


def copied(model: nn.Module, patterns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By module, the names in it of the parameters that `patterns` choose.

    A pattern is a full name, last parts, or a pattern of names: of parameters, or of modules, which
    mean all that they hold. The heads that a model has trained in full next to any adapter are
    always among them.

    Raises:
        InputError: a pattern matches nothing; or a parameter of which a copy could have no effect,
            or another one.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    >>> copied(model, ["bias"])
    {'0': ('bias',), '1': ('bias',)}
    """
    names = [
        f"{path}.{leaf}".lstrip(".")
        for path, module in model.named_modules()
        if "layers_by_adapter" not in path.split(".")
        for leaf, _ in module.named_parameters(recurse=False)
    ]
    chosen: set[str] = set()
    heads = [name for name in trained_heads(model) if not name.endswith("*")]
    for pattern in (*patterns, *heads):
        matched = _matched(pattern, names)
        if not matched and pattern in patterns:
            last = sorted({part for name in names for part in name.rsplit(".", 2)[-2:]})
            raise InputError(
                "no parameter or module of the model has this name",
                field="also",
                value=pattern,
                candidates=last,
            )
        chosen |= matched
    found: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name in chosen:
            path, _, leaf = name.rpartition(".")
            found[path] = (*found.get(path, ()), leaf)
    for path, leaves in found.items():
        _check(model, path, leaves)
    return found


def parameter_names(found: Copied) -> tuple[str, ...]:
    """The plain full names of copied parameters.

    >>> parameter_names({"norm": ("weight", "bias")})
    ('norm.weight', 'norm.bias')
    """
    return tuple(plain_name(f"{path}.{leaf}") for path, leaves in found.items() for leaf in leaves)


def not_copied(left_out: Mapping[str, str], found: Copied) -> dict[str, str]:
    """Of layers and matrices that `targets` leave out, by name, those that have no copy either.

    >>> not_copied({"0": "it is parametrized", "1.stack": "a matrix"}, {"1": ("stack",)})
    {'0': 'it is parametrized'}
    """
    copies = {f"{path}.{leaf}" for path, leaves in found.items() for leaf in leaves}
    return {n: why for n, why in left_out.items() if not copies & {n, f"{n}.weight"}}


def complete(model: nn.Module, found: Copied) -> dict[str, nn.Module] | None:
    """The outermost modules of which all parameters are copied; None: some are in none of these.

    >>> model = nn.ModuleDict({"head": nn.Sequential(nn.Linear(2, 2)), "body": nn.Linear(2, 2)})
    >>> list(complete(model, {"head.0": ("weight", "bias")}))
    ['head']
    >>> complete(model, {"body": ("bias",)})
    """
    left = {f"{path}.{leaf}" for path, leaves in found.items() for leaf in leaves}
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        own = {f"{path}.{n}" for n, _ in module.named_parameters() if "layers_by_adapter" not in n}
        if path and own and own <= left:
            modules[path] = module
            left -= own
    return None if left else modules


def _matched(pattern: str, names: Iterable[str]) -> set[str]:
    """The parameters that a pattern means; one that is a full name means that alone."""
    plain = {name: plain_name(name) for name in names}
    exact = {n for n, own in plain.items() if own == pattern or own.startswith(f"{pattern}.")}
    if exact:
        return exact
    found = set()
    for name, own in plain.items():
        parts = own.split(".")
        prefixes = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        if any(named(prefix, [pattern]) for prefix in prefixes):
            found.add(name)
    return found


def _check(model: nn.Module, path: str, leaves: Sequence[str]) -> None:
    """Make sure that copies of these parameters of a module are what it would compute with.

    Raises:
        InputError: they are not, or another module would keep the original.
    """
    module = model.get_submodule(path)
    why = why_not_plain(model, path, plain_type(module)) if path else "the model itself holds it"
    if why is None and any(map(_makes_weights, module._forward_pre_hooks.values())):
        why = "a hook makes its weight of other parameters (weight_norm, pruning)"
    if why is None and hasattr(module, "_flat_weights"):
        why = f"{type(module).__name__} computes with a list of its own of them"
    if why is None and set(leaves) != {"bias"} and not is_plain(module):
        why = "its weight is held in a form that is not trained"
    for leaf in leaves:
        parameter = module.get_parameter(leaf)
        if others := _other_users(model, module, parameter):
            why = why or f"it is shared with {others[0]}, which would keep the original"
        if not parameter.is_floating_point():
            why = why or f"it is {str(parameter.dtype).removeprefix('torch.')}"
        if why is not None:
            problem = f"{why}, so an adapter cannot train a copy of it; leave it out of `also`"
            raise InputError(problem, field="also", value=f"{path}.{leaf}".lstrip("."))


def _other_users(model: nn.Module, module: nn.Module, parameter: nn.Parameter) -> list[str]:
    """The names that a parameter has in other modules."""
    return [
        f"{path}.{leaf}".lstrip(".")
        for path, other in model.named_modules()
        for leaf, known in other._parameters.items()
        if known is parameter and other is not module
    ]


def _makes_weights(hook: object) -> bool:
    """Whether a hook is one of those that set a weight before each forward pass."""
    return hasattr(hook, "compute_weight") or hasattr(hook, "apply_mask")


def empty_copy(model: nn.Module, path: str, leaf: str) -> nn.Parameter:
    """Memory for a copy of a parameter: at least fp32, sharded and described as that is."""
    module = model.get_submodule(path)
    there = module.get_parameter(leaf)
    head, known = output_head(model), metadata(there)
    said = known.parameter_class
    if there.ndim > 1 and isinstance(module, nn.Embedding):
        said = "embedding"
    elif there.ndim > 1 and head is not None and module is head[1]:
        said = "head"
    dtype = torch.promote_types(there.dtype, torch.float32)
    return describe_parameter(
        nn.Parameter(torch.empty_like(there.detach(), dtype=dtype)),
        replace(known, parameter_class=said),
    )
