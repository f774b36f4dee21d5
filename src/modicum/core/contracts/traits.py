"""Words for what methods do to a run, and what does not combine by the table of `trait_rules`.

A run has traits too: it clips, it accumulates, its base is random.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from modicum.core.contracts.trait_rules import RULES

TRAITS = {
    # of methods
    "adapts_base": "trains small additions to a frozen base",
    "mergeable": "its result folds into the dense weight",
    "is_lora": "its change of a layer is a LoRA, which PEFT's files hold exactly",
    "in_peft": "files of PEFT's hold it exactly, though it is no plain LoRA",
    "rewrites_base": "replaces the frozen base weight when it is attached",
    "writes_base": "writes its own entries of the base",
    "reads_base": "its change of a layer depends on the layer's own weight",
    "applies_first": "reads the layer's own weight, so it is applied before other adapters",
    "starts_near": "its fresh model computes what the base does, but for rounding",
    "starts_elsewhere": "its fresh model computes something else than the base",
    "corrects_gradients": "gives its factors other gradients than those of the loss",
    "after_block": "changes what blocks give, not a layer's weight",
    "adapts_convolutions": "can be on convolutions too",
    "prepares_from_data": "looks at data once before the first update",
    "for_full_model": "on a model that lost units, its files are for the one that has them all",
    "follows_steps": "counts in forward passes, draws anew with each update, or adds to the loss",
    "reads_gradients": "reads the gradients that an update was made of",
    "pairs_passes": "runs each batch as one of twice the rows, for a loss between two passes",
    "defers_update": "applies an update later than the step that computed it",
    "frees_gradient_in_backward": "consumes a gradient as soon as it is computed",
    "needs_no_gradients": "makes its updates without a backward pass",
    "takes_no_rate": "its updates have no learning rate",
    "transforms_gradients": "changes gradients between their reduction and clipping",
    "streams_blocks": "keeps the model's blocks on the host, and moves them as they compute",
    "works_on_base": "works on the model's own weights, which must be trained",
    "needs_trained_base": "begins with weights that mean something",
    "plans_from_weights": "weights say which layers take which size; plans count the most there is",
    "freezes_the_rest": "what it does not make smaller is not trained",
    "needs_convolutions": "has to do with convolutions alone",
    "has_convolutions": "its model has convolutions",
    "needs_recurrence": "finds the weights of a recurrent net alone",
    "has_recurrence": "its model is a recurrent net",
    "follows_optimizer": "reads the optimizer's momentum after an update",
    "compresses_saved": "makes smaller what is saved for the backward pass",
    "needs_eager": "looks into what blocks compute",
    "owes_gradients": "adds to a gradient what earlier updates left unsent of it",
    "needs_whole_gradients": "sums full gradients over the ranks",
    "codes_cut_weights": "codes the exchanges of weights that are sharded over ranks",
    "crosses_wire": "is about what ranks exchange",
    "quantized_base": "holds the base weight in few bits, frozen",
    "changes_shapes": "changes shapes of weights between two updates",
    "keeps_own_shapes": "keeps state of parameters in other shapes than they have",
    "takes_turns": "has state of some of the matrices at a time, by their numbers and steps",
    "holds_trained_forms": "holds weights in another form than as a matrix, and trains them",
    "holds_convolutions": "convolutions can take its form too, in a loop of one's own",
    "has_no_dense_weight": "its layers compute what no dense weight does",
    "needs_global_norm_first": "needs the norm of all gradients before the first update",
    "varies_length": "rows are as long as the longest of their batch",
    "exact_resume": "an interrupted run continues to the bit",
    "compiles": "works under torch.compile",
    # of runs
    "run_clips": "the recipe sets training.clip_norm",
    "run_schedules": "the recipe's learning rate changes from update to update",
    "run_sets_rate": "the recipe sets training.learning_rate",
    "run_bf16": "the recipe sets training.precision to bf16",
    "run_accumulates": "a training batch is split into several micro-batches",
    "run_random_base": "the model starts from random weights",
    "run_trains_base": "the recipe has no adapter, so all weights are trained",
    "run_recomputes": "the recipe sets training.recompute to blocks",
    "run_compiles": "the recipe sets training.compile to blocks",
    "run_without_convolutions": "the model has no convolutions",
    "run_without_recurrence": "the model is no recurrent net",
    "run_whole_weights": "every rank holds all weights",
    "run_cuts_weights": "ranks hold parts of the weights",
    "run_on_fsdp": "fsdp gathers weights and sums gradients",
    "run_masters": "the optimizer trains masters of the model's weights",
    "run_gathers_frozen": "fsdp gathers weights that are not trained",
    "run_hybrid": "several groups of ranks hold a copy of the weights each",
    "run_gathers_again": "weights are given back between forward and backward",
}


@dataclass(frozen=True)
class TraitHolder:
    """Something in a run that has traits: a method in its place in the recipe, or the run.

    Args:
        excludes: traits that the other parts must not have, with the sentence why: a method's own
            rules, next to the table's.
    """

    name: str
    traits: frozenset[str]
    excludes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Clash:
    """Two parts that do not combine, and the sentence why."""

    one: TraitHolder
    other: TraitHolder
    why: str


def clashes(parts: Iterable[TraitHolder]) -> list[Clash]:
    """Every pair of parts that a rule forbids, in the order of the parts."""
    listed = list(parts)
    found = []
    for index, first in enumerate(listed):
        for second in listed[index + 1 :]:
            found += [Clash(first, second, why) for why in _reasons(first, second)]
    return found


def _reasons(first: TraitHolder, second: TraitHolder) -> list[str]:
    """Why two parts do not combine: by the table, then by what either says itself."""
    reasons = []
    for rule in RULES:
        forward = rule.one in first.traits and rule.other in second.traits
        backward = rule.one in second.traits and rule.other in first.traits
        if forward or backward:
            reasons.append(rule.why)
    for one, other in ((first, second), (second, first)):
        reasons += [why for trait, why in one.excludes if trait in other.traits]
    return reasons
