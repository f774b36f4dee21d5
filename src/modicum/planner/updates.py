"""What making an update out of gradients spends: the optimizer, and what stands before it."""

from __future__ import annotations

from dataclasses import replace

from modicum.core.contracts.ledger import ClassTreatment, Entry, Ledger, OptimizerQuery
from modicum.core.contracts.optimizers import OptimizerMethod
from modicum.core.errors import InputError
from modicum.core.ranks.layout import Layout
from modicum.optim.transform import NO_LAYERS, GradientTransform, TransformQuery
from modicum.planner.sharing import Model
from modicum.recipe import Recipe


def spent_in_updates(recipe: Recipe, model: Model, layout: Layout) -> Ledger:
    """The ledger of gradients, optimizer state and transforms, of the rank that has most.

    Raises:
        InputError: a transform finds no layer that it could work on.
    """
    optimizer, transform = recipe.method("optimizer"), recipe.method("transform")
    assert optimizer is not None
    trained, micro_batches = model.structure.trained, model.shape.micro_batches
    # Where every rank computes with copies, those add gradients up; the masters' come with the sum.
    held = 1 if layout.copies else micro_batches
    ledger = optimizer.ledger(OptimizerQuery(trained, layout.shards, held, batch=model.shape))
    if transform is not None:
        assert isinstance(transform, GradientTransform)
        positions = model.shape.positions
        at = TransformQuery(trained, layout.shards, micro_batches, layout.ranks, positions)
        if not at.layers:
            raise InputError(NO_LAYERS, field="transform.method", value=transform.info.name)
        ledger = one_after_the_other(transform.ledger(at), ledger)
    return ledger


def one_after_the_other(first: Ledger, second: Ledger) -> Ledger:
    """Both, of whose workspace in the step one is gone when the other comes."""
    there = second.map_entries(lambda entry: entry if _works(entry) else None).bytes()

    def beyond(entry: Entry) -> Entry | None:
        nonlocal there
        if not _works(entry):
            return entry
        gone = min(there, entry.bytes)
        there -= gone
        return replace(entry, bytes=entry.bytes - gone) if gone < entry.bytes else None

    return first.map_entries(beyond) + second


def _works(entry: Entry) -> bool:
    return (entry.kind, entry.phases) == ("workspace", ("step",))


def narrow_matrices(recipe: Recipe, model: Model) -> dict[str, int]:
    """The matrices that are narrower than the optimizer's rank, with their smaller width.

    The default rank is reduced to what fits.

    Raises:
        InputError: all are narrower than another rank, so there is none that it could project.
    """
    optimizer = recipe.method("optimizer")
    if not isinstance(optimizer, OptimizerMethod):
        return {}
    widths = optimizer.projects(OptimizerQuery(model.structure.trained))
    rank = optimizer.fields().get("rank", 0)
    default = recipe.methods()["optimizer"].defaults.get("rank")
    narrow = {name: width for name, width in widths.items() if width < rank}
    if narrow and len(narrow) == len(widths) and rank != default:
        problem = "above the smaller width of every matrix; the largest rank that fits one is"
        most = max(narrow.values())
        raise InputError(f"{problem} {most}", field="optimizer.rank", value=rank)
    return narrow


def thin_matrices(recipe: Recipe, model: Model) -> dict[str, int]:
    """The matrices of which the optimizer's density rounds to nothing, with their parts.

    Raises:
        InputError: it does so of all of them, and they would have a part all the same.
    """
    optimizer = recipe.method("optimizer")
    if not isinstance(optimizer, OptimizerMethod):
        return {}
    at = OptimizerQuery(model.structure.trained)
    thin = optimizer.rounds_away(at)
    every = [p for p in model.structure.trained if p.parameter_class == "matrix"]
    if thin and len(thin) == len(every):
        most = max(thin.values())
        problem = f"less than half of one of {most}, which the largest matrix has; take 0, or more"
        raise InputError(problem, field="optimizer.density", value=optimizer.fields()["density"])
    return thin


def treated(recipe: Recipe, model: Model) -> tuple[ClassTreatment, ...]:
    """What the optimizer does with each class of parameters; nothing, where it treats all alike."""
    optimizer = recipe.method("optimizer")
    if not isinstance(optimizer, OptimizerMethod):
        return ()
    return optimizer.treats(OptimizerQuery(model.structure.trained))
