"""Two passes of each batch, under a trainer that shows callbacks neither batches nor outputs.

A model of transformers makes its loss itself, of the labels that it is given. Here each training
pass runs a batch as one of twice the rows. The second half's labels are those that losses leave
out, so the loss is that of the first pass, and the hook's loss between the two is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modicum.core.errors import InputError

if TYPE_CHECKING:
    from modicum.core.contracts.run_hooks import RunHook

_LEFT_OUT = -100  # the label that transformers' losses, and torch's cross entropy, pass over


@dataclass(frozen=True)
class _Rows:
    """What a loss between two passes reads of a batch: the labels of its rows, and their count."""

    labels: Tensor
    count: Tensor | float


def pair_forward(model: nn.Module, hook: RunHook) -> Callable[[], None]:
    """Have each training pass of a model of transformers be two passes, with a loss between them.

    What the model gives is of the first pass, and its loss has the second term. Evaluations are as
    they were.

    Args:
        hook: whose `pair_loss` is added, over the labels that count: those of the update where the
            trainer says how many there are, else those of the batch.

    Returns:
        A function that undoes it.

    Raises:
        InputError: a batch has no labels, or such that are no classes; the model gives no logits.
    """
    given: list[_Rows] = []

    def double(
        module: nn.Module, inputs: tuple[Any, ...], known: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        given.clear()
        if not (module.training and torch.is_grad_enabled()):
            return None
        labels = known.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            raise InputError(
                "a loss between two passes needs the model's own loss, of labels that are classes; "
                "leave compute_loss_func and label_smoothing_factor out, or train with modicum's "
                "trainer",
                field="labels",
            )
        shifted = labels[..., 1:] if "CausalLM" in type(module).__name__ else labels
        count = known.get("num_items_in_batch")
        given.append(_Rows(shifted, (shifted >= 0).sum() if count is None else count))
        rows = len(labels)
        twice = {name: _twice(value, rows) for name, value in known.items()}
        twice["labels"] = torch.cat([labels, torch.full_like(labels, _LEFT_OUT)])
        return tuple(_twice(value, rows) for value in inputs), twice

    def halve(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not given:
            return None
        rows = given.pop()
        if not isinstance(output, MutableMapping) or not {"loss", "logits"} <= output.keys():
            raise InputError("two passes of a batch need a model that gives a loss and logits")
        first, second = output["logits"].chunk(2)
        output["logits"] = first
        if rows.labels.shape != first.shape[:-1]:  # each logit is of the label that comes after it
            first, second = first[:, :-1], second[:, :-1]
        between = hook.pair_loss(first, second, rows)
        output["loss"] = output["loss"] + between / rows.count
        return output

    handles = [
        model.register_forward_pre_hook(double, with_kwargs=True),
        model.register_forward_hook(halve),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _twice(value: Any, rows: int) -> Any:
    """A value of a batch, its rows twice; what has none stays."""
    is_of_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
    return torch.cat([value, value]) if is_of_rows else value
