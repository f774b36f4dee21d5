"""What adapters froze: each of them notes it, and it is trained again when no other needs it so.

A note is in the `__dict__` of the module that an adapter is attached to, a model or a part of one,
and has plain names of parameters, which FSDP2 and others may replace in between. What was frozen
before is in no note, and stays frozen.

A part does not see the model around it. So an adapter on a model takes over the notes of those on
its parts; when it is detached before them, they get those names back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from modicum.adapters.factors import FrozenBuffers
from modicum.adapters.names import plain_model, plain_name

_FROZE = "_frozen_by_adapters"

# By an adapter's name, the parameters that are trained again without it.
Notes = dict[str, frozenset[str]]


def freeze(model: nn.Module, name: str) -> None:
    """Freeze all parameters; those that were trained are noted for the adapter `name`."""
    owners = [module for module in model.modules() if isinstance(module, FrozenBuffers)]
    own = {id(parameter) for owner in owners for parameter in owner.parameters()}
    named = model.named_parameters(remove_duplicate=False)
    froze = {plain_name(n) for n, p in named if p.requires_grad and id(p) not in own}
    for prefix, _, notes in _noted(model):
        for other, names in notes.items():
            froze |= {f"{prefix}{each}" for each in names}
            notes[other] = frozenset()
    plain_model(model).__dict__.setdefault(_FROZE, {})[name] = frozenset(froze)
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def thaw(model: nn.Module, name: str) -> None:
    """Train again what the adapter `name` of a model froze, but for what others need frozen.

    Those are all parameters of a module that another adapter is attached to. The weight of a layer
    that a merge made dense is trained if what the layer had before was.
    """
    notes: Notes = plain_model(model).__dict__.get(_FROZE, {})
    froze: set[str] = set(notes.pop(name, ()))
    if not notes:
        plain_model(model).__dict__.pop(_FROZE, None)
    if not froze:
        return
    named = [(plain_name(n), p) for n, p in model.named_parameters(remove_duplicate=False)]
    gone = froze - {each for each, _ in named}
    froze |= {f"{each.rpartition('.')[0]}.weight" for each in gone}
    tied = {id(parameter) for each, parameter in named if each in froze}
    froze |= {each for each, parameter in named if id(parameter) in tied}
    needed: set[int] = set()
    for prefix, module, notes in _noted(model):  # a module comes before its parts
        inside = {each for each in froze if each.startswith(prefix)}
        froze -= inside
        notes[next(iter(notes))] |= {each.removeprefix(prefix) for each in inside}
        needed |= {id(parameter) for parameter in module.parameters()}
    for each, parameter in named:
        if each in froze and id(parameter) not in needed:
            parameter.requires_grad_(True)


def of_others(model: nn.Module, name: str) -> set[nn.Module]:
    """All modules of those parts of a model to which an adapter of this name is attached too.

    What has the name there is that one's: it came later, and a part does not see the model's.
    """
    noted = [part for prefix, part, notes in _noted(model) if prefix and name in notes]
    return {module for part in noted for module in part.modules()}


def notes_of(model: nn.Module) -> list[tuple[nn.Module, Notes]]:
    """The notes of a model and its parts, which later ones do not change."""
    return [(module, dict(notes)) for _, module, notes in _noted(model)]


def put_notes(found: Iterable[tuple[nn.Module, Notes]]) -> None:
    """Put notes back that `notes_of` gave."""
    for module, notes in found:
        module.__dict__[_FROZE] = notes


def _noted(model: nn.Module) -> Iterator[tuple[str, nn.Module, Notes]]:
    """The modules with notes: what their parameters' names begin with, they, and the notes."""
    for path, module in model.named_modules():
        if notes := module.__dict__.get(_FROZE):
            plain = plain_name(path)
            yield (f"{plain}." if plain else ""), module, notes
