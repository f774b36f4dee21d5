"""What is known of a parameter beyond its numbers: read by optimizers, checkpoints and ledgers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn, no_grad
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from modicum.core.contracts.ledger import HeadBlocks, ParameterClass, TrainedParameter
from modicum.core.layers.targets import output_head
from modicum.core.ranks.sharding import own_part

_ATTRIBUTE = "_modicum_metadata"
_HEAD_BLOCKS = "_modicum_head_blocks"
# What attention calls the width of its heads, and the layers that make queries and keys.
_HEAD_WIDTHS = ("head_width", "head_dim", "attention_head_size")
_HEAD_LAYERS = ("q_proj", "k_proj", "query", "key")
_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


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
        parameter_class: what it is to optimizers; None: by the layer that it is in, see `classes`.
        kind: what it is to its method, such as `factor`: for optimizers that treat kinds apart.
        group: parameters of another group have an optimizer's group of their own.
        holder: the one rank that keeps its state; None: all, or each its part.
        turn: of a parameter that does not take part in every update; see `turn_of`.
        settle: changes the rows that a rank holds in place after each step of an optimizer, such
            as to unit length; each row alone, so that ranks exchange nothing. Masters share it.
    """

    learning_rate_multiplier: float = 1.0
    weight_decay_multiplier: float = 1.0
    parameter_class: ParameterClass | None = None
    kind: str = ""
    group: str = ""
    holder: int | None = None
    turn: UpdateTurn | None = field(default=None, compare=False)
    settle: Callable[[Tensor], None] | None = field(default=None, compare=False)


def describe_parameter(parameter: nn.Parameter, metadata: ParameterMetadata) -> nn.Parameter:
    """Attach metadata to a parameter and return it."""
    if metadata.settle is not None:
        _settle_after_steps()
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
    """Once a process: every optimizer of PyTorch's drops them, in whatever loop it is.

    Gradients that a closure makes within the step, as under Lightning, are dropped after it.
    """

    def drop(
        optimizer: Optimizer, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def drop_now() -> None:
            for group in optimizer.param_groups:
                left_out(group["params"])

        def then_drop(closure: Any) -> Any:
            def called() -> Any:
                loss = closure()
                drop_now()
                return loss

            return called if callable(closure) else closure

        drop_now()
        if "closure" in named:
            return given, {**named, "closure": then_drop(named["closure"])}
        return (*given[:1], *map(then_drop, given[1:2]), *given[2:]), named

    register_optimizer_step_pre_hook(drop)


def settle(parameters: Iterable[nn.Parameter]) -> None:
    """Do to each that was updated what its metadata says is done after a step.

    >>> import torch
    >>> def unit(rows): rows.div_(rows.norm(dim=1, keepdim=True))
    >>> parameter = nn.Parameter(torch.ones(2, 4))
    >>> _ = describe_parameter(parameter, ParameterMetadata(settle=unit))
    >>> parameter.grad = torch.ones(2, 4)
    >>> torch.optim.SGD([parameter], lr=0.5).step()
    >>> parameter.norm(dim=1).tolist()
    [1.0, 1.0]
    """
    for parameter in parameters:
        then = metadata(parameter).settle
        if then is not None and parameter.grad is not None:
            with no_grad():
                then(own_part(parameter)[0])


@functools.cache
def _settle_after_steps() -> None:
    """Once a process: every optimizer of PyTorch's does so, in whatever loop it is."""

    def after(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            settle(group["params"])

    register_optimizer_step_post_hook(after)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters that take gradients, each once however many names share it."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def count(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained; shared ones count once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, sum(parameter.numel() for _, parameter in trainable(model))


def classes(model: nn.Module) -> dict[str, ParameterClass]:
    """What each trained parameter is to optimizers that treat classes apart, by its name.

    - embedding: a table whose rows are symbols; a head that is tied to it is one too;
    - head: a weight of the layer that makes logits. A batch has few of the symbols of both, so
      that their gradients have no subspace in common;
    - convolution: kernels of a convolution;
    - vector: fewer than two dimensions, or a table of more;
    - matrix: all else, of two dimensions.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3))
    >>> sorted(set(classes(model).values()))
    ['convolution', 'embedding', 'matrix', 'vector']
    """
    head = output_head(model)
    by_layer: dict[int, ParameterClass] = {}
    # The head first, embeddings last: of a tied weight they decide.
    if head is not None:
        by_layer |= _weights(head[1], "head")
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            by_layer |= _weights(module, "convolution")
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            by_layer |= _weights(module, "embedding")
    found: dict[str, ParameterClass] = {}
    for name, parameter in trainable(model):
        said = metadata(parameter).parameter_class
        found[name] = said or by_layer.get(id(parameter)) or class_by_shape(parameter.shape)
    return found


def class_by_shape(shape: Sequence[int]) -> ParameterClass:
    """The class of a parameter of which no more than its shape is known.

    >>> [class_by_shape(shape) for shape in ((3,), (3, 3), (2, 3, 3))]
    ['vector', 'matrix', 'vector']
    """
    return "matrix" if len(shape) == 2 else "vector"


def _weights(module: nn.Module, parameter_class: ParameterClass) -> dict[int, ParameterClass]:
    """A layer's own parameters of at least two dimensions, by identity."""
    own = module.parameters(recurse=False)
    return {id(parameter): parameter_class for parameter in own if parameter.ndim > 1}


def matrices(model: nn.Module) -> frozenset[str]:
    """Names of the trained parameters that optimizers which work on matrices take for ones.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> sorted(matrices(model))
    ['1.weight']
    """
    return frozenset(name for name, found in classes(model).items() if found == "matrix")


def note_head_blocks(model: nn.Module, blocks: Mapping[str, HeadBlocks]) -> None:
    """Note what `attention_heads` is to say of some weights, by their names."""
    object.__setattr__(model, _HEAD_BLOCKS, dict(blocks))


def attention_heads(model: nn.Module) -> dict[str, int | HeadBlocks]:
    """Of how many heads' queries or keys a weight's rows are, by its name.

    Known of attention that says how wide a head is (as here and in transformers' models) and has
    layers of their own for both (`q_proj`, `k_proj`, `query`, `key`); of fused ones what was noted
    (`note_head_blocks`).

    >>> from modicum.models import ModelConfig, create
    >>> config = ModelConfig(vocabulary_size=9, width=8, layers=1, heads=4, kv_heads=2)
    >>> found = attention_heads(create(config, seed=0))
    >>> {name.rpartition("self_attn.")[2]: count for name, count in found.items()}
    {'q_proj.weight': 4, 'k_proj.weight': 2}
    """
    found: dict[int, int | HeadBlocks] = {}
    for module in model.modules():
        width = next((w for name in _HEAD_WIDTHS if (w := getattr(module, name, None))), None)
        for name in _HEAD_LAYERS if isinstance(width, int) else ():
            weight = getattr(getattr(module, name, None), "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim == 2:
                assert isinstance(width, int)
                if weight.shape[0] % width == 0:
                    found[id(weight)] = weight.shape[0] // width
    noted: Mapping[str, HeadBlocks] = getattr(model, _HEAD_BLOCKS, {})
    known = {name: found[id(p)] for name, p in trainable(model) if id(p) in found}
    return known | {name: noted[name] for name, _ in trainable(model) if name in noted}


def trained_shapes(model: nn.Module) -> tuple[TrainedParameter, ...]:
    """What an optimizer's ledger is given of the trained parameters; the model may be on meta."""
    found, heads = classes(model), attention_heads(model)
    return tuple(
        TrainedParameter(
            name,
            tuple(parameter.shape),
            found[name],
            parameter.element_size(),
            heads.get(name, 0),
        )
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

    Each group has `base_learning_rate`, on which a schedule multiplies, `names`, `matrix`: whether
    its parameters are what `matrices` says, and the `classes` and `heads` of its parameters.

    Args:
        trained: what represents each of the model's trained parameters, by its name (masters, of
            which a rank may hold a part); None: these themselves.
    """
    groups: dict[tuple[bool, ParameterMetadata], dict[str, object]] = {}
    found, heads = classes(model), attention_heads(model)
    for name, parameter in trainable(model):
        # Classes other than matrices share a group: clipping sums norms in the order of groups.
        known, matrix = replace(metadata(parameter), parameter_class=None), found[name] == "matrix"
        rate = learning_rate * known.learning_rate_multiplier
        group = groups.setdefault(
            (matrix, known),
            {
                "params": [],
                "names": [],
                "lr": rate,
                "base_learning_rate": rate,
                "weight_decay": weight_decay * known.weight_decay_multiplier,
                "matrix": matrix,
                "classes": [],
                "heads": [],
                "kind": known.kind,
            },
        )
        group["params"].append(parameter if trained is None else trained[name])  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
        group["classes"].append(found[name])  # type: ignore[attr-defined]
        group["heads"].append(heads.get(name, 0))  # type: ignore[attr-defined]
    return list(groups.values())
