"""What tasks measure on validation data: sums that add up over batches and ranks, and metrics.

A task's `evaluate` gives sums of a batch, and its `measures` makes metrics of the sums over all of
them: means, and what is no mean, such as perplexity and F1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from modicum.data.batch import IGNORED

# Of metrics by these names, which values are better.
BETTER: Mapping[str, Literal["lower", "higher"]] = {
    "loss": "lower",
    "perplexity": "lower",
    "accuracy": "higher",
    "token_accuracy": "higher",
    "macro_f1": "higher",
}
_SUMS = ("right", "labelled", "predicted")


def right_answers(logits: Tensor, labels: Tensor) -> float:
    """How many labels have the largest logit; those that are not trained never do.

    Args:
        logits: [..., classes].
        labels: int64 [...], or -100.
    """
    return float((logits.argmax(-1) == labels).sum())


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where no number holds it.

    >>> round(perplexity(math.log(8.0)), 6), perplexity(1e9)
    (8.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def class_sums(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Of each class, how many labels are of it, how many answers, and how many of these are right.

    Args:
        logits: [rows, classes].
        labels: int64 [rows], or -100 where none is known.
    """
    known = labels != IGNORED
    answers, labels, classes = logits.argmax(1)[known], labels[known], logits.shape[1]
    counted = (labels[answers == labels], labels, answers)
    found = torch.stack([each.bincount(minlength=classes) for each in counted]).tolist()
    return {
        f"{name} {number}": float(value)
        for name, values in zip(_SUMS, found, strict=True)
        for number, value in enumerate(values)
    }


def class_metrics(sums: Mapping[str, float], names: Sequence[str]) -> dict[str, Any]:
    """`macro_f1`, and `by_class`: the share of each class's labels that were answered rightly.

    F1 is the mean over classes that have a label or an answer; a class without labels is not in
    `by_class`.

    Args:
        sums: those of `class_sums`, added up.
        names: of the classes, in their order.

    >>> logits = torch.tensor([[2.0, 1.0], [2.0, 1.0], [0.0, 1.0]])
    >>> class_metrics(class_sums(logits, torch.tensor([0, 1, 1])), ["cats", "dogs"])
    {'macro_f1': 0.6666666666666666, 'by_class': {'cats': 1.0, 'dogs': 0.5}}
    """
    scores, shares = [], {}
    for number, name in enumerate(names):
        right, labelled, predicted = (sums.get(f"{each} {number}", 0.0) for each in _SUMS)
        if labelled + predicted:
            scores.append(2 * right / (labelled + predicted))
        if labelled:
            shares[name] = right / labelled
    return {"macro_f1": sum(scores) / max(len(scores), 1), "by_class": shares}
