"""What is known of a parameter beyond its numbers: read by optimizers, checkpoints and ledgers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_ATTRIBUTE = "_modicum_metadata"


@dataclass(frozen=True)
class ParameterMetadata:
    """Multipliers on the recipe's learning rate and weight decay."""

    learning_rate_multiplier: float = 1.0
    weight_decay_multiplier: float = 1.0


def describe_parameter(parameter: nn.Parameter, metadata: ParameterMetadata) -> nn.Parameter:
    """Attach metadata to a parameter and return it."""
    setattr(parameter, _ATTRIBUTE, metadata)
    return parameter


def metadata(parameter: nn.Parameter) -> ParameterMetadata:
    """The parameter's metadata: what was attached, else no decay for vectors and plain otherwise.

    Decaying a bias or a norm's scale towards zero has no regularizing sense, so parameters of
    fewer than two dimensions have no weight decay unless somebody says otherwise.
    """
    attached = getattr(parameter, _ATTRIBUTE, None)
    if attached is not None:
        return attached
    return ParameterMetadata(weight_decay_multiplier=0.0 if parameter.ndim < 2 else 1.0)


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Named parameters that take gradients, each once however many names share it."""
    return ((name, value) for name, value in model.named_parameters() if value.requires_grad)


def count(model: nn.Module) -> tuple[int, int]:
    """All parameters, and those that are trained; shared ones count once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    return total, sum(parameter.numel() for _, parameter in trainable(model))


def optimizer_groups(
    model: nn.Module, *, learning_rate: float, weight_decay: float
) -> list[dict[str, object]]:
    """Parameter groups for a `torch.optim.Optimizer`, one for each pair of multipliers.

    Each group has `base_learning_rate`, on which a schedule multiplies, and `names`.
    """
    groups: dict[ParameterMetadata, dict[str, object]] = {}
    for name, parameter in trainable(model):
        known = metadata(parameter)
        rate = learning_rate * known.learning_rate_multiplier
        group = groups.setdefault(
            known,
            {
                "params": [],
                "names": [],
                "lr": rate,
                "base_learning_rate": rate,
                "weight_decay": weight_decay * known.weight_decay_multiplier,
            },
        )
        group["params"].append(parameter)  # type: ignore[attr-defined]
        group["names"].append(name)  # type: ignore[attr-defined]
    return list(groups.values())
