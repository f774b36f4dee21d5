"""What must be left of an update on two ranks of which one has no numbers: nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from modicum.core.contracts.method import Method
from modicum.core.contracts.strategy import Strategy
from modicum.core.contracts.traits import TraitHolder, clashes
from modicum.core.ranks.layout import Layout
from modicum.core.ranks.ranks import Ranks
from modicum.core.ranks.sharding import own_part
from modicum.parallel.replicated import Replicated
from modicum.parallel.sharded import Sharded
from modicum.parallel.zero import Zero
from modicum.proofs.contracts.base import check
from modicum.proofs.contracts.comm.two_ranks import on_two_ranks
from modicum.proofs.contracts.optim.programs import (
    Gradless,
    Lossless,
    ProgramSubject,
    ProgramTraining,
)

# By name, how two ranks share the work, and the traits of a run that does.
STRATEGIES: dict[str, tuple[Callable[[Ranks], Strategy], frozenset[str]]] = {
    "ddp": (
        lambda ranks: Replicated(ranks, Layout.of(2), bucket_bytes=1000),
        frozenset({"run_whole_weights"}),
    ),
    "zero": (Zero, frozenset({"run_cuts_weights", "run_masters"})),
    "fsdp": (
        lambda ranks: Sharded(ranks, Layout.of(2, 2)),
        frozenset({"run_cuts_weights", "run_on_fsdp"}),
    ),
}
StateByView = Mapping[str, Mapping[str, Any]]


@check("optim", slot="transform", expensive=True)
@check("optim", slot="optimizer", expensive=True)
def check_one_rank_without_numbers(subject: ProgramSubject) -> None:
    """A NaN on one rank skips the update on both, and all state is what it was, to the bit.

    It is in the loss, or in the gradients alone.
    """
    value = subject if isinstance(subject, Method) else subject.tiny()
    for rank, found in enumerate(on_two_ranks(after_a_nan, value)):
        assert found, "no strategy goes with it on two ranks"
        for kind, one in found.items():
            assert one["skipped"], f"{kind}: rank {rank} makes an update of what is no number"
            assert not one["changed"], f"{kind}: a skipped update changes {one['changed']}"
            assert one["finite"], f"{kind}: the update after it leaves weights that are not finite"


def after_a_nan(ranks: Ranks, value: Method) -> dict[str, dict[str, Any]]:
    """At each of two ranks, by strategy and what has the NaN: what a skipped update changed, and
    the one after it."""
    found: dict[str, dict[str, Any]] = {}
    without: dict[str, type[Lossless]] = {"loss": Lossless, "gradient": Gradless}
    if "needs_no_gradients" in value.traits:
        del without["gradient"]
    own = TraitHolder("method", value.traits, value.info.excludes)
    for kind, (share, traits) in STRATEGIES.items():
        if any(True for _ in clashes([own, TraitHolder("run", traits)])):
            continue
        training = ProgramTraining(value, share(ranks))
        for step in (1, 2, 3):
            training.update(step)
        rounds = "gradient" not in without
        for place, (what, spoilt) in enumerate(without.items()):
            found[f"{kind}, {what}"] = spoilt_update(training, spoilt, 4 + 2 * place, rounds)
    return found


def spoilt_update(
    training: ProgramTraining, spoilt: type[Lossless], step: int, rounds: bool
) -> dict[str, Any]:
    """What an update changes of which all ranks but the first have a spoilt task, and the next."""
    before, task = copied(training), training.program.task
    if not training.strategy.ranks.first:
        training.program.task = spoilt(task)
    outcome = training.update(step)
    changed = changed_by(before, copied(training), rounds=rounds)
    training.program.task = task
    training.update(step + 1)
    training.program.flush()
    weights = [own_part(parameter)[0] for parameter in training.model.parameters()]
    return {
        "skipped": outcome.skipped,
        "changed": changed,
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
    }


def copied(training: ProgramTraining) -> StateByView:
    """All state as it is now: of sharded tensors this rank's part."""
    training.program.flush()
    return {
        view: {
            name: own_part(value)[0].detach().clone()
            if isinstance(value, Tensor)
            else copy.deepcopy(value)
            for name, value in entries.items()
        }
        for view, entries in training.registry.read().items()
    }


def changed_by(before: StateByView, after: StateByView, *, rounds: bool) -> list[str]:
    """The names of entries that are others now; logs may be longer, and transforms count updates.

    Args:
        rounds: whether weights may round, as those that are moved and moved back do.
    """
    names = []
    for view, entries in before.items():
        for name, old in entries.items():
            new = after[view].get(name)
            if (view, name) == ("transform", "updates"):
                continue
            if isinstance(old, Tensor) and isinstance(new, Tensor):
                new = new[: len(old)] if old.ndim else new
                close = rounds and view == "model"
                same = torch.allclose(old, new, 1e-4, 1e-6) if close else torch.equal(old, new)
            else:
                same = old == new
            names += [] if same else [f"{view}.{name}"]
    return names
