"""How names choose layers of a model: full names, last parts, patterns, `all-linear`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from modicum.core.errors import InputError
from modicum.core.layers.loose_matrices import EXPERTS, stacked_experts

ALL_LINEAR = "all-linear"
_NAMED = 3


def named(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of these is the name, its last parts, or a pattern of it.

    >>> named("layers.0.q_proj", ["q_proj"]), named("layers.0.q_proj", ["layers.1.*"])
    (True, False)
    """
    return any(name == p or name.endswith(f".{p}") or fnmatchcase(name, p) for p in patterns)


def output_head(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The layer that makes logits, with its name: what the model says, else one named lm_head.

    >>> output_head(nn.ModuleDict({"lm_head": nn.Linear(2, 3)}))[0]
    'lm_head'
    """
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    for name, module in model.named_modules():
        if module is head if head is not None else name.rsplit(".", 1)[-1] == "lm_head":
            return name, module
    return None


def trained_heads(model: nn.Module) -> list[str]:
    """Patterns of names in modules that a model has trained in full next to adapters.

    No layer in these takes factors or another form.
    """
    heads = getattr(model, "trained_heads", ())
    return [pattern for name in heads for pattern in (name, f"{name}.*")]


def choose(
    model: nn.Module,
    layers: Sequence[str],
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    *,
    linear: Collection[str],
    kind: str = "layer",
    refused: Mapping[str, str] | None = None,
) -> list[str]:
    """The names that `targets` choose, in the order of `layers`.

    Args:
        layers: names of the layers that can be chosen.
        linear: those that `all-linear` means, but for the output head, as in PEFT.
        kind: what they are, for messages.
        refused: layers that cannot be chosen, with the reason, for messages.

    Raises:
        InputError: a target matches no layer, or all that are chosen are excluded.
    """
    layers = [name for name in layers if not named(name, trained_heads(model))]
    linear = [name for name in linear if not named(name, trained_heads(model))]
    head = output_head(model)
    everything = set(linear) - ({head[0]} if head else set())
    chosen: set[str] = set()
    for target in targets:
        matched = everything if target == ALL_LINEAR else {n for n in layers if named(n, [target])}
        if not matched:
            raise _no_match(model, layers, target, kind, refused or {})
        chosen |= matched
    if ALL_LINEAR in exclude:
        chosen -= set(linear)
    kept = [name for name in layers if name in chosen and not named(name, exclude)]
    if not kept:
        raise InputError("every layer that `targets` names is excluded again", field="exclude")
    return kept


def _no_match(
    model: nn.Module, layers: Sequence[str], target: str, kind: str, refused: Mapping[str, str]
) -> InputError:
    """That a target matches no layer, with what it names instead, or why there is none."""
    if target == ALL_LINEAR:
        sought = kind if "linear" in kind else f"linear {kind}"
        reasons = "; ".join([*dict.fromkeys(refused.values())][:_NAMED])
        problem = f"the model has no {sought} to choose{': ' if reasons else ''}{reasons}"
        return InputError(problem, field="targets")
    names = [ALL_LINEAR, *sorted({name.rsplit(".", 1)[-1] for name in layers})]
    allowed = ", ".join(names)
    if experts := _experts_named(model, target):
        more = f" and {len(experts) - _NAMED} more" if len(experts) > _NAMED else ""
        problem = f"names {EXPERTS}: {', '.join(experts[:_NAMED])}{more}"
        return InputError(problem, field="targets", value=target, allowed=allowed)
    found = ""
    for name, module in model.named_modules():
        if name and named(name, [target]):
            found = f"; {refused.get(name, f'it is a {type(module).__name__}')}"
            break
    return InputError(
        f"no {kind} of the model has this name{found}",
        field="targets",
        value=target,
        allowed=allowed,
        candidates=names,
    )


def _experts_named(model: nn.Module, target: str) -> list[str]:
    """The stacked matrices of experts that a target names: by theirs, or by a name above it."""
    stacked = stacked_experts(model)
    if themselves := [name for name in stacked if named(name, [target])]:
        return themselves
    parts = target.split(".")
    above = [
        ".".join(parts[:depth])
        for depth in range(1, len(parts))
        if not set("*?[") & set(parts[depth - 1])
    ]
    return [name for name in stacked if named(name.rpartition(".")[0], [target, *above])]
