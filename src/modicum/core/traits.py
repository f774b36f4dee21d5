"""Words for what methods do to a run, and the one table of rules that says what combines.

A rule is a pair of traits that exclude each other and the sentence that says why. The sentence is
the error message. A run has traits too (it clips, it accumulates, its base is random), so that one
table covers method with method and method with recipe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

TRAITS = {
    # of methods
    "adapts_base": "trains small additions to a frozen base",
    "mergeable": "its result folds into the dense weight",
    "rewrites_base": "replaces the frozen base weight when it is attached",
    "defers_update": "applies an update later than the step that computed it",
    "needs_whole_matrix": "needs a matrix parameter whole, on one rank",
    "frees_gradient_in_backward": "consumes a gradient as soon as it is computed",
    "captures_activations": "reads layer inputs or output gradients during training",
    "needs_global_norm_first": "needs the norm of all gradients before the first update",
    "changes_shapes": "changes the shapes of parameters during training",
    "unequal_batches": "trains on batches whose sizes differ between ranks",
    "exact_resume": "an interrupted run continues to the bit",
    "compiles": "works under torch.compile",
    # of runs
    "run_clips": "the recipe sets training.clip_norm",
    "run_accumulates": "a training batch is cut into several micro-batches",
    "run_random_base": "the model starts from random weights",
}


@dataclass(frozen=True)
class Rule:
    """Two traits that two *different* parts of one run must not have; `why` is the message."""

    one: str
    other: str
    why: str


RULES = (
    Rule(
        "adapts_base",
        "run_random_base",
        "an adapter adapts trained weights, and this model starts from random ones; "
        "give model.path a trained model, or leave the adapter out",
    ),
    Rule(
        "rewrites_base",
        "rewrites_base",
        "both replace the frozen base weight, and only one can",
    ),
    Rule(
        "frees_gradient_in_backward",
        "run_clips",
        "gradients are used up during the backward pass, so their norm is never known; "
        "set training.clip_norm to null",
    ),
    Rule(
        "frees_gradient_in_backward",
        "needs_global_norm_first",
        "one uses gradients up during the backward pass, the other needs the norm of all first",
    ),
    Rule(
        "frees_gradient_in_backward",
        "run_accumulates",
        "gradients are used up during the backward pass, so none are left to accumulate; "
        "set training.micro_batch_size equal to training.batch_size",
    ),
    Rule(
        "frees_gradient_in_backward",
        "frees_gradient_in_backward",
        "both use up the gradients during the backward pass",
    ),
)


@dataclass(frozen=True)
class Part:
    """Something in a run that has traits: a method in its place in the recipe, or the run."""

    name: str
    traits: frozenset[str]


@dataclass(frozen=True)
class Clash:
    """Two parts that do not combine, and the sentence why."""

    one: Part
    other: Part
    why: str


def clashes(parts: Iterable[Part]) -> list[Clash]:
    """Every pair of parts that a rule forbids, in the order of the parts."""
    listed = list(parts)
    found = []
    for index, first in enumerate(listed):
        for second in listed[index + 1 :]:
            for rule in RULES:
                forward = rule.one in first.traits and rule.other in second.traits
                backward = rule.one in second.traits and rule.other in first.traits
                if forward or backward:
                    found.append(Clash(first, second, rule.why))
    return found
