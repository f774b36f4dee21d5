"""What `targets` leave out of a model though it holds matrices, for all rooms, and in words."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from modicum.core.layers import targets as targeting
from modicum.core.layers.form_layer import FormLayer
from modicum.core.layers.layer_sites import Survey
from modicum.core.layers.loose_matrices import EXPERTS, loose_matrices

_NAMED = 5
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")  # of a block, in a name


def matrices_left_out(
    model: nn.Module,
    found: Survey,
    targets: Sequence[str],
    exclude: Sequence[str] = (),
    skip: Callable[[str], bool] = lambda name: False,
) -> dict[str, str]:
    """What `targets` leave out though it holds matrices, by name, with the reason.

    With `all-linear` these are all matrices of no layer that it means, but the output head. Other
    targets leave out the experts that they name together with layers, as a pattern may.

    Args:
        found: the layers of the model, and why some of them are refused.
        skip: says of a module's name whether it is no layer of the model's own.
    """

    def known(path: str, module: nn.Module) -> bool:
        return path in found.every or isinstance(module, FormLayer) or skip(path)

    aside = [*exclude, *targeting.trained_heads(model)]
    loose = {
        name: what
        for name, what in loose_matrices(model, known).items()
        if not any(targeting.named(each, aside) for each in (name, name.rpartition(".")[0]))
    }
    if targeting.ALL_LINEAR not in targets:
        return {n: w for n, w in loose.items() if w == EXPERTS and targeting.named(n, targets)}
    head = targeting.output_head(model)
    reasons = {
        name: why
        for name, why in found.refused.items()
        if not isinstance(model.get_submodule(name), nn.Embedding)
        and not (head is not None and name == head[0])
        and not targeting.named(name, aside)
    }
    return reasons | loose


def warn_of_left_out(left: Mapping[str, str], targets: Sequence[str]) -> None:
    """Warn of what was left out, if there is any, where the function that calls this was called."""
    if left:
        warnings.warn(what_is_left_out(left, targets), stacklevel=3)


def what_is_left_out(left: Mapping[str, str], targets: Sequence[str]) -> str:
    """What `targets` left out in one sentence, alike names once.

    >>> what_is_left_out({"0.up": "it is parametrized", "1.up": "it is parametrized"}, ["*.up"])
    '`targets` leaves out *.up (it is parametrized); `left_out` lists them'
    """
    who = targeting.ALL_LINEAR if targeting.ALL_LINEAR in targets else "`targets`"
    return f"{who} leaves out {_listed(left)}; `left_out` lists them"


def what_stays(left: Mapping[str, str]) -> str:
    """The same as a plan says it: in how many layers experts stay, and what else is left out.

    >>> what_stays({"0.experts.up": EXPERTS, "1.experts.up": EXPERTS})
    'experts of 2 layers stay as they are, as no form here can hold stacked matrices: *.experts.up'
    """
    experts = {name: why for name, why in left.items() if why == EXPERTS}
    others = {name: why for name, why in left.items() if name not in experts}
    said = []
    if experts:
        count = len({_block(name) for name in experts})
        stay = f"experts of {count} layers stay" if count > 1 else "experts of 1 layer stay"
        why = "as no form here can hold stacked matrices"
        said.append(f"{stay} as they are, {why}: {', '.join(alike(experts))}")
    if others:
        said.append(f"left out: {_listed(others)}")
    return "; ".join(said)


def _block(name: str) -> str:
    """The block of the model that a parameter is in: up to the first number, else its module."""
    number = _NUMBER.search(name)
    return name[: number.end()] if number else name.rpartition(".")[0]


def alike(left: Mapping[str, str]) -> dict[str, str]:
    """Names that are alike but for numbers once, with the first one's reason.

    >>> alike({"0.up": "it is parametrized", "1.up": "it is parametrized"})
    {'*.up': 'it is parametrized'}
    """
    found: dict[str, str] = {}
    for name, why in left.items():
        found.setdefault(_NUMBER.sub("*", name), why)
    return found


def _listed(left: Mapping[str, str]) -> str:
    """The first few kinds of names with the reasons, and how many more there are."""
    named = [f"{name} ({why})" for name, why in alike(left).items()]
    more = f", and {len(named) - _NAMED} more kinds" if len(named) > _NAMED else ""
    return f"{', '.join(named[:_NAMED])}{more}"
