"""The one table of rules that says which parts of a run combine.

A rule is a pair of traits (`traits.py`) that exclude each other and the sentence that says why. The
sentence is the error message. A run has traits too, so one table covers method with method and
method with recipe.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TraitRule:
    """Two traits that two *different* parts of one run must not have; `why` is the message."""

    one: str
    other: str
    why: str


RULES = (
    TraitRule(
        "adapts_base",
        "run_random_base",
        "an adapter adapts trained weights, and this model starts from random ones; "
        "give model.path a trained model, or leave the adapter out",
    ),
    TraitRule(
        "rewrites_base",
        "rewrites_base",
        "both replace the frozen base weight, and only one can",
    ),
    TraitRule(
        "rewrites_base",
        "writes_base",
        "one takes a part out of the frozen base weight, and the other writes into it",
    ),
    TraitRule(
        "writes_base",
        "writes_base",
        "both write into the frozen base weight, and only one is trained; merge one of them first",
    ),
    TraitRule(
        "writes_base",
        "quantized_base",
        "it writes into entries of dense weights; leave the section linear out",
    ),
    TraitRule(
        "writes_base",
        "run_compiles",
        "it writes into weights before a product and restores them after it, which compiled blocks "
        "cannot do; set training.compile to none",
    ),
    TraitRule(
        "frees_gradient_in_backward",
        "run_clips",
        "gradients are used up during the backward pass, so their norm is never known; "
        "set training.clip_norm to null",
    ),
    TraitRule(
        "frees_gradient_in_backward",
        "needs_global_norm_first",
        "one uses gradients up during the backward pass, the other needs the norm of all first",
    ),
    TraitRule(
        "frees_gradient_in_backward",
        "run_accumulates",
        "gradients are used up during the backward pass, so none are left to accumulate; "
        "set training.micro_batch_size to a rank's part of training.batch_size",
    ),
    TraitRule(
        "frees_gradient_in_backward",
        "transforms_gradients",
        "one uses gradients up during the backward pass, the other needs them all together first",
    ),
    TraitRule(
        "needs_no_gradients",
        "run_clips",
        "updates are made without a backward pass, so there are no gradients to clip; "
        "set training.clip_norm to null",
    ),
    TraitRule(
        "needs_no_gradients",
        "run_recomputes",
        "updates are made without a backward pass, so nothing is kept that could be computed again"
        "; set training.recompute to none",
    ),
    TraitRule(
        "needs_no_gradients",
        "transforms_gradients",
        "updates are made without a backward pass, so there are no gradients to change",
    ),
    TraitRule(
        "needs_no_gradients",
        "compresses_saved",
        "updates are made without a backward pass, so nothing is saved for a backward pass",
    ),
    TraitRule(
        "needs_no_gradients",
        "crosses_wire",
        "updates are made without a backward pass, so ranks exchange no gradients; leave comm out",
    ),
    TraitRule(
        "needs_no_gradients",
        "follows_steps",
        "updates are made without a backward pass, with which comes what an adapter counts or adds "
        "to the loss",
    ),
    TraitRule(
        "needs_no_gradients",
        "pairs_passes",
        "updates are made without a backward pass, and a loss between two passes is not among them",
    ),
    TraitRule(
        "takes_no_rate",
        "run_schedules",
        "its updates have no learning rate, so there is none to change; set training.schedule to "
        "constant, and leave the warm-up out",
    ),
    TraitRule(
        "takes_no_rate",
        "run_sets_rate",
        "its updates have no learning rate; leave training.learning_rate out",
    ),
    TraitRule(
        "streams_blocks",
        "run_cuts_weights",
        "blocks move between host and device in full, and here ranks hold parts of them; set "
        "parallel.strategy to ddp, or optimizer.stream to false",
    ),
    TraitRule(
        "streams_blocks",
        "run_compiles",
        "a block's weights are elsewhere at each pass, and compiled blocks expect them in one "
        "place; set training.compile to none",
    ),
    TraitRule(
        "streams_blocks",
        "changes_shapes",
        "blocks have a buffer each, of the size that they begin with; set optimizer.stream to "
        "false",
    ),
    TraitRule(
        "defers_update",
        "frees_gradient_in_backward",
        "weights are updated in the next forward pass, so the backward one has no full gradient",
    ),
    TraitRule(
        "defers_update",
        "transforms_gradients",
        "weights are updated in the next forward pass, and full gradients are never together "
        "before it",
    ),
    TraitRule(
        "follows_optimizer",
        "frees_gradient_in_backward",
        "it reads what an update was made of, and that is used up during the backward pass",
    ),
    TraitRule(
        "reads_gradients",
        "frees_gradient_in_backward",
        "one reads all gradients after an update, and the other has used them up by then",
    ),
    TraitRule(
        "follows_optimizer",
        "run_masters",
        "it reads the momentum of the weights that it sees, and zero's optimizer trains others; "
        "set parallel.strategy to ddp or fsdp",
    ),
    TraitRule(
        "works_on_base",
        "adapts_base",
        "an adapter freezes the weights that it works on; leave one of them out",
    ),
    TraitRule(
        "needs_trained_base",
        "run_random_base",
        "it needs trained weights, and this model starts from random ones; give model.path a "
        "trained model",
    ),
    TraitRule(
        "needs_trained_base",
        "quantized_base",
        "it begins with full-precision weights; leave the section linear out",
    ),
    TraitRule(
        "needs_trained_base",
        "holds_trained_forms",
        "it begins with dense weights; leave the section linear out",
    ),
    TraitRule(
        "has_convolutions",
        "quantized_base",
        "its model has no layers that take another form; leave the section linear out",
    ),
    TraitRule(
        "has_convolutions",
        "holds_trained_forms",
        "its model has no layers that take another form; leave the section linear out",
    ),
    TraitRule(
        "quantized_base",
        "run_trains_base",
        "a quantized weight is not trained; add an adapter, or leave linear out",
    ),
    TraitRule(
        "needs_convolutions",
        "run_without_convolutions",
        "it compresses what convolutions keep, and this model has none",
    ),
    TraitRule(
        "needs_recurrence",
        "run_without_recurrence",
        "it finds the weights of a recurrent net, and this model is none; set task.method to "
        "sequences",
    ),
    TraitRule(
        "has_recurrence",
        "run_compiles",
        "its steps over time would be unrolled and compiled anew for each length; set "
        "training.compile to none",
    ),
    TraitRule(
        "has_recurrence",
        "quantized_base",
        "its model has no layers that take another form; leave the section linear out",
    ),
    TraitRule(
        "has_recurrence",
        "holds_trained_forms",
        "its model has no layers that take another form; leave the section linear out",
    ),
    TraitRule(
        "compresses_saved",
        "run_recomputes",
        "blocks that are recomputed keep nothing that could be compressed; set training.recompute "
        "to none",
    ),
    TraitRule(
        "needs_eager",
        "run_compiles",
        "it looks into what blocks compute, which compiled blocks do not show; set "
        "training.compile to none",
    ),
    TraitRule(
        "varies_length",
        "run_compiles",
        "its rows have another length in every batch, each of which would be compiled anew; set "
        "training.compile to none",
    ),
    TraitRule(
        "needs_whole_gradients",
        "run_cuts_weights",
        "it sums full gradients on every rank, and zero and fsdp sum for each rank its part alone; "
        "set parallel.strategy to ddp",
    ),
    TraitRule(
        "owes_gradients",
        "frees_gradient_in_backward",
        "what is left unsent of a gradient is owed once its update is made, and one uses gradients "
        "up in the backward pass, before it is known whether the update is made",
    ),
    TraitRule(
        "codes_cut_weights",
        "run_whole_weights",
        "it codes the exchanges of weights sharded over ranks; set parallel.strategy to zero, "
        "or to fsdp with parallel.reshard_after_forward false",
    ),
    TraitRule(
        "codes_cut_weights",
        "run_gathers_frozen",
        "on fsdp it would send the frozen weights too; set parallel.strategy to zero, and only "
        "what is trained is sent",
    ),
    TraitRule(
        "codes_cut_weights",
        "run_hybrid",
        "it sums over all ranks at once; set parallel.shard to null",
    ),
    TraitRule(
        "codes_cut_weights",
        "run_gathers_again",
        "differences are taken from a copy of the weights, which must stay gathered; set "
        "parallel.reshard_after_forward to false",
    ),
    TraitRule(
        "changes_shapes",
        "keeps_own_shapes",
        "rows of weights move by a map, and state in other shapes than theirs has no such rows",
    ),
    TraitRule(
        "changes_shapes",
        "takes_turns",
        "a matrix of another shape has state that begins anew, and would be out of turn; set "
        "optimizer.part to another than tensors",
    ),
    TraitRule(
        "changes_shapes",
        "adapts_base",
        "an adapter's factors have the shapes of the layers that they are attached to, and no map "
        "moves them; merge the adapter first, or leave one of them out",
    ),
    TraitRule(
        "changes_shapes",
        "has_convolutions",
        "no layer of this model is of a form whose shape can change",
    ),
    TraitRule(
        "changes_shapes",
        "crosses_wire",
        "what a method of comm keeps between updates has the shapes that it began with, and moving "
        "it was not tried; leave comm out",
    ),
    TraitRule(
        "changes_shapes",
        "frees_gradient_in_backward",
        "shapes change between updates, and with updates inside the backward pass that was not "
        "tried",
    ),
    TraitRule(
        "changes_shapes",
        "run_compiles",
        "blocks are compiled for the shapes that they begin with, and compiling them again in the "
        "middle of a run was not tried; set training.compile to none",
    ),
    TraitRule(
        "changes_shapes",
        "changes_shapes",
        "each would change layers under the other; leave one of them out",
    ),
    TraitRule(
        "frees_gradient_in_backward",
        "frees_gradient_in_backward",
        "both use up the gradients during the backward pass",
    ),
    TraitRule(
        "holds_trained_forms",
        "adapts_base",
        "an adapter freezes the layers that it is attached to, and these have a form to be trained "
        "in; leave one of them out, or adapt what the other exported",
    ),
)
