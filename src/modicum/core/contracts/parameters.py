"""What is known of a parameter beyond its numbers: read by optimizers, checkpoints and ledgers."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from modicum.core.contracts.ledger import TrainedParameter
from modicum.core.layers.targets import output_head

_ATTRIBUTE = "_modicum_metadata"


class UpdateTurn:
    """Whether a parameter takes part in the update at hand; masters and shards of it share one.

    Attributes:
        idle: it does not: no optimizer moves it, decays it, or counts the update in its state.
    """

    idle: bool = False


@dataclass(frozen=True)
class ParameterMetadata:
    """Multipliers on the recipe's learning rate and weight decay, and what optimizers may do.

    It stays with the parameter's name when a model gets memory or is sharded over ranks.

    Args:
        learning_rate_multiplier, weight_decay_multiplier: on the recipe's.
        matrix: whether optimizers that work on matrices take it for one; None: by the layer that
            it is in, see `matrices`.
        kind: what it is to its method, such as `factor`: for optimizers that treat kinds apart.
        group: parameters of another group have an optimizer's group of their own.
        holder: the one rank that keeps its state; None: all, or each its part.
        turn: of a parameter that does not take part in every update; see `turn_of`.
    """

    learning_rate_multiplier: float = 1.0
    weight_decay_multiplier: float = 1.0
    matrix: bool | None = None
    kind: str = ""
    group: str = ""
    holder: int | None = None
    turn: UpdateTurn | None = field(default=None, compare=False)


def describe_parameter(parameter: nn.Parameter, metadata: ParameterMetadata) -> nn.Parameter:
    """Attach metadata to a parameter and return it."""
    setattr(parameter, _ATTRIBUTE, metadata)
    return parameter


@contextmanager
def keeping_metadata(model: nn.Module) -> Iterator[None]:
    """Metadata goes over, by name, to parameters that replace others in here.

    >>> model = nn.Linear(2, 2)
    >>> _ = describe_parameter(model.weight, ParameterMetadata(kind="factor"))
    >>> with keeping_metadata(model):
    ...     model.weight = nn.Parameter(model.weight.detach().clone())
    >>> metadata(model.weight).kind
    'factor'
    """
    before = {
        name: attached
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (attached := getattr(parameter, _ATTRIBUTE, None)) is not None
    }
    yield
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in before:
            describe_parameter(parameter, before[name])


def metadata(parameter: nn.Parameter) -> ParameterMetadata:
    """The parameter's metadata: what was attached, else no decay for vectors and plain otherwise.

    Decaying a bias or a norm's scale towards zero has no regularizing sense, so parameters of
    fewer than two dimensions have no weight decay unless somebody says otherwise.
    """
    attached = getattr(parameter, _ATTRIBUTE, None)
    if attached is not None:
        return attached
    return ParameterMetadata(weight_decay_multiplier=0.0 if parameter.ndim < 2 else 1.0)


def turn_of(parameter: nn.Parameter) -> UpdateTurn:
    """The turn of a parameter, which from here on does not take part in updates where it is idle.

    It gets a gradient nonetheless, of zeros, so that ranks sum and wait for the same; before any
    optimizer's step that is dropped. Those that step parts of their parameters call `left_out`.

    >>> import torch
    >>> parameter = nn.Parameter(torch.ones(2))
    >>> turn, optimizer = turn_of(parameter), torch.optim.AdamW([parameter], lr=0.5)
    >>> turn.idle, parameter.grad = True, torch.zeros(2)
    >>> optimizer.step()
    >>> parameter.tolist(), len(optimizer.state)
    ([1.0, 1.0], 0)
    """
    known = metadata(parameter)
    if known.turn is None:
        _pass_over_idle_ones()
        known = replace(known, turn=UpdateTurn())
        describe_parameter(parameter, known)
    assert known.turn is not None
    return known.turn


def is_idle(parameter: nn.Parameter) -> bool:
    """Whether a parameter takes no part in the update at hand."""
    turn = metadata(parameter).turn
    return turn is not None and turn.idle


def left_out(parameters: Iterable[nn.Parameter]) -> None:
    """Drop the gradients of those that are idle."""
    for parameter in parameters:
        if is_idle(parameter):
            parameter.grad = None


@functools.cache
def _pass_over_idle_ones() -> None:
    """Once a process: every optimizer of PyTorch's drops them, in whatever loop it is."""

    def drop(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            left_out(group["params"])

    register_optimizer_step_pre_hook(drop)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters that take gradients, each once however many names share it."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def count(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained; shared ones count once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, sum(parameter.numel() for _, parameter in trainable(model))


def matrices(model: nn.Module) -> frozenset[str]:
    """Names of the trained parameters that optimizers which work on matrices take for ones.

    These have two dimensions and belong to no embedding and not to the output head: the rows of
    those are symbols, of which a batch has few, so that their gradients have no subspace in common.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> sorted(matrices(model))
    ['1.weight']
    """
    head = output_head(model)
    symbols = {
        id(parameter)
        for module in model.modules()
        if (head and module is head[1]) or isinstance(module, nn.Embedding | nn.EmbeddingBag)
        for parameter in module.parameters(recurse=False)
    }
    found = set()
    for name, parameter in trainable(model):
        said = metadata(parameter).matrix
        by_layer = parameter.ndim == 2 and id(parameter) not in symbols
        if by_layer if said is None else said:
            found.add(name)
    return frozenset(found)


def trained_shapes(model: nn.Module) -> tuple[TrainedParameter, ...]:
    """What an optimizer's ledger is given of the trained parameters; the model may be on meta."""
    chosen = matrices(model)
    return tuple(
        TrainedParameter(name, tuple(parameter.shape), name in chosen, parameter.element_size())
        for name, parameter in trainable(model)
    )


def optimizer_groups(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float,
    trained: Mapping[str, nn.Parameter] | None = None,
) -> list[dict[str, object]]:
    """Parameter groups for a `torch.optim.Optimizer`, one for each kind of parameters.

    Each group has `base_learning_rate`, on which a schedule multiplies, `names`, and `matrix`:
    whether its parameters are what `matrices` says.

    Args:
        trained: what represents each of the model's trained parameters, by its name (masters, of
            which a rank may hold a part); None: these themselves.
    """
    groups: dict[ParameterMetadata, dict[str, object]] = {}
    chosen = matrices(model)
    for name, parameter in trainable(model):
        known = replace(metadata(parameter), matrix=name in chosen)
        rate = learning_rate * known.learning_rate_multiplier
        group = groups.setdefault(
            known,
            {
                "params": [],
                "names": [],
                "lr": rate,
                "base_learning_rate": rate,
                "weight_decay": weight_decay * known.weight_decay_multiplier,
                "matrix": known.matrix,
                "kind": known.kind,
            },
        )
        group["params"].append(parameter if trained is None else trained[name])  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
    return list(groups.values())
